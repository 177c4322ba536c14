"""What it saves to take the loss and its gradient in one forward pass instead of two.

Filters, gate and weights depend on log-probabilities. The two-pass form scores all micro-batches first, applies them
with the whole batch at hand, and then computes forward and backward again; the trainer does all at once. Both take the
same synthetic batch and weights, with sequences that the error filter and the gate reject; no ratio is shown unless
their gradients agree.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from swerve.cli.benches import Figure
from swerve.types import MachineError, SwerveError

if TYPE_CHECKING:
    from swerve.types import Group, PackedMicroBatch

TOLERANCE = 1e-4
"""Of a parameter's gradient, relative to its norm."""
_SHIFTS = (0.0, 0.0004, -0.0003, 0.01, 1.0)
"""Trainer less sampler, nats per token, from sequence to sequence: three that are kept, one gated, one filtered."""
_GROUP_SIZE = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares sizes."""
    sizes = {
        "row-length": (512, "token slots of a row, and the context"),
        "rows": (2, "rows of a micro-batch"),
        "groups": (8, f"groups of {_GROUP_SIZE} sequences"),
        "repetitions": (5, "of each form, in turns"),
    }
    for name, (default, text) in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="INT", help=f"{text} (%(default)s)")


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    """Measure both; see `swerve bench loss --help`."""
    if min(arguments.row_length, arguments.rows, arguments.groups, arguments.repetitions) < 1:
        raise SwerveError("bench loss: every size is a positive number")
    from swerve import parallel

    parallel.tune_cpu()
    began = time.perf_counter()
    forms = _Forms(arguments)
    error, name = forms.difference()
    if error > TOLERANCE:
        raise MachineError(
            f"bench loss: one pass and two differ by {error:.1e} of the norm of the gradient of {name}, more than "
            f"{TOLERANCE:g}: no ratio is given"
        )
    spent = time.perf_counter() - began

    def figure(name: str, value: float, unit: str, seconds: float, target: float | None = None) -> Figure:
        return Figure(
            name=name, value=value, unit=unit, count=arguments.repetitions, seconds=round(seconds, 3), target=target
        )

    yield figure("largest difference of a gradient", error, "of its norm", spent, TOLERANCE)
    for name, value in forms.kept().items():
        yield figure(name, value, "sequences", spent)
    seconds = forms.timed(arguments.repetitions)
    for form, of_form in seconds.items():
        median, spent = statistics.median(of_form), sum(of_form)
        yield figure(f"{form}: time", median, "s", spent)
        yield figure(f"{form}: slowest", max(of_form), "s", spent)
        yield figure(f"{form}: tokens", forms.num_tokens / median, "tokens/s", spent)
        yield figure(f"{form}: forward passes", forms.flops[form].forward / forms.flops["score"].forward, "passes", 0.0)
        yield figure(f"{form}: work", forms.flops[form].total / 1e9, "GFLOP", 0.0)
    one, two = (statistics.median(of_form) for of_form in seconds.values())
    flops = [forms.flops[form].total for form in seconds]
    yield figure("work of two passes / of one", flops[1] / flops[0], "x", 0.0)
    yield figure("time of two passes / of one", two / one, "x", sum(map(sum, seconds.values())))


class _Flops(NamedTuple):
    """Operations of matrix products, of the forward passes and in all."""

    forward: int
    total: int


class _Forms:
    """A batch, and both ways to its gradient."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        import jax

        from swerve import models
        from swerve.config.schema import Algorithm, Optimizer
        from swerve.trainer import Adam, SyntheticShape, make_batch, synthetic_groups
        from swerve.trainer.objective import Sums
        from swerve.trainer.programs import Accumulated, Objective, Programs
        from swerve.trainer.two_pass import TwoPasses, on_device

        context = arguments.row_length
        objective = Objective(
            config=models.TINY,
            algorithm=Algorithm(),
            temperature=1.0,
            context_length=context,
            freeze_router=True,
            router_aux_coefficient=0.0,
            execution=models.Execution(),
        )
        self.params = models.initialise(models.TINY, jax.random.key(0))
        self.two, self.programs = TwoPasses(objective), Programs(objective, Adam(settings=Optimizer()))
        self.on_device = on_device
        self.nothing = lambda: Accumulated(self.programs.zeros(self.params), Sums.zero())

        def packed(groups: Sequence[Group]) -> list[PackedMicroBatch]:
            batch = make_batch(
                groups, algorithm=objective.algorithm, context_length=context, row_length=context,
                rows_per_micro_batch=arguments.rows, weights_version=0,
            )  # fmt: skip
            return list(batch.packed.micro_batches)

        shape = SyntheticShape(context_length=context)
        groups = synthetic_groups(shape, arguments.groups, _GROUP_SIZE, vocab_size=models.TINY.vocab_size, seed=0)
        self.micro_batches = packed(self._sampled_like(groups, packed(groups)))
        self.num_tokens = sum(int((one.segment_ids > 0).sum()) for one in self.micro_batches)
        self.accumulated: Any = None
        self.flops = self._count()

    def _sampled_like(self, groups: Sequence[Group], micro_batches: Sequence[PackedMicroBatch]) -> list[Group]:
        """The groups as if the weights had sampled them, but for a shift of each sequence."""
        import numpy as np

        scored: dict[int, np.ndarray] = {}
        for one in micro_batches:
            lp = np.asarray(self.two.score(self.params, self.on_device(one)))
            for index in np.unique(one.sequence_ids[one.sequence_ids >= 0]):
                scored[int(index)] = lp[one.sequence_ids == index] - _SHIFTS[index % len(_SHIFTS)]
        numbers = iter(range(len(scored)))
        return [
            replace(
                group,
                trajectories=tuple(
                    replace(one, behaviour_logprobs=np.where(one.sampled, scored[next(numbers)], 0).astype(np.float32))
                    for one in group.trajectories
                ),
            )
            for group in groups
        ]

    def in_one(self) -> Any:
        """The gradient as the trainer takes it."""
        import jax

        self.accumulated = self.nothing()
        for one in self.micro_batches:
            self.accumulated, _ = self.programs.accumulate(self.params, None, self.accumulated, self.on_device(one))
        return jax.tree.map(lambda g: g / self.accumulated.sums.denominator, self.accumulated.gradients)

    def in_two(self) -> Any:
        """The gradient in two passes."""
        return self.two.gradient(self.params, self.micro_batches)

    def difference(self) -> tuple[float, str]:
        """Largest difference of both for a parameter, relative to the norm of its gradient, and its name."""
        import numpy as np

        from swerve import parallel

        found, expected = (parallel.flatten_names(form()) for form in (self.in_one, self.in_two))
        errors = {}
        for name, wanted in expected.items():
            norm, off = (float(np.linalg.norm(np.asarray(x).ravel())) for x in (wanted, found[name] - wanted))
            errors[name] = off / norm if norm else float("inf") if off else 0.0
        worst = max(errors, key=errors.__getitem__)
        return errors[worst], worst

    def kept(self) -> dict[str, int]:
        """Sequences after each filter of the one pass that ran last."""
        sums = self.accumulated.sums
        return {
            "sequences not cut by the context": int(sums.num_candidates),
            "sequences that the error filter keeps": int(sums.num_sequences),
            "sequences that the gate keeps": int(sums.num_gate_passed),
        }

    def timed(self, repetitions: int) -> dict[str, list[float]]:
        """Seconds of each form; both have been compiled by `difference`."""
        import jax

        forms: dict[str, Callable[[], Any]] = {"one pass": self.in_one, "two passes": self.in_two}
        seconds: dict[str, list[float]] = {name: [] for name in forms}
        for _ in range(repetitions):
            for name, form in forms.items():
                began = time.perf_counter()
                jax.block_until_ready(form())
                seconds[name].append(time.perf_counter() - began)
        return seconds

    def _count(self) -> dict[str, _Flops]:
        """What the programs of each form compute for the whole batch, read from their jaxprs."""
        import jax

        from swerve.planning.jaxpr import count_costs

        batch, nothing = self.on_device(self.micro_batches[0]), self.nothing()
        times = len(self.micro_batches)

        def of(program: Any, *arguments: Any) -> _Flops:
            costs = count_costs(jax.make_jaxpr(program)(*arguments), {"device": 1})
            forward = sum(work.flops for work in costs.work if work.direction == "forward")
            return _Flops(times * forward, times * sum(work.flops for work in costs.work))

        score = of(self.two.score, self.params, batch)
        again = of(self.two.add_gradient, self.params, batch, batch.advantages, nothing.gradients)
        one = of(self.programs.accumulate, self.params, None, nothing, batch)
        both = _Flops(score.forward + again.forward, score.total + again.total)
        return {"score": score, "one pass": one, "two passes": both}
