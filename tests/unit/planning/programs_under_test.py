"""Programs small enough to count by hand, written the way those of the trainer are: one manual `shard_map`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swerve.planning.job import Planned

LAYERS, WIDTH, ROWS = 6, 64, 32
"""Scanned layers, width, and rows of the batch."""


def step_programs(recipe: Any, mesh: Mesh, width: int = WIDTH, rows: int = ROWS) -> dict[str, Planned]:
    """A step of `LAYERS` remat layers on a mesh of `fsdp` and `expert`: `micro_batch` and `update`."""

    def loss(weights: jax.Array, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
            with jax.named_scope("mixer"):
                return jnp.tanh(x @ lax.all_gather(w, "fsdp", tiled=True)), None

        y, _ = lax.scan(jax.checkpoint(layer), x, weights)
        return (y**2).sum()

    def micro_batch(weights: jax.Array, gradients: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        value, new = jax.value_and_grad(loss)(weights, x)
        return gradients + lax.psum(new, "expert"), lax.psum(value, ("fsdp", "expert"))

    def update(weights: jax.Array, moment: jax.Array, gradients: jax.Array) -> tuple[jax.Array, ...]:
        moment = 0.9 * moment + gradients
        return weights - 0.1 * moment, moment, jnp.zeros_like(gradients)

    held, by_row = PartitionSpec(None, "fsdp"), PartitionSpec(("fsdp", "expert"))
    manual = jax.shard_map(
        micro_batch, mesh=mesh, in_specs=(held, held, by_row), out_specs=(held, PartitionSpec()), check_vma=False
    )
    array = jax.ShapeDtypeStruct((LAYERS, width, width), jnp.float32, sharding=NamedSharding(mesh, held))
    batch = jax.ShapeDtypeStruct((rows, width), jnp.float32, sharding=NamedSharding(mesh, by_row))
    return {
        "micro_batch": Planned(
            jitted=jax.jit(manual, donate_argnums=1),
            arguments=(array, array, batch),
            kinds=("parameters", "gradients", "batch"),
            reference_flops=6.0 * LAYERS * width * width * rows,
        ),
        "update": Planned(
            jitted=jax.jit(update, donate_argnums=(0, 1, 2), out_shardings=NamedSharding(mesh, held)),
            arguments=(array, array, array),
            kinds=("parameters", "optimizer", "gradients"),
        ),
    }


def update_program(recipe: Any, mesh: Mesh) -> dict[str, Planned]:
    """The second of them alone."""
    return {"update": step_programs(recipe, mesh)["update"]}


def broken_programs(recipe: Any, mesh: Mesh) -> dict[str, Planned]:
    """What fails before it can be traced."""
    raise RuntimeError("no such model")
