"""How fast the trainer alone trains: random weights, synthetic trajectories of the shape of a real run.

Step 0 compiles and is left out; the mean of the others counts. Token slots include padding, real tokens do not. Any
training recipe can be measured; without one it is the shape of the shipped policy on one device.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from swerve.cli.benches import Figure
from swerve.cli.benches._training import (
    add_training_arguments,
    check_steps,
    groups_of_step,
    random_trainer,
    recipe_of,
)

if TYPE_CHECKING:
    from swerve.trainer import StepStats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the recipe and the number of steps."""
    add_training_arguments(parser)
    parser.add_argument("--steps", type=int, default=5, metavar="INT", help="steps after the first one (%(default)s)")


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    """Measure everything; see `swerve bench trainer --help`."""
    check_steps("steps", arguments.steps, 1)
    recipe = recipe_of(arguments)
    from swerve.orchestrator import Stepper
    from swerve.telemetry import PhaseTimer

    trainer, config = random_trainer(recipe, arguments.seed)
    groups = [groups_of_step(recipe, config, arguments.seed, step) for step in range(arguments.steps + 1)]
    phases = PhaseTimer()
    stepper = Stepper(trainer, phases, pipelined=recipe.training.pipelined, staged=recipe.training.staged)
    num_devices, seconds, stats, spent = recipe.mesh.num_devices, [], [], []
    for step, of_step in enumerate(groups):
        began = time.perf_counter()
        with phases.phase("pack"):
            batch = stepper.prepared or trainer.prepare(of_step)
        stepper.begin(batch)
        following = groups[step + 1] if step < arguments.steps else None
        stats.append(
            stepper.finish(
                recipe.optimizer.learning_rate, lambda g=following: trainer.prepare(g, ahead=1) if g else None
            )
        )
        seconds.append(time.perf_counter() - began)
        spent.append(phases.lap())
        print(f"step {step} of {arguments.steps}: {seconds[-1]:.2f} s", file=sys.stderr, flush=True)
    measured, mean = seconds[1:], statistics.mean(seconds[1:])

    def figure(name: str, value: float, unit: str) -> Figure:
        return Figure(name=name, value=value, unit=unit, count=arguments.steps, seconds=round(sum(measured), 3))

    yield figure("step, mean", mean, "s")
    yield figure("step, fastest", min(measured), "s")
    yield figure("step, slowest", max(measured), "s")
    yield from _rates(stats[1:], measured, num_devices, figure)
    for phase in sorted({name for lap in spent[1:] for name in lap}):
        yield figure(f"phase {phase}, mean", statistics.mean(lap.get(phase, 0.0) for lap in spent[1:]), "s")
    yield Figure(name="first step, with compilation", value=seconds[0], unit="s", count=1, seconds=round(seconds[0], 3))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    yield figure("peak memory of the process", peak, "MiB")


def _rates(
    stats: list[StepStats], seconds: list[float], num_devices: int, figure: Callable[[str, float, str], Figure]
) -> Iterator[Figure]:
    total = sum(seconds) * num_devices
    slots, real = (sum(getattr(one.batch, name) for one in stats) for name in ("num_slots", "num_real_tokens"))
    yield figure("token slots per device", slots / total, "slots/s")
    yield figure("real tokens per device", real / total, "tokens/s")
    yield figure("padding share", 1 - real / slots, "of slots")
    yield figure("micro-batches of a step, mean", statistics.mean(one.batch.num_micro_batches for one in stats), "")
    yield figure("assignments dropped and used", sum(one.dropped_assignments_used for one in stats), "")
    yield figure("micro-batches replayed dropless", sum(one.dropless_replays for one in stats), "")
