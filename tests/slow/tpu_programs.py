"""Programs that slow tests compile for TPUs, and `python tpu_programs.py NAME TOPOLOGY MESH BUDGET`, which plans one.

It runs in the environment that has libtpu, so it is a program rather than a test: it prints the plan as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from planning.programs_under_test import step_programs

from swerve import kernels
from swerve.planning import Job, Options, make_plan, parse_topology, plan_as_json, run_job
from swerve.planning.job import Planned

TIME, HEADS, KV_HEADS, HEAD_DIM = 2048, 8, 2, 256
EXPERTS, CHOSEN, WIDTH, INNER = 16, 4, 512, 256


def small_step(recipe: Any, mesh: Mesh) -> dict[str, Planned]:
    """A step with remat layers, gathers, reductions and an update."""
    return step_programs(recipe, mesh, width=256, rows=65536)


def large_step(recipe: Any, mesh: Mesh) -> dict[str, Planned]:
    """The same, of gigabytes."""
    return step_programs(recipe, mesh, width=8192, rows=4096)


def kernel_programs(recipe: Any, mesh: Mesh) -> dict[str, Planned]:
    """Gradients through each TPU kernel that the model uses."""

    def attention(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
        return kernels.splash_attention(q, k, v, segments, segments).astype(jnp.float32).sum()

    def experts(x: jax.Array, gate_up: jax.Array, down: jax.Array, router: jax.Array) -> jax.Array:
        valid = jnp.ones(x.shape[0], bool)
        routing = kernels.route(x, router, valid, CHOSEN)
        capacity = x.shape[0] * CHOSEN
        out, _ = kernels.experts_grouped(x, routing, gate_up, down, valid, capacity=capacity)
        return out.astype(jnp.float32).sum()

    row = ((1, TIME, KV_HEADS, HEAD_DIM), jnp.bfloat16)
    return {
        "attention": _gradient(
            mesh, attention, 3, ((1, TIME, HEADS, HEAD_DIM), jnp.bfloat16), row, row, ((1, TIME), jnp.int32)
        ),
        "experts": _gradient(
            mesh,
            experts,
            4,
            ((TIME, WIDTH), jnp.bfloat16),
            ((EXPERTS, WIDTH, 2, INNER), jnp.bfloat16),
            ((EXPERTS, INNER, WIDTH), jnp.bfloat16),
            ((WIDTH, EXPERTS), jnp.float32),
        ),
    }


def ragged_programs(recipe: Any, mesh: Mesh) -> dict[str, Planned]:
    """The gradient of `ragged_dot`, which no kernel computes."""

    def product(x: jax.Array, w: jax.Array, sizes: jax.Array) -> jax.Array:
        return lax.ragged_dot(x, w, sizes).astype(jnp.float32).sum()

    shapes = ((TIME, WIDTH), jnp.bfloat16), ((EXPERTS, WIDTH, INNER), jnp.bfloat16), ((EXPERTS,), jnp.int32)
    return {"product": _gradient(mesh, product, 2, *shapes)}


def whole_mesh_gathers(recipe: Any, mesh: Mesh) -> dict[str, Planned]:
    """A weight gathered over every device at once."""

    def product(x: jax.Array, w: jax.Array, _: jax.Array) -> jax.Array:
        return (x @ lax.all_gather(w, ("fsdp", "expert"), tiled=True)).astype(jnp.float32).sum()

    split = PartitionSpec(("fsdp", "expert"))
    shapes = ((TIME, 4096), jnp.bfloat16), ((4096, 4096), jnp.bfloat16), ((8,), jnp.int32)
    return {"product": _gradient(mesh, product, 2, *shapes, specs=(PartitionSpec(), split, PartitionSpec()))}


def _gradient(mesh: Mesh, function: Any, num: int, *shapes: Any, specs: Any = None) -> Planned:
    specs = specs or (PartitionSpec(),) * len(shapes)
    gradient = jax.grad(function, argnums=tuple(range(num)))
    manual = jax.shard_map(gradient, mesh=mesh, in_specs=specs, out_specs=specs[:num], check_vma=False)
    arguments = tuple(
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for (shape, dtype), spec in zip(shapes, specs, strict=True)
    )
    return Planned(jitted=jax.jit(manual), arguments=arguments, kinds=("batch",) * len(shapes))


def main(name: str, topology_name: str, mesh: str, budget_mib: str, tier: str = "full") -> None:
    """Plans one of the above and prints the plan."""
    topology = parse_topology(topology_name).with_figures(budget_mib=int(budget_mib))
    sizes = json.loads(mesh)
    job = Job(
        recipe="", topology=topology_name, mesh=sizes, programs=f"tpu_programs:{name}", budget_mib=int(budget_mib)
    )
    options = Options(full=tier == "full", use_cache=False)
    results = run_job(job, options, lambda line: print(line, file=sys.stderr))
    print(json.dumps(plan_as_json(make_plan(topology, sizes, options.full, results))))


if __name__ == "__main__":
    main(*sys.argv[1:])
