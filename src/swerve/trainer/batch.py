"""From groups of trajectories to a packed batch with its numbers.

Two points are decided here: an attempt without a verdict is left out of its group's baseline and of the batch, and an
attempt that a filter of the loss rejects stays in its group's baseline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swerve import algorithms, packing
from swerve.config import fitting_rows
from swerve.config.schema import Algorithm
from swerve.packing import PackedBatch
from swerve.trainer.stats import BatchStats, mean, share
from swerve.types import BoolArray, EpisodeStatus, Float32Array, Group, SwerveError, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingBatch:
    """One step's input.

    Attributes:
        packed: Micro-batches of one fixed shape.
        stats: What the batch holds.
        weights_version: Number of the weights that the batch trains.
    """

    packed: PackedBatch
    stats: BatchStats
    weights_version: int


def make_group(trajectories: Sequence[Trajectory], advantage: str = "leave_one_out") -> Group:
    """Give the attempts at one task their advantages.

    Args:
        trajectories: All attempts, `n` of them; those without a reward get advantage 0 and enter no baseline.
        advantage: Name of the estimator.

    Returns:
        The group.

    Raises:
        SwerveError: There is no attempt, the attempts are of different tasks, or status and reward contradict.
    """
    tasks = {trajectory.task_id for trajectory in trajectories}
    if len(tasks) != 1:
        raise SwerveError(
            f"a group holds the attempts at one task, not at {len(tasks)}: {', '.join(sorted(tasks)[:4])}"
        )
    for one in trajectories:
        if one.status.is_valid_sample != (one.reward is not None):
            raise SwerveError(
                f"attempt {one.sample_index} at task {one.task_id} has status {one.status.name} and reward "
                f"{one.reward}: exactly the valid samples have a reward"
            )
    rewards = [trajectory.reward for trajectory in trajectories]
    return Group(
        task_id=tasks.pop(),
        trajectories=tuple(trajectories),
        advantages=algorithms.group_advantages(rewards, algorithms.ADVANTAGE_ESTIMATORS[advantage]),
    )


def check_routing(trajectory: Trajectory, num_layers: int, top_k: int, num_experts: int) -> None:
    """Refuse recorded routing that is not of the model or not of the tokens.

    Args:
        trajectory: One attempt; without routing it is never refused.
        num_layers: Layers of the model, each with experts.
        top_k: Experts that a token visits.
        num_experts: Experts of a layer.

    Raises:
        SwerveError: Tokens, layers or choices are not as many or not in that order, an expert does not exist, or a
            token has some of its choices only.
    """
    routing = trajectory.routing
    if routing is None:
        return
    name = f"attempt {trajectory.sample_index} at task {trajectory.task_id}"
    expected = (len(trajectory.tokens), num_layers, top_k)
    if routing.shape != expected:
        raise SwerveError(
            f"{name} has routing of shape {list(routing.shape)}; the model and its tokens ask for {list(expected)}: "
            "tokens, layers, choices"
        )
    if routing.size and (routing.max() >= num_experts or routing.min() < -1):
        raise SwerveError(
            f"{name} has routing to expert {routing.max() if routing.max() >= num_experts else routing.min()}; the "
            f"model has 0 to {num_experts - 1}, and -1 says that none was recorded"
        )
    recorded = routing >= 0
    if (recorded.any(-1) != recorded.all(-1)).any():
        raise SwerveError(f"{name} has tokens with some of their {top_k} experts recorded only: all or none must be")


def make_batch(
    groups: Sequence[Group],
    *,
    algorithm: Algorithm,
    context_length: int,
    row_length: int,
    rows_per_micro_batch: int,
    least_rows: int = 1,
    weights_version: int,
) -> TrainingBatch:
    """Pack the valid samples of a step's groups.

    Args:
        groups: The step's groups.
        algorithm: Which filters act.
        context_length: Tokens one episode can hold; the overlong filter leaves out sequences that fill it.
        row_length: Token slots of a row, unless a sequence is longer; see `fitting_rows`.
        rows_per_micro_batch: Rows of a micro-batch, likewise.
        least_rows: Rows below which a micro-batch does not divide over its devices.
        weights_version: Number of the weights that the batch trains.

    Returns:
        The batch.

    Raises:
        SwerveError: There is no valid sample, an advantage is not finite, or a token claims to come from weights that
            do not exist yet.
    """
    pairs = [
        (trajectory, advantage)
        for group in groups
        for trajectory, advantage in zip(group.trajectories, group.advantages, strict=True)
        if trajectory.status.is_valid_sample
    ]
    if not pairs:
        raise SwerveError("the batch holds no valid sample: every episode failed; see the errors of its trajectories")
    trajectories = [trajectory for trajectory, _ in pairs]
    advantages = np.array([advantage for _, advantage in pairs], np.float32)
    for one, advantage in pairs:
        if not np.isfinite(advantage):
            raise SwerveError(
                f"attempt {one.sample_index} at task {one.task_id} has advantage {advantage}: rewards must be finite"
            )
    lengths = np.array([len(trajectory.tokens) for trajectory in trajectories])
    keep = np.ones(len(pairs), np.bool_)
    if algorithm.overlong_filter:
        keep = algorithms.overlong_filter(lengths, context_length)
    skip = (advantages == 0.0) & algorithm.skip_zero_advantage
    computed = [one for one, skipped in zip(trajectories, skip, strict=True) if not skipped]
    rows, slots = fitting_rows(int(lengths.max()), row_length, rows_per_micro_batch, least_rows)
    packed = packing.pack(computed, advantages[~skip], slots, rows, keep=keep[~skip])
    stats = _batch_stats(groups, trajectories, advantages, keep, skip, packed, weights_version)
    return TrainingBatch(packed=packed, stats=stats, weights_version=weights_version)


def _batch_stats(
    groups: Sequence[Group],
    trajectories: Sequence[Trajectory],
    advantages: Float32Array,
    keep: BoolArray,
    skip: BoolArray,
    packed: PackedBatch,
    weights_version: int,
) -> BatchStats:
    num = len(trajectories)
    lengths = np.array([len(trajectory.tokens) for trajectory in trajectories])
    sampled = np.array([trajectory.num_sampled_tokens for trajectory in trajectories])
    lags = np.array([_staleness(trajectory, weights_version) for trajectory in trajectories])
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    malformed = sum(turn.num_malformed_calls for turn in turns)
    called = sum(any(turn.tool_names for turn in trajectory.turns) for trajectory in trajectories)
    statuses = [trajectory.status for trajectory in trajectories]
    return BatchStats(
        num_groups=len(groups),
        num_sequences=num,
        num_invalid=sum(len(group.trajectories) for group in groups) - num,
        reward_mean=mean(np.array([trajectory.reward for trajectory in trajectories], np.float64)),
        signal_share=share(sum(bool(group.advantages.any()) for group in groups), len(groups)),
        advantage_mean=mean(advantages),
        advantage_std=float(np.std(advantages, dtype=np.float64)),
        advantage_min=float(advantages.min()),
        advantage_max=float(advantages.max()),
        kept_overlong_share=mean(keep),
        tool_call_share=share(called, num),
        malformed_call_share=share(malformed, malformed + sum(len(turn.tool_names) for turn in turns)),
        truncation_share=share(statuses.count(EpisodeStatus.MAX_CONTEXT_LIMIT_REACHED), num),
        max_turns_share=share(statuses.count(EpisodeStatus.MAX_TURNS), num),
        turns_mean=share(len(turns), num),
        length_mean=mean(lengths),
        length_max=int(lengths.max()),
        sampled_tokens_mean=mean(sampled),
        staleness_histogram=tuple(np.bincount(lags).tolist()),
        staleness_mean=mean(lags),
        staleness_max=int(lags.max()),
        num_skipped_seqs=int((keep & skip & (sampled > 0)).sum()),
        num_skipped_tokens=int(sampled[keep & skip].sum()),
        num_micro_batches=packed.stats.num_micro_batches,
        num_slots=packed.stats.num_slots,
        num_real_tokens=packed.stats.num_real_tokens,
        padding_share=packed.stats.padding_share,
    )


def _staleness(trajectory: Trajectory, weights_version: int) -> int:
    """Return how many updates the oldest token of a trajectory lies behind the weights that it trains."""
    versions = trajectory.weights_versions[trajectory.sampled]
    if versions.size == 0:
        return 0
    if versions.min() < 0 or versions.max() > weights_version:
        raise SwerveError(
            f"attempt {trajectory.sample_index} at task {trajectory.task_id} has tokens of weights version "
            f"{versions.min()} to {versions.max()}, but version {weights_version} is being trained: "
            f"trajectories of another run, or an engine with the wrong version"
        )
    return int(weights_version - versions.min())
