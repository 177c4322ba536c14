"""Evaluating a policy: every task, a fixed number of attempts, one report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swerve.evaluation.report import EvalReport, outcomes_of
from swerve.rollout import EpisodeRoles, EpisodeSettings, ProgressCallback, collect
from swerve.types import SwerveError, Task, Trajectory


async def evaluate(
    tasks: Sequence[Task],
    num_samples: int,
    *,
    roles: EpisodeRoles,
    settings: EpisodeSettings,
    seed: int,
    step: int = 0,
    retries: int = 2,
    max_concurrency: int | None = None,
    target_accuracy: float | None = None,
    checkpoint_step: int | None = None,
    checkpoint_timestamp_ms: int | None = None,
    samples_count: int | None = None,
    known: Mapping[tuple[str, int], Trajectory] | None = None,
    on_progress: ProgressCallback | None = None,
) -> EvalReport:
    """Play `num_samples` episodes of each task and report.

    Args:
        tasks: What to repair; each once.
        num_samples: Attempts per task.
        roles: Whom to work with; `roles.policy` is what is evaluated.
        settings: How to play.
        seed: Of the evaluation. The same seed and step give the same seeds to any policy, so that two reports differ
            by the policies alone.
        step: Tells evaluations of one run apart where they are to differ.
        retries: How often an attempt is repeated that failed for reasons of infrastructure or of time.
        max_concurrency: Episodes at once; as many as the policy admits if `None`.
        target_accuracy: For the report.
        checkpoint_step: For the report.
        checkpoint_timestamp_ms: For the report.
        samples_count: For the report.
        known: Attempts played before, by task and number; they are not played again.
        on_progress: Called when an attempt has ended; the way to keep trajectories.

    Raises:
        SwerveError: There is no task, or one stands in the list twice.
    """
    if not tasks:
        raise SwerveError("there is no task to evaluate on")
    if len({task.id for task in tasks}) != len(tasks):
        raise SwerveError("a task stands in the evaluation twice")
    groups = await collect(
        tasks,
        num_samples,
        roles=roles,
        settings=settings,
        seed=seed,
        step=step,
        retries=retries,
        max_concurrency=max_concurrency,
        known=known,
        on_progress=on_progress,
    )
    attempts = {task.id: group for task, group in zip(tasks, groups, strict=True)}
    return EvalReport(
        outcomes=outcomes_of(tasks, attempts, num_samples),
        attempts_per_instance=num_samples,
        target_accuracy=target_accuracy,
        checkpoint_step=checkpoint_step,
        checkpoint_timestamp_ms=checkpoint_timestamp_ms,
        samples_count=samples_count,
    )
