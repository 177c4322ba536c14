"""How long devices are idle between two steps: the training loop on recorded groups, with a slow copy to the devices.

The same groups are trained on three ways, plainly, pipelined and staged, by the real loop and trainer; every
micro-batch takes its time to be copied. Idle time is read from a profiler's trace: of the stretch from a step's last
micro-batch to the end of the next step's first one, that in which no operation ran. No figure is given unless the
micro-batches, their order and the final parameters are the same to the last bit. Memory bandwidth is nobody's
bottleneck here, so the copy is slowed down by waiting.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import io
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from swerve.cli.benches import Figure
from swerve.cli.benches._training import (
    add_training_arguments,
    check_steps,
    groups_of_step,
    random_trainer,
    recipe_of,
)
from swerve.config import TrainRecipe
from swerve.config.schema import Checkpoint, Evaluation
from swerve.types import MachineError, SwerveError, Trajectory

if TYPE_CHECKING:
    from swerve.orchestrator.state import Attempts
    from swerve.trainer import GrpoTrainer

_WAYS = {"plain": (False, False), "pipelined": (True, False), "staged": (True, True)}
_TARGET = 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the recipe, the recording and the copy."""
    add_training_arguments(parser)
    parser.add_argument("--steps", type=int, default=5, metavar="INT", help="of each way (%(default)s)")
    parser.add_argument("--copy-s", type=float, default=0.25, metavar="S", help="seconds of a copy (%(default)s)")
    parser.add_argument(
        "--recorded", type=Path, metavar="FILE", help="trajectories.jsonl of a run whose steps to train on (synthetic)"
    )


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    """Measure everything; see `swerve bench boundary --help`."""
    check_steps("steps", arguments.steps, 2)
    if not 0 <= arguments.copy_s < 60:
        raise SwerveError(f"--copy-s {arguments.copy_s}: must be from 0 to 60")
    recipe = _loop_recipe(recipe_of(arguments), arguments.steps)
    recorded = _read(arguments.recorded, arguments.steps) if arguments.recorded else None
    copies = _Copies(arguments.copy_s)
    trainer, config = random_trainer(recipe, arguments.seed, copies.put)
    if recorded is None:
        recorded = [
            [group.trajectories for group in groups_of_step(recipe, config, arguments.seed, step)]
            for step in range(1, arguments.steps + 1)
        ]
    print("compiling", file=sys.stderr, flush=True)
    trainer.warm_up()
    start, outcomes = trainer.state(), {}
    for way in _WAYS:
        print(f"{way}: {arguments.steps} steps", file=sys.stderr, flush=True)
        trainer.restore(start)
        outcomes[way] = outcome = _run(trainer, recipe, way, recorded, copies)
        _require_same(way, outcome, outcomes["plain"])
        yield from _figures(way, outcome, arguments.copy_s)


class _Copies:
    """Copies to the devices that take their time, and a digest of all that was copied."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.digest = hashlib.sha256()

    def put(self, arrays: Any, sharding: Any) -> Any:
        """As `jax.device_put`, later."""
        import jax

        for name in sorted(arrays):
            self.digest.update(name.encode() + arrays[name].tobytes())
        time.sleep(self._seconds)
        return jax.device_put(arrays, sharding)


class _Outcome(NamedTuple):
    """What one way came to."""

    idle: list[float]
    steps: list[float]
    params: str
    copied: str


def _loop_recipe(recipe: TrainRecipe, num_steps: int) -> TrainRecipe:
    """The recipe with nothing in its loop but training."""
    return dataclasses.replace(
        recipe,
        training=dataclasses.replace(recipe.training, num_steps=num_steps, max_trajectory_age=1),
        algorithm=dataclasses.replace(recipe.algorithm, max_logprob_gap=1e9),  # weights are random
        evaluation=Evaluation(before=False, after=False),
        checkpoint=Checkpoint(every=0),
    )


def _read(path: Path, num_steps: int) -> list[Attempts]:
    """The episodes of a run's first steps, by task."""
    from swerve.telemetry import read_trajectories

    steps: dict[int, dict[str, list[Trajectory]]] = {}
    for step, one in read_trajectories(path, ("train",)):
        steps.setdefault(step, {}).setdefault(one.task_id, []).append(one)
    if len(steps) < num_steps:
        raise SwerveError(f"{path}: holds {len(steps)} training steps, --steps asks for {num_steps}: lower it")
    return [list(steps[step].values()) for step in sorted(steps)[:num_steps]]


