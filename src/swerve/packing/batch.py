"""From trajectories to micro-batches of host arrays.

The plan is made at once, the arrays of a micro-batch when it is asked for: a large batch never lies in memory twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
from numpy.typing import NDArray

from swerve.packing.plan import PackingPlan, plan_rows
from swerve.types import BoolArray, Float32Array, PackedMicroBatch, SwerveError, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingStats:
    """What packing cost.

    Attributes:
        num_sequences: Sequences packed.
        num_rows: Rows, those that hold only padding included.
        num_micro_batches: Micro-batches.
        num_slots: Token slots of all micro-batches.
        num_real_tokens: Slots that hold a token of a sequence.
        padding_share: Share of all slots that is padding.
    """

    num_sequences: int
    num_rows: int
    num_micro_batches: int
    num_slots: int
    num_real_tokens: int
    padding_share: float


class MicroBatches(Sequence[PackedMicroBatch]):
    """The micro-batches of a batch, in order; each is built when it is asked for."""

    def __init__(
        self,
        trajectories: Sequence[Trajectory],
        advantages: Float32Array,
        keep: BoolArray,
        plan: PackingPlan,
        rows_per_micro_batch: int,
    ) -> None:
        """Keep references; copy nothing.

        Args:
            trajectories: `n` of them.
            advantages: float32 `[n]`.
            keep: bool `[n]`, false for a sequence that stays out of the loss.
            plan: Layout of the trajectories.
            rows_per_micro_batch: Rows of every micro-batch.
        """
        self._trajectories = trajectories
        self._advantages = advantages
        self._keep = keep
        self._plan = plan
        self._num_rows = rows_per_micro_batch

    def __len__(self) -> int:
        return -(-len(self._plan.rows) // self._num_rows)

    @overload
    def __getitem__(self, index: int) -> PackedMicroBatch: ...

    @overload
    def __getitem__(self, index: slice) -> list[PackedMicroBatch]: ...

    def __getitem__(self, index: int | slice) -> PackedMicroBatch | list[PackedMicroBatch]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        position = range(len(self))[index]
        return self._build(position)

    def _build(self, position: int) -> PackedMicroBatch:
        shape = (self._num_rows, self._plan.row_length)
        integers: dict[str, NDArray[np.int32]] = {
            name: np.zeros(shape, np.int32) for name in ("tokens", "segment_ids", "positions")
        }
        floats: dict[str, Float32Array] = {
            name: np.zeros(shape, np.float32) for name in ("loss_mask", "advantages", "behaviour_logprobs")
        }
        sequence_ids = np.full(shape, -1, np.int32)
        first = self._trajectories[0].routing
        routing = None if first is None else np.full((*shape, *first.shape[1:]), -1, np.int16)
        rows = self._plan.rows[position * self._num_rows : (position + 1) * self._num_rows]
        for row, placements in enumerate(rows):
            for segment, placement in enumerate(placements, start=1):
                trajectory = self._trajectories[placement.sequence]
                slots = (row, slice(placement.start, placement.start + placement.length))
                integers["tokens"][slots] = trajectory.tokens
                integers["segment_ids"][slots] = segment
                integers["positions"][slots] = np.arange(placement.length)
                floats["loss_mask"][slots] = trajectory.sampled & self._keep[placement.sequence]
                floats["advantages"][slots] = self._advantages[placement.sequence]
                floats["behaviour_logprobs"][slots] = np.where(trajectory.sampled, trajectory.behaviour_logprobs, 0.0)
                sequence_ids[slots] = placement.sequence
                if routing is not None and trajectory.routing is not None:
                    routing[slots] = trajectory.routing
        return PackedMicroBatch(
            tokens=integers["tokens"],
            segment_ids=integers["segment_ids"],
            positions=integers["positions"],
            loss_mask=floats["loss_mask"],
            advantages=floats["advantages"],
            behaviour_logprobs=floats["behaviour_logprobs"],
            sequence_ids=sequence_ids,
            routing=routing,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedBatch:
    """A batch, packed.

    Attributes:
        micro_batches: All of one shape, `[rows_per_micro_batch, row_length]`; the last is filled with empty rows.
        plan: Which sequence lies where.
        stats: What packing cost.
    """

    micro_batches: MicroBatches
    plan: PackingPlan
    stats: PackingStats


def pack(
    trajectories: Sequence[Trajectory],
    advantages: Float32Array,
    row_length: int,
    rows_per_micro_batch: int,
    *,
    keep: BoolArray | None = None,
) -> PackedBatch:
    """Pack trajectories into micro-batches of one fixed shape.

    Args:
        trajectories: Valid samples, `n` of them.
        advantages: float32 `[n]`.
        row_length: Token slots of one row.
        rows_per_micro_batch: Rows of every micro-batch.
        keep: bool `[n]`; a sequence with false takes its place in the rows, with an empty loss mask. All by default.

    Returns:
        The batch.

    Raises:
        SwerveError: A trajectory is not a valid sample, contradicts itself, or is longer than a row.
    """
    scores = np.asarray(advantages, np.float32)
    kept = np.ones(len(trajectories), np.bool_) if keep is None else np.asarray(keep, np.bool_)
    if scores.shape != (len(trajectories),) or kept.shape != scores.shape:
        raise SwerveError(
            f"{len(trajectories)} trajectories cannot be packed with advantages of shape {scores.shape} and a keep "
            f"mask of shape {kept.shape}: pass one of each per trajectory"
        )
    routed = bool(trajectories) and trajectories[0].routing is not None
    for trajectory in trajectories:
        _check(trajectory, row_length, routed)
    plan = plan_rows([len(trajectory.tokens) for trajectory in trajectories], row_length)
    micro_batches = MicroBatches(trajectories, scores, kept, plan, rows_per_micro_batch)
    num_slots = len(micro_batches) * rows_per_micro_batch * row_length
    return PackedBatch(
        micro_batches=micro_batches,
        plan=plan,
        stats=PackingStats(
            num_sequences=len(trajectories),
            num_rows=len(micro_batches) * rows_per_micro_batch,
            num_micro_batches=len(micro_batches),
            num_slots=num_slots,
            num_real_tokens=plan.num_tokens,
            padding_share=1.0 - plan.num_tokens / num_slots if num_slots else 0.0,
        ),
    )


def _check(trajectory: Trajectory, row_length: int, routed: bool) -> None:
    """Refuse a trajectory that cannot be trained on as it is."""
    name = f"trajectory {trajectory.sample_index} of task {trajectory.task_id}"
    length = len(trajectory.tokens)
    if not trajectory.status.is_valid_sample:
        raise SwerveError(f"{name} ended with {trajectory.status.name} and is no sample: leave it out of the batch")
    if not 0 < length <= row_length:
        raise SwerveError(
            f"{name} has {length} tokens, rows hold 1 to {row_length}: raise the trainer's row length to the episodes' "
            f"context length"
        )
    for field in ("sampled", "behaviour_logprobs", "weights_versions"):
        size = len(getattr(trajectory, field))
        if size != length:
            raise SwerveError(f"{name} has {length} tokens and {size} {field}: every token needs one")
    if trajectory.sampled[0]:
        raise SwerveError(f"{name} marks its first token as sampled: nothing comes before it to predict it from")
    routing = trajectory.routing
    if (routing is not None) != routed:
        raise SwerveError(f"{name} differs from the batch's first trajectory in carrying routing: all or none must")
    if routing is not None and (routing.ndim != 3 or len(routing) != length):
        raise SwerveError(
            f"{name} has routing of shape {routing.shape} for {length} tokens: expected [tokens, layers, k]"
        )
