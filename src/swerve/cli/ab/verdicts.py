"""Compares what the arms did, metric by metric, with bounds that were written down before.

A difference is relative to the reference. The noise is the difference that the reference shows from itself. Where it is
above a bound, nothing can be said about that bound: the metric fails only by a difference that exceeds the upper bound
when the noise does not, and passes only by one within the lower bound when the noise is within it too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from swerve.config.schema import AbBounds

if TYPE_CHECKING:
    from swerve.cli.ab.arms import Reference, StepRecord

Verdict = Literal["PASS", "FAIL", "INCONCLUSIVE"]
EXIT_CODES: dict[Verdict, int] = {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}
"""2 is for input that is at fault."""
STEPS = "steps"
"""Metric of a candidate that did not make all of them."""
SCALARS = ("loss", "token_logdiff_absmean", "entropy", "grad_norm")
"""Metrics that are a number of each step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """How far two arms are apart in one metric, where they are farthest.

    Attributes:
        relative: The difference, relative to the first; 0 where both are equal, inf where it cannot be told.
        first: Of the first arm; of a gradient or of weights, its norm.
        second: Of the second arm.
        step: Optimizer step, from 1.
        where: Parameter, empty for a number of the whole step.
    """

    relative: float
    first: float
    second: float
    step: int
    where: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A metric's verdict.

    Attributes:
        metric: Name.
        found: Candidate against reference.
        noise: Relative difference of the reference from itself.
        passes: Largest relative difference that passes.
        fails: Relative difference above which it fails.
        verdict: Of this metric.
    """

    metric: str
    found: Difference
    noise: float
    passes: float
    fails: float
    verdict: Verdict


def judge(difference: float, noise: float, passes: float, fails: float) -> Verdict:
    """The verdict on one metric; see the module.

    Args:
        difference: Relative, of the candidate; not-a-number counts as infinite, here and below.
        noise: Relative, of the reference from itself.
        passes: Largest difference that passes.
        fails: Difference above which it fails, at least `passes`.
    """
    if not noise <= fails:
        return "INCONCLUSIVE"
    if not difference <= fails:
        return "FAIL"
    return "PASS" if noise <= passes and difference <= passes else "INCONCLUSIVE"


def overall(comparisons: Sequence[Comparison]) -> Verdict:
    """FAIL if a metric fails, else INCONCLUSIVE if one is, else PASS."""
    verdicts = {one.verdict for one in comparisons}
    return "FAIL" if "FAIL" in verdicts else "INCONCLUSIVE" if "INCONCLUSIVE" in verdicts else "PASS"


def worst(comparisons: Sequence[Comparison]) -> Comparison:
    """The metric that decides the verdict: of those with it, the one farthest beyond its bound."""
    verdict = overall(comparisons)
    return max(
        (one for one in comparisons if one.verdict == verdict),
        key=lambda one: max(one.found.relative, one.noise) / max(one.fails, 1e-30),
    )


def compare(reference: Reference, candidate: Sequence[StepRecord], bounds: AbBounds) -> list[Comparison]:
    """Every metric's verdict.

    Args:
        reference: What the reference did, twice.
        candidate: What the candidate did; fewer steps, if it refused one.
        bounds: How far they may be apart.
    """
    steps = len(candidate), len(reference.records)
    found = _differences(reference, candidate) if candidate else {}
    noise = _differences(reference, reference.repeat)
    comparisons: list[Comparison] = []
    if steps[0] < steps[1]:
        missing = Difference(relative=math.inf, first=steps[1], second=steps[0], step=steps[0] + 1)
        comparisons.append(Comparison(metric=STEPS, found=missing, noise=0.0, passes=0.0, fails=0.0, verdict="FAIL"))
    for metric, difference in found.items():
        passes, fails = getattr(bounds, metric)
        level = noise[metric].relative
        verdict = judge(difference.relative, level, passes, fails)
        comparisons.append(
            Comparison(metric=metric, found=difference, noise=level, passes=passes, fails=fails, verdict=verdict)
        )
    return comparisons


def _differences(reference: Reference, other: Sequence[StepRecord]) -> dict[str, Difference]:
    """The largest difference from the reference in each metric, over the steps that both made."""
    kinds: dict[str, Callable[[int, StepRecord, StepRecord], Iterator[Difference]]] = {
        **{name: _of_number(name) for name in SCALARS},
        "gradient": _of_gradients,
        "weights": lambda step, a, b: iter(
            [_of_arrays(_change(a, reference.start), _change(b, reference.start), step)]
        ),
    }
    pairs = list(zip(range(1, len(other) + 1), reference.records, other, strict=False))
    return {
        name: max((one for pair in pairs for one in differences(*pair)), key=lambda one: one.relative)
        for name, differences in kinds.items()
    }


def _of_number(name: str) -> Callable[[int, StepRecord, StepRecord], Iterator[Difference]]:
    def differences(step: int, a: StepRecord, b: StepRecord) -> Iterator[Difference]:
        first, second = getattr(a.stats, name), getattr(b.stats, name)
        yield Difference(relative=_relative(abs(second - first), abs(first)), first=first, second=second, step=step)

    return differences


def _of_gradients(step: int, a: StepRecord, b: StepRecord) -> Iterator[Difference]:
    for name, first in a.gradient.items():
        yield _of_arrays(first, b.gradient[name], step, name)


def _of_arrays(first: np.ndarray, second: np.ndarray, step: int, where: str = "") -> Difference:
    norms = [float(np.linalg.norm(np.asarray(x, np.float64).ravel())) for x in (first, second, second - first)]
    return Difference(relative=_relative(norms[2], norms[0]), first=norms[0], second=norms[1], step=step, where=where)


def _change(record: StepRecord, start: dict[str, np.ndarray]) -> np.ndarray:
    """What the steps so far have added to all weights, float64, flat."""
    return np.concatenate(
        [(record.weights[name].astype(np.float64) - start[name].astype(np.float64)).ravel() for name in start]
    )


def _relative(difference: float, size: float) -> float:
    if difference == 0:
        return 0.0
    ratio = difference / size if size else math.inf
    return ratio if math.isfinite(ratio) else math.inf
