"""Those the loop works with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swerve.rollout import EpisodeRoles
from swerve.telemetry import Metrics, Progress, TrajectoryLog
from swerve.trainer import GrpoTrainer
from swerve.types import Task
from swerve.weights import WeightsPublisher


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
    """

    episode: EpisodeRoles
    trainer: GrpoTrainer
    publisher: WeightsPublisher
    metrics: Metrics
    progress: Progress
    trajectories: TrajectoryLog | None
    train_tasks: Sequence[Task]
    validation_tasks: Sequence[Task]
