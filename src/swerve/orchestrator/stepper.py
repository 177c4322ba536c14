"""From one step's update to the next step's first micro-batch, with the devices idle as little as possible.

    plain      train k ............ update k | hand over, save | pack, copy, send k+1 | bookkeeping of k
    pipelined  train k .. pack k+1  update k | hand over, save |       copy, send k+1 | bookkeeping of k
    staged     train k .. pack k+1, hold k back, copy begins, update k | hand over, save | send k+1 | bookkeeping of k

The trainer is asked for the same things in the same order whichever it is, so parameters are equal to the last bit. A
micro-batch that the trainer does not take ahead of time is sent when its turn comes, and nothing is staged in the run
any more; one that fails once it was taken ends the run. Inside a step every micro-batch is copied while the one before
it computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from swerve.telemetry import PhaseTimer
from swerve.trainer import GrpoTrainer, PlacedMicroBatch, StagingRefusedError, StepStats, TrainingBatch
from swerve.types import PackedMicroBatch, SwerveError

Following = Callable[[], TrainingBatch | None]
"""The next step's batch, prepared for the weights after this step's update; `None` if its groups are not there yet."""


@dataclass(kw_only=True, slots=True)
class _Ahead:
    """What is ready of the next step."""

    batch: TrainingBatch
    first: PackedMicroBatch
    placed: PlacedMicroBatch | None = None


class Stepper:
    """Takes a trainer from batch to batch; `begin` and `finish` alternate.

    Args:
        trainer: Makes the updates.
        phases: Takes the time of each part: `pack`, `copy`, `send`, `compute`, `update`.
        pipelined: Pack the next step's first micro-batch while this step's last one computes.
        staged: Copy it to the devices before this step's update.
        say: Told why staging was turned off.
    """

    def __init__(
        self,
        trainer: GrpoTrainer,
        phases: PhaseTimer,
        *,
        pipelined: bool = False,
        staged: bool = False,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        if staged and not pipelined:
            raise SwerveError("a micro-batch cannot be staged before it is packed: staging needs pipelining")
        self._trainer = trainer
        self._phases = phases
        self._pipelined = pipelined
        self._staged = staged
        self._say = say
        self._ahead: _Ahead | None = None
        self._batch: TrainingBatch | None = None
        self._start = 0.0
        self._stopped = False

    @property
    def stages(self) -> bool:
        """Whether micro-batches are staged, which a refusal ends."""
        return self._staged

    @property
    def prepared(self) -> TrainingBatch | None:
        """The next step's batch where `finish` has prepared it."""
        return self._ahead.batch if self._ahead else None

    def begin(self, batch: TrainingBatch) -> None:
        """Send a step's first micro-batch to the devices; returns before they have computed it.

        Args:
            batch: `prepared` where there is one, else a batch for the weights as they are.
        """
        ahead, self._ahead = self._ahead, None
        if ahead and ahead.batch is not batch:
            raise SwerveError("another batch was prepared for this step")
        self._start = time.perf_counter()
        with self._phases.phase("send"):
            self._trainer.begin(batch)
        self._batch = batch
        if len(batch.packed.micro_batches):
            first = ahead.first if ahead else self._packed(batch, 0)
            self._send((ahead.placed if ahead else None) or self._trainer.place(first))

    def finish(
        self, learning_rate: float, following: Following = lambda: None, *, checkpoint_is_timed: bool = False
    ) -> StepStats:
        """Train on the rest of the step's micro-batches and make its update.

        Args:
            learning_rate: Of the update.
            following: Called while the last micro-batch computes, if pipelined.
            checkpoint_is_timed: Whether the moment of this update is on record, so that nothing may delay it.

        Returns:
            Every number of the step.
        """
        batch, self._batch = self._batch, None
        assert batch is not None
        trainer = self._trainer
        for index in range(1, len(batch.packed.micro_batches)):
            if self._stopped:
                raise SwerveError("training was stopped between two micro-batches")
            placed = trainer.place(self._packed(batch, index))
            with self._phases.phase("compute"):
                trainer.wait()
            self._send(placed)
        if self._pipelined and (prepared := following()) and len(prepared.packed.micro_batches):
            self._ahead = _Ahead(batch=prepared, first=self._packed(prepared, 0))
        if self._ahead and self._staged and not checkpoint_is_timed:
            trainer.defer_update(learning_rate, batch.stats, self._start)
            self._stage(self._ahead)
            return self._updated(trainer.finish_update)
        return self._updated(lambda: trainer.update(learning_rate, batch.stats, self._start))

    def stop(self) -> None:
        """Have a `finish` that runs in another thread end at the next micro-batch."""
        self._stopped = True

    def _updated(self, update: Callable[[], StepStats]) -> StepStats:
        with self._phases.phase("compute"):
            self._trainer.wait()
        with self._phases.phase("update"):
            return update()

    def _stage(self, ahead: _Ahead) -> None:
        try:
            ahead.placed = self._trainer.stage(ahead.first)
        except StagingRefusedError as error:
            self._staged = False
            self._say(f"warning: nothing is staged from here on: {error}")

    def _packed(self, batch: TrainingBatch, index: int) -> PackedMicroBatch:
        with self._phases.phase("pack"):
            return batch.packed.micro_batches[index]

    def _send(self, placed: PlacedMicroBatch) -> None:
        with self._phases.phase("copy"):
            placed.wait()
        with self._phases.phase("send"):
            self._trainer.accumulate(placed)
