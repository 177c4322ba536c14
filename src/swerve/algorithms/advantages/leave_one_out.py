"""Leave-one-out baseline with leave-one-out standard deviation, as the MLPerf reference computes it.

Differs from GRPO (Shao et al. 2024, arXiv:2402.03300), which subtracts the mean of the whole group and divides by its
standard deviation: here both statistics of attempt i are taken over the *other* attempts, so neither depends on r_i.
Differs from RLOO (Ahmadian et al. 2024, arXiv:2402.14740), which does not divide. An attempt whose others all agree
(a lone success, a lone failure) has sigma 0 and is not divided at all, rather than divided by epsilon.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swerve.types import Float32Array

EPSILON = 1e-6
"""Added to sigma before dividing."""


def leave_one_out_advantages(rewards: ArrayLike) -> Float32Array:
    """Return `r_i - b_i`, divided by `sigma_i + 1e-6` where `sigma_i > 0`.

    With `b_i` the mean of the other rewards, `sigma_i = sqrt((mean of the others' squares - b_i^2) (n-1)/(n-2))`.
    A group of two has a sigma of 0/0, which counts as 0; a group of one has no baseline and so no advantage.

    Args:
        rewards: `[n]`, one per attempt.

    Returns:
        Advantages, float32 `[n]`.
    """
    r: NDArray[np.float64] = np.asarray(rewards, np.float64)
    n = r.size
    if n < 2:
        return np.zeros(n, np.float32)
    baseline = (r.sum() - r) / (n - 1)
    centred = r - baseline
    if n == 2:
        return centred.astype(np.float32)
    others = np.broadcast_to(r, (n, n))[~np.eye(n, dtype=bool)].reshape(n, n - 1)
    # Rounding of the mean must not make a sigma of 1e-17 out of equal numbers: equality decides, not the variance.
    agree = others.min(axis=1) == others.max(axis=1)
    variance = np.mean((others - baseline[:, None]) ** 2, axis=1) * (n - 1) / (n - 2)
    sigma = np.where(agree, 0.0, np.sqrt(variance))
    scale: NDArray[np.float64] = np.where(sigma > 0, sigma + EPSILON, 1.0)
    return (centred / scale).astype(np.float32)
