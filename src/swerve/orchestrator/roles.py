"""Those the loop works with."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from swerve.orchestrator.state import Attempts
from swerve.rollout import EpisodeRoles
from swerve.telemetry import Metrics, Progress, TrajectoryLog
from swerve.trainer import GrpoTrainer
from swerve.types import Task
from swerve.weights import WeightsPublisher


class Profiler(Protocol):
    """Records what the devices do in some steps."""

    def begin_step(self, step: int) -> None:
        """Starts, goes on, or ends, as this step wants it."""
        ...

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """Marks a block of the calling thread in the recording."""
        ...


class RunRecord(Protocol):
    """Keeps what the rules of a scored run want on record."""

    def run_starts(self) -> None:
        """Everything is compiled, and the first step is next."""
        ...

    def updated(self, step: int) -> None:
        """The weights have just been updated."""
        ...

    def step_done(self, step: int, numbers: Mapping[str, float]) -> None:
        """All of a step's metrics are known."""
        ...

    def block_ends(self) -> None:
        """No update follows."""
        ...


@dataclass(frozen=True, kw_only=True)
class LoopRoles:
    """Those the loop works with.

    Attributes:
        episode: Plays and grades episodes; its policy is the engine.
        trainer: Makes new weights.
        publisher: Takes them to the engine.
        metrics: Takes every number.
        progress: Shows what is going on.
        trajectories: Keeps every episode, unless `None`.
        train_tasks: In training order.
        validation_tasks: Held out.
        record: Keeps what a scored run puts on record; `None` in others.
        profiler: Records some steps, unless `None`.
        replay: Gives the recorded episodes of a step, by its number, in place of playing some.
    """

    episode: EpisodeRoles
    trainer: GrpoTrainer
    publisher: WeightsPublisher
    metrics: Metrics
    progress: Progress
    trajectories: TrajectoryLog | None
    train_tasks: Sequence[Task]
    validation_tasks: Sequence[Task]
    record: RunRecord | None = None
    profiler: Profiler | None = None
    replay: Callable[[int], Awaitable[Attempts]] | None = None
