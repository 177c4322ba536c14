"""What an evaluation found, with every attempt accounted for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swerve.evaluation.pass_at_k import mean, pass_at_k, pass_hat_k, standard_error
from swerve.types import EpisodeStatus, SwerveError, Task, Trajectory


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskOutcome:
    """What came of the attempts at one task.

    Attributes:
        task_id: The task.
        rewards: One per expected attempt, in order; `None` where it failed or is missing.
        statuses: How each attempt ended; `None` where it is missing.
    """

    task_id: str
    rewards: tuple[float | None, ...]
    statuses: tuple[EpisodeStatus | None, ...]

    @property
    def num_resolved(self) -> int:
        """Attempts with a positive reward."""
        return sum(reward is not None and reward > 0 for reward in self.rewards)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalReport:
    """Outcomes of all tasks, and what follows from them.

    Every expected attempt stays in every denominator. A crashed or missing one counts as not resolved and makes the
    report incomplete; an incomplete report is no accuracy.

    Attributes:
        outcomes: One per task, in the order of the tasks.
        attempts_per_instance: Attempts expected of each.
        target_accuracy: What pass@k, with k the attempts per instance, has to reach; or `None`.
        fatal_error: What ended the evaluation early, or empty.
        checkpoint_step: Optimizer step of the policy, or `None`.
        checkpoint_timestamp_ms: Unix time of its weight update in milliseconds, or `None`.
        samples_count: Training samples the policy had seen, or `None`.
        rcp_logged: The accuracy was written to the MLPerf log.
    """

    outcomes: tuple[TaskOutcome, ...]
    attempts_per_instance: int
    target_accuracy: float | None = None
    fatal_error: str = ""
    checkpoint_step: int | None = None
    checkpoint_timestamp_ms: int | None = None
    samples_count: int | None = None
    rcp_logged: bool = False

    def __post_init__(self) -> None:
        if self.attempts_per_instance < 1:
            raise SwerveError(f"an evaluation needs at least one attempt per task, not {self.attempts_per_instance}")
        for outcome in self.outcomes:
            if not len(outcome.rewards) == len(outcome.statuses) == self.attempts_per_instance:
                raise SwerveError(f"task {outcome.task_id} has other than {self.attempts_per_instance} attempts")

    @property
    def expected_attempts(self) -> int:
        """Attempts that make the report complete."""
        return len(self.outcomes) * self.attempts_per_instance

    @property
    def completed_attempts(self) -> int:
        """Attempts with a verdict."""
        return sum(reward is not None for outcome in self.outcomes for reward in outcome.rewards)

    @property
    def missing_attempts(self) -> int:
        """Attempts of which there is no record."""
        return sum(status is None for outcome in self.outcomes for status in outcome.statuses)

    @property
    def error_attempts(self) -> int:
        """Attempts that ended without a verdict."""
        return self.expected_attempts - self.completed_attempts - self.missing_attempts

    @property
    def resolved_attempts(self) -> int:
        """Attempts with a positive reward."""
        return sum(outcome.num_resolved for outcome in self.outcomes)

    @property
    def complete(self) -> bool:
        """Every expected attempt has a verdict, there is at least one, and nothing ended the evaluation early."""
        return bool(self.outcomes) and self.completed_attempts == self.expected_attempts and not self.fatal_error

    @property
    def avg_at_k(self) -> float:
        """Share of the expected attempts that resolved their task."""
        return self.resolved_attempts / self.expected_attempts if self.outcomes else 0.0

    @property
    def mean_reward(self) -> float:
        """Sum of rewards over expected attempts."""
        rewards = [reward or 0.0 for outcome in self.outcomes for reward in outcome.rewards]
        return mean(rewards)

    def pass_at(self, k: int) -> float:
        """pass@k: mean over tasks.

        Raises:
            SwerveError: There are fewer than k attempts per task.
        """
        return mean([pass_at_k(self.attempts_per_instance, outcome.num_resolved, k) for outcome in self.outcomes])

    def pass_at_standard_error(self, k: int) -> float:
        """Standard error of pass@k over tasks."""
        return standard_error(
            [pass_at_k(self.attempts_per_instance, outcome.num_resolved, k) for outcome in self.outcomes]
        )

    def pass_hat(self, k: int) -> float:
        """pass^k: mean over tasks of the probability that k attempts all resolve it."""
        return mean([pass_hat_k(self.attempts_per_instance, outcome.num_resolved, k) for outcome in self.outcomes])

    @property
    def accuracy(self) -> float:
        """pass@k with k the attempts per task: the share of tasks that any attempt resolved."""
        return self.pass_at(self.attempts_per_instance)

    @property
    def target_reached(self) -> bool:
        """The report is complete and its accuracy at least the target."""
        return self.complete and self.target_accuracy is not None and self.accuracy >= self.target_accuracy

    def summary(self) -> dict[str, Any]:
        """Everything but the single outcomes, as `summary.json` holds it."""
        n = self.attempts_per_instance
        ks = sorted({1, n} | ({4} if n >= 4 else set()))
        statuses = Counter(status for outcome in self.outcomes for status in outcome.statuses if status is not None)
        return {
            "instances": len(self.outcomes),
            "attempts_per_instance": n,
            "expected_attempts": self.expected_attempts,
            "completed_attempts": self.completed_attempts,
            "missing_attempts": self.missing_attempts,
            "error_attempts": self.error_attempts,
            "resolved_attempts": self.resolved_attempts,
            "avg_at_k": self.avg_at_k,
            "pass_at_k": {str(k): self.pass_at(k) for k in ks},
            "pass_at_k_standard_error": {str(k): self.pass_at_standard_error(k) for k in ks},
            "pass_hat_k": {str(k): self.pass_hat(k) for k in ks},
            "mean_reward": self.mean_reward,
            "status_counts": {status.value: statuses[status] for status in EpisodeStatus if statuses[status]},
            "complete": self.complete,
            "fatal_error": self.fatal_error or None,
            "rcp_logged": self.rcp_logged,
            "target_accuracy": self.target_accuracy,
            "target_reached": self.target_reached,
            "checkpoint_step": self.checkpoint_step,
            "checkpoint_timestamp_ms": self.checkpoint_timestamp_ms,
            "samples_count": self.samples_count,
        }


def outcomes_of(
    tasks: Sequence[Task], attempts: Mapping[str, Sequence[Trajectory]], attempts_per_instance: int
) -> tuple[TaskOutcome, ...]:
    """Sort trajectories by task and attempt; what is not there is missing, not left out.

    Args:
        tasks: All tasks that were to be attempted.
        attempts: Trajectories by task id, identified by their `sample_index`.
        attempts_per_instance: Attempts expected of each task.

    Raises:
        SwerveError: A trajectory belongs to no task or attempt, or two belong to the same.
    """
    unknown = sorted(set(attempts) - {task.id for task in tasks})
    if unknown:
        raise SwerveError(f"there are attempts at {unknown[0]}, which is not among the evaluated tasks")
    outcomes = []
    for task in tasks:
        by_index: dict[int, Trajectory] = {}
        for trajectory in attempts.get(task.id, ()):
            index = trajectory.sample_index
            if not 0 <= index < attempts_per_instance or index in by_index or trajectory.task_id != task.id:
                raise SwerveError(f"task {task.id}: attempt {index} is not expected, or there twice")
            by_index[index] = trajectory
        found = [by_index.get(index) for index in range(attempts_per_instance)]
        outcomes.append(
            TaskOutcome(
                task_id=task.id,
                rewards=tuple(trajectory and _reward(trajectory) for trajectory in found),
                statuses=tuple(trajectory and trajectory.status for trajectory in found),
            )
        )
    return tuple(outcomes)


def _reward(trajectory: Trajectory) -> float | None:
    return trajectory.reward if trajectory.status.is_valid_sample else None