def _run(
    trainer: GrpoTrainer, recipe: TrainRecipe, way: str, recorded: Sequence[Attempts], copies: _Copies
) -> _Outcome:
    """Train one way, with a profiler's eyes on it."""
    from swerve.checkpoint import DataPosition
    from swerve.cli.profiling import StepProfiler, read_profile
    from swerve.orchestrator import LoopRoles, LoopState, TrainingLoop
    from swerve.telemetry import Metrics, open_progress, read_metrics
    from swerve.weights import digest

    copies.digest = hashlib.sha256()
    num_steps = recipe.training.num_steps
    pipelined, staged = _WAYS[way]
    recipe = dataclasses.replace(
        recipe, training=dataclasses.replace(recipe.training, pipelined=pipelined, staged=staged)
    )

    def replay(step: int) -> asyncio.Future[Attempts]:
        there: asyncio.Future[Attempts] = asyncio.get_running_loop().create_future()
        there.set_result(recorded[step - 1])
        return there

    with tempfile.TemporaryDirectory(prefix="swerve-bench-") as name:
        directory = Path(name)
        profiler, metrics = StepProfiler(directory / "profile", 1, num_steps), Metrics(directory / "metrics.jsonl")
        nothing: Any = None
        roles = LoopRoles(
            episode=nothing,
            trainer=trainer,
            publisher=cast("Any", _Taker()),
            metrics=metrics,
            progress=open_progress("none", num_steps, io.StringIO()),
            trajectories=None,
            train_tasks=[nothing] * recipe.rollout.prompts_per_step,
            validation_tasks=[],
            profiler=profiler,
            replay=replay,
        )
        state = LoopState(position=DataPosition(num_tasks=recipe.rollout.prompts_per_step), gap_checked=True)
        try:
            asyncio.run(TrainingLoop(recipe, roles, state, lambda state, worth: None).run())
        finally:
            profiler.close()
            metrics.close()
        idle = read_profile(directory / "profile").idle_at_boundaries()
        steps = [float(row["step_s"]) for row in read_metrics(directory / "metrics.jsonl")]
    if len(idle) != num_steps - 1:
        raise MachineError(f"bench boundary: the trace shows {len(idle)} boundaries of {num_steps - 1}")
    return _Outcome(idle, steps, digest(trainer.params), copies.digest.hexdigest())


class _Taker:
    """Takes new weights as an engine does: it copies them."""

    params: Any = None

    def publish(self, params: Any, number: int) -> None:
        """Copies the weights."""
        import jax
        import jax.numpy as jnp

        del number
        self.params = jax.block_until_ready(jax.tree.map(lambda x: jnp.array(x, copy=True), params))


def _require_same(way: str, found: _Outcome, expected: _Outcome) -> None:
    for what, ours, theirs in (
        ("micro-batches or their order", found.copied, expected.copied),
        ("final parameters", found.params, expected.params),
    ):
        if ours != theirs:
            raise MachineError(f"bench boundary: {way}: {what} differ from those of the plain way: a fault of Swerve")


def _figures(way: str, outcome: _Outcome, copy_s: float) -> Iterator[Figure]:
    spent, count = round(sum(outcome.steps), 3), len(outcome.idle)
    idle, step = statistics.mean(outcome.idle), statistics.mean(outcome.steps[1:])
    target = _TARGET if way == "staged" else None
    name = f"{way}, copies of {copy_s:g} s"
    for label, value, unit, goal in (
        ("idle at a boundary, mean", idle, "s", None),
        ("idle at a boundary, longest", max(outcome.idle), "s", None),
        ("step, mean", step, "s", None),
        ("idle at a boundary", idle / step, "of a step", target),
    ):
        yield Figure(name=f"{name}: {label}", value=value, unit=unit, count=count, seconds=spent, target=goal)
