"""Faults that a comparison must notice, put into its candidate on purpose.

Each spoils one trainer while its context lasts; nothing outside of this module knows of them. Those of the head change
the exchanges of its table, which are traced while the candidate takes its first step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from swerve.config import TrainRecipe
from swerve.types import SwerveError

if TYPE_CHECKING:
    from swerve.cli.ab.arms import Fault
    from swerve.trainer import GrpoTrainer, StepStats


@contextlib.contextmanager
def _replaced(owner: Any, **members: Any) -> Iterator[None]:
    """Gives a class or an object other members for a while."""
    own = {name: vars(owner)[name] for name in members if name in vars(owner)}
    for name, member in members.items():
        setattr(owner, name, member)
    try:
        yield
    finally:
        for name in members:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)


@contextlib.contextmanager
def axis_order(trainer: GrpoTrainer) -> Iterator[None]:
    """The head's gradient is cut over the mesh axes in the wrong order: right in norm, wrong in place."""
    from swerve.models.scoring import Table

    right = Table.scatter_sum

    def scatter_sum(table: Table, whole: Any) -> Any:
        turned = tuple((dim, axes[::-1]) for dim, axes in reversed(table.steps))
        return right(table._replace(steps=turned), whole)

    with _replaced(Table, scatter_sum=scatter_sum):
        yield


@contextlib.contextmanager
def missing_gather(trainer: GrpoTrainer) -> Iterator[None]:
    """One exchange of the head's table is left out: each device takes its own part for those of the others."""
    import jax.numpy as jnp
    from jax import lax

    from swerve.models.scoring import Table

    right = Table.gather

    def gather(table: Table, part: Any) -> Any:
        (dim, axes), *rest = table.steps
        copies = [right(table._replace(steps=tuple(rest)), part)] * lax.axis_size(axes)
        return jnp.concatenate(copies, axis=dim)

    with _replaced(Table, gather=gather):
        yield


@contextlib.contextmanager
def gradient_twice(trainer: GrpoTrainer) -> Iterator[None]:
    """The head's gradient is summed over the devices, and then summed again while it is cut."""
    from jax import lax

    from swerve.models.scoring import Table

    right = Table.scatter_sum

    def scatter_sum(table: Table, whole: Any) -> Any:
        return right(table, lax.psum(whole, table.steps[0][1]))

    with _replaced(Table, scatter_sum=scatter_sum):
        yield


@contextlib.contextmanager
def stale_parameters(trainer: GrpoTrainer) -> Iterator[None]:
    """After an update the next step still computes with the parameters from before it."""
    import jax
    import jax.numpy as jnp

    right, updated = trainer.finish_update, []

    def finish_update() -> StepStats:
        if updated:
            trainer._params = updated.pop()  # what the last update made; this one goes on from there
        old = jax.tree.map(jnp.copy, trainer._params)
        stats = right()
        updated.append(trainer._params)
        trainer._params = old
        return stats

    with _replaced(trainer, finish_update=finish_update):
        yield


@contextlib.contextmanager
def dropped_micro_batch(trainer: GrpoTrainer) -> Iterator[None]:
    """The first micro-batch of every step goes missing on its way to the devices."""
    begin, accumulate, first = trainer.begin, trainer.accumulate, [True]

    def begins(batch: Any) -> None:
        first[0] = True
        begin(batch)

    def accumulates(micro_batch: Any) -> None:
        if not first[0]:
            accumulate(micro_batch)
        first[0] = False

    with _replaced(trainer, begin=begins, accumulate=accumulates):
        yield


BREAKS: Mapping[str, Fault] = MappingProxyType(
    {
        "axis-order": axis_order,
        "missing-gather": missing_gather,
        "gradient-twice": gradient_twice,
        "stale-parameters": stale_parameters,
        "dropped-micro-batch": dropped_micro_batch,
    }
)
"""Every fault by the name that the command line calls it."""


def check_break(name: str, candidate: TrainRecipe) -> None:
    """Refuse a fault that would change nothing.

    Args:
        name: One of `BREAKS`.
        candidate: The arm that is to be spoilt.

    Raises:
        SwerveError: The candidate has nothing that the fault spoils.
    """
    mesh, head = candidate.mesh, candidate.execution.head
    fault = f"--break {name}: the candidate"
    if name in ("axis-order", "missing-gather", "gradient-twice"):
        if head != "sharded":
            raise SwerveError(f'{fault} has execution.head = "{head}": set it to "sharded"')
        if name == "axis-order" and min(mesh.fsdp, mesh.expert) == 1:
            raise SwerveError(
                f"{fault}'s head lies along one axis, which has no order: raise mesh.fsdp and mesh.expert"
            )
        if mesh.fsdp * mesh.expert * mesh.context == 1:
            raise SwerveError(f"{fault} runs on one device, where the head's table is not spread: set a mesh")
    if name == "stale-parameters" and candidate.training.num_steps == 1:
        raise SwerveError(f"{fault} takes one step, and what it hands on is not looked at: raise input.num_steps")
