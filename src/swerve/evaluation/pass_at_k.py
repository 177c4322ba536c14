"""pass@k and its relatives, exactly.

Of n attempts at a task, c resolved it. Draw k of the n without replacement:

    pass@k = 1 - C(n-c, k) / C(n, k)    at least one of them resolved it (for n = k: any of the attempts did)
    pass^k =     C(c, k)   / C(n, k)    all of them did
    avg@n  = c / n

An attempt that crashed, or is missing, is one of the n and not one of the c. Fewer than k attempts are an error, never
an extrapolation. Source: Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1; there is no
bootstrap here, which would draw with replacement.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from swerve.types import SwerveError


def pass_at_k(num_attempts: int, num_resolved: int, k: int) -> float:
    """Probability that at least one of k attempts, drawn of those made, resolved the task.

    Raises:
        SwerveError: There are fewer than k attempts.
    """
    _check(num_attempts, num_resolved, k)
    return 1.0 - math.comb(num_attempts - num_resolved, k) / math.comb(num_attempts, k)


def pass_hat_k(num_attempts: int, num_resolved: int, k: int) -> float:
    """Probability that all of k attempts, drawn of those made, resolved the task.

    Raises:
        SwerveError: There are fewer than k attempts.
    """
    _check(num_attempts, num_resolved, k)
    return math.comb(num_resolved, k) / math.comb(num_attempts, k)


def mean(values: Sequence[float]) -> float:
    """Mean over tasks, summed without round-off; of no tasks at all it is 0."""
    return math.fsum(values) / len(values) if values else 0.0


def standard_error(values: Sequence[float]) -> float:
    """Standard error of the mean over tasks; 0 for fewer than two."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return math.sqrt(math.fsum((value - centre) ** 2 for value in values) / (len(values) - 1) / len(values))


def _check(num_attempts: int, num_resolved: int, k: int) -> None:
    if k < 1 or num_attempts < k:
        raise SwerveError(
            f"pass@{k} needs at least {max(k, 1)} attempts per task, there are {num_attempts}: sample more"
        )
    if not 0 <= num_resolved <= num_attempts:
        raise SwerveError(f"{num_resolved} of {num_attempts} attempts cannot have been resolved")
