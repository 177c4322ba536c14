"""Evaluates one policy on held-out tasks, and keeps every attempt, so that it can be stopped and gone on with."""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swerve.config import TrainRecipe, flatten
from swerve.telemetry import TrajectoryLog, open_progress, read_trajectories, write_json
from swerve.types import SwerveError, Task, Trajectory

if TYPE_CHECKING:
    from swerve.evaluation import EvalReport
    from swerve.mlperf.manifest import EvalCheckpoint
    from swerve.rollout import Progress

SUMMARY, ATTEMPTS, IDENTITY = "summary.json", "attempts.jsonl", "evaluation.json"
_COUNTS = ("rollout.", "evaluation.", "agent.", "sandbox.", "tasks.", "policy.", "engine.kind")
"""Settings that an evaluation depends on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluated:
    """What is evaluated, beside the policy.

    Attributes:
        recipe: Tasks, agent, sampling.
        tasks: The held-out tasks.
        checkpoint: Line of a manifest, or `None` for a policy of no scored run.
        weights: Checkpoint of a run, in place of the policy's weights.
        out: Where attempts and summary go; `None` keeps nothing.
    """

    recipe: TrainRecipe
    tasks: Sequence[Task]
    checkpoint: EvalCheckpoint | None = None
    weights: Path | None = None
    out: Path | None = None


async def evaluate_policy(evaluated: Evaluated) -> EvalReport:
    """Play every attempt that has not been played before, and report on all.

    Raises:
        SwerveError: The policy cannot be read, or `out` holds attempts of another evaluation.
    """
    from swerve.cli.composition import episode_roles, load_policy, make_engine, prepare_jax, prove_weights
    from swerve.evaluation import evaluate
    from swerve.orchestrator import EVALUATION_SEED, evaluation_settings

    prepare_jax()
    recipe, checkpoint, out = evaluated.recipe, evaluated.checkpoint, evaluated.out
    known = _begin(evaluated, out) if out else {}
    policy = load_policy(_policy(recipe, checkpoint), recipe.run.seed)
    params = _params(evaluated.weights)
    watch = _Watch(recipe.telemetry.progress)
    kept = TrajectoryLog(out / ATTEMPTS) if out else None

    def ended(progress: Progress) -> None:
        watch.ended(progress)
        if kept and not progress.will_retry:
            kept.append(checkpoint.step if checkpoint else 0, "evaluation", [progress.trajectory])

    try:
        # One batch size alone: an attempt is then the same to the last bit whoever else is played.
        sizes = (recipe.rollout.num_slots,) if out else None
        engine = make_engine(policy, recipe, params=params, batch_sizes=sizes)
        async with episode_roles(recipe, evaluated.tasks, policy.tokenizer, engine) as roles:
            prove_weights(engine, policy, params, recipe, evaluated.tasks[0])
            began_ms, began = time.time_ns() // 1_000_000, time.perf_counter()
            report = await evaluate(
                evaluated.tasks,
                recipe.evaluation.attempts,
                roles=roles,
                settings=evaluation_settings(recipe),
                seed=EVALUATION_SEED,
                retries=recipe.rollout.retries,
                target_accuracy=checkpoint.target_accuracy if checkpoint else None,
                checkpoint_step=checkpoint.step if checkpoint else None,
                checkpoint_timestamp_ms=checkpoint.timestamp_ms if checkpoint else None,
                samples_count=checkpoint.samples_count if checkpoint else None,
                known=known,
                on_progress=ended,
            )
            seconds = time.perf_counter() - began
    finally:
        watch.close()
        if kept:
            kept.close()
    if out:
        write_json(out / SUMMARY, {**report.summary(), "began_ms": began_ms, "seconds": seconds})
    return report


def _policy(recipe: TrainRecipe, checkpoint: EvalCheckpoint | None) -> Any:
    """The policy that is evaluated: the recipe's, or the files that a manifest names, every byte of them checked."""
    from swerve.checkpoint import verify_files

    if checkpoint is None:
        return recipe.policy
    verify_files(Path(checkpoint.checkpoint_path))
    return dataclasses.replace(
        recipe.policy, checkpoint=checkpoint.checkpoint_path, model="checkpoint", random_weights=False
    )


def _params(weights: Path | None) -> Any:
    from swerve.cli.commands.checkpoint import read_checkpoint

    return read_checkpoint(weights).params if weights else None


def _begin(evaluated: Evaluated, out: Path) -> Mapping[tuple[str, int], Trajectory]:
    """Claim a directory for an evaluation; attempts with a verdict that it holds already."""
    settings = {key: value for key, value in flatten(evaluated.recipe).items() if key.startswith(_COUNTS)}
    checkpoint = dataclasses.asdict(evaluated.checkpoint) if evaluated.checkpoint else None
    tasks = [task.id for task in evaluated.tasks]
    weights = str(evaluated.weights) if evaluated.weights else None
    identity = {"settings": settings, "checkpoint": checkpoint, "weights": weights, "tasks": tasks}
    identity = json.loads(json.dumps(identity, default=str))
    out.mkdir(parents=True, exist_ok=True)
    path = out / IDENTITY
    if path.exists():
        if json.loads(path.read_text(encoding="utf-8")) != identity:
            raise SwerveError(f"{out}: holds attempts of another evaluation ({path} says which): name an empty folder")
    elif any(out.iterdir()):
        raise SwerveError(f"{out}: holds something that is no evaluation: name an empty folder")
    else:
        write_json(path, identity)
    ended = (one for _, one in read_trajectories(out / ATTEMPTS)) if (out / ATTEMPTS).exists() else ()
    return {(one.task_id, one.sample_index): one for one in ended if one.status.is_valid_sample}


class _Watch:
    """Shows how far an evaluation is, when it will be through, and what fails for the first time."""

    def __init__(self, mode: str) -> None:
        self._progress = open_progress(mode, 1, sys.stderr)
        self._causes: Counter[str] = Counter()
        self._began = time.monotonic()
        self._first: int | None = None

    def ended(self, done: Progress) -> None:
        if self._first is None:
            self._first = done.num_done - 1
        played = done.num_done - self._first
        left = (time.monotonic() - self._began) / max(played, 1) * (done.num_total - done.num_done)
        self._progress.waiting(f"episodes, {left:.0f} s left,", done.num_done, done.num_total)
        if error := done.trajectory.error:
            self._causes[error] += 1
            if self._causes[error] == 1:
                self._progress.say(f"{done.trajectory.status.value}: {error}")

    def close(self) -> None:
        self._progress.close()
