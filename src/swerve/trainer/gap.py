"""Whether sampler and trainer agree on the probability of the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swerve.types import Float32Array, SwerveError, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplerTrainerGap:
    """Difference of behaviour and trainer log-probabilities over the sampled tokens of some trajectories.

    Attributes:
        mean: Mean of |lp - lp_gen|, nats, over `num_tokens`.
        max: Largest |lp - lp_gen|, nats.
        num_tokens: Sampled tokens compared.
        worst: Where the largest lies: task, attempt and token index.
    """

    mean: float
    max: float
    num_tokens: int
    worst: str


def measure_gap(trajectories: Sequence[Trajectory], logprobs: Sequence[Float32Array]) -> SamplerTrainerGap:
    """Compare recorded with recomputed log-probabilities.

    Args:
        trajectories: With the sampler's log-probabilities, `[T]` each.
        logprobs: The trainer's for the same tokens, `[T]` each.

    Returns:
        The gap; a value that is not a number counts as infinite.
    """
    total, count, largest, worst = 0.0, 0, 0.0, ""
    for trajectory, scored in zip(trajectories, logprobs, strict=True):
        gaps = np.abs(scored.astype(np.float64) - trajectory.behaviour_logprobs)[trajectory.sampled]
        if gaps.size == 0:
            continue
        gaps = np.where(np.isnan(gaps), np.inf, gaps)
        total, count = total + float(gaps.sum()), count + gaps.size
        if gaps.max() > largest or not worst:
            largest = float(gaps.max())
            token = int(np.flatnonzero(trajectory.sampled)[gaps.argmax()])
            worst = f"task {trajectory.task_id}, attempt {trajectory.sample_index}, token {token}"
    return SamplerTrainerGap(mean=total / count if count else 0.0, max=largest, num_tokens=count, worst=worst)


def check_gap(gap: SamplerTrainerGap, limit: float) -> None:
    """Refuse to train on what another distribution sampled.

    Args:
        gap: As measured.
        limit: Largest mean, nats per token.

    Raises:
        SwerveError: The mean exceeds the limit or no token could be compared.
    """
    if gap.num_tokens == 0:
        raise SwerveError("sampler and trainer cannot be compared: the trajectories hold no sampled token")
    if not gap.mean <= limit:
        raise SwerveError(
            f"sampler and trainer disagree by {gap.mean:.2e} nats per token on average (largest {gap.max:.2e}, "
            f"{gap.worst}; limit algorithm.max_logprob_gap = {limit:g}): their weights, temperature or masks differ"
        )
