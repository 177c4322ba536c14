"""The head three ways, each a function of whole arrays on a mesh, and a process that measures one of them.

All give a loss, the sum over tokens, and its gradients by hidden states and table: `sharded` as the trainer runs it in
one manual program, `plain` its twin with pinned shardings, `full` with all logits at once and optax's cross-entropy.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swerve import models, parallel
from swerve.cli.benches._peer_transformers import answer_requests, timed
from swerve.models.sharding import RULES
from swerve.parallel import AXES, MeshShape
from swerve.planning.job import Planned
from swerve.trainer.programs import BATCH_SPEC

Head = Callable[[jax.Array, jax.Array, jax.Array], tuple[jax.Array, tuple[jax.Array, jax.Array]]]
"""Takes hidden states `[B, T, M]`, table `[M, V]` and tokens `[B, T]`; gives the loss and its two gradients."""

NAMES = ("sharded", "plain", "full")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Of the arrays that a head is given.

    Attributes:
        rows: Rows of tokens, one sequence each.
        row_length: Tokens of a row.
        width: Of the hidden states.
        vocabulary: Tokens to choose from.
        chunk: Tokens whose logits are live at a time.
        dtype: Of hidden states and table.
    """

    rows: int
    row_length: int
    width: int
    vocabulary: int
    chunk: int
    dtype: str


def make_heads(sizes: Sizes, mesh: Mesh) -> dict[str, Any]:
    """The three, jitted, by name.

    Args:
        sizes: Of the arrays.
        mesh: With the trainer's axes, in its order.
    """
    heads = {"sharded": _sharded(sizes, mesh), "plain": _plain(sizes, mesh), "full": _full(mesh)}
    batch, table = NamedSharding(mesh, BATCH_SPEC), NamedSharding(mesh, _table_spec(sizes, mesh))
    outputs = NamedSharding(mesh, PartitionSpec()), (batch, table)
    return {name: jax.jit(head, out_shardings=outputs) for name, head in heads.items()}


def arguments(sizes: Sizes, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Abstract hidden states, table and tokens, where the trainer has them."""
    batch, table = NamedSharding(mesh, BATCH_SPEC), NamedSharding(mesh, _table_spec(sizes, mesh))
    shape = sizes.rows, sizes.row_length
    return (
        jax.ShapeDtypeStruct((*shape, sizes.width), sizes.dtype, sharding=batch),
        jax.ShapeDtypeStruct((sizes.width, sizes.vocabulary), sizes.dtype, sharding=table),
        jax.ShapeDtypeStruct(shape, jnp.int32, sharding=batch),
    )


def planned_heads(recipe: None, mesh: Mesh, **sizes: Any) -> dict[str, Planned]:
    """The sharded head and the plain one, for a compiler of a topology that need not be there."""
    del recipe
    given = Sizes(**sizes)
    heads, kinds = make_heads(given, mesh), ("activations", "parameters", "batch")
    return {
        name: Planned(jitted=heads[name], arguments=arguments(given, mesh), kinds=kinds)
        for name in ("sharded", "plain")
    }


def _config(sizes: Sizes) -> models.Qwen35MoeConfig:
    return dataclasses.replace(
        models.TINY, hidden_size=sizes.width, vocab_size=sizes.vocabulary, tie_word_embeddings=False
    )


def _table_spec(sizes: Sizes, mesh: Mesh) -> PartitionSpec:
    return RULES.spec(models.parameters(_config(sizes))["head"], mesh, "head")


def _sharded(sizes: Sizes, mesh: Mesh) -> Head:
    config, table_spec = _config(sizes), _table_spec(sizes, mesh)
    shape = MeshShape(**dict(zip(AXES, mesh.axis_sizes, strict=True)))
    execution = models.Execution(mesh=shape, logprob_chunk=sizes.chunk)

    def of_device(hidden: jax.Array, part: jax.Array, tokens: jax.Array) -> Any:
        def loss(hidden: jax.Array, part: jax.Array) -> jax.Array:
            segments = jnp.ones_like(tokens)
            scores = models.token_logprobs({"head": part}, config, hidden, tokens, segments, execution=execution)
            return -scores[0].sum()

        value, gradients = jax.value_and_grad(loss, (0, 1))(hidden, part)
        return shape.sum(value), gradients

    return jax.shard_map(
        of_device,
        mesh=mesh,
        in_specs=(BATCH_SPEC, table_spec, BATCH_SPEC),
        out_specs=(PartitionSpec(), (BATCH_SPEC, table_spec)),
        check_vma=False,
    )


def _plain(sizes: Sizes, mesh: Mesh) -> Head:
    layout = models.HeadLayout(mesh, BATCH_SPEC, _table_spec(sizes, mesh))

    def loss(hidden: jax.Array, table: jax.Array, tokens: jax.Array) -> jax.Array:
        arrays = hidden, table, tokens, jnp.ones_like(tokens)
        return -models.plain_token_logprobs(*arrays, chunk=sizes.chunk, layout=layout)[0].sum()

    return jax.value_and_grad(loss, (0, 1))


def _full(mesh: Mesh) -> Head:
    def loss(hidden: jax.Array, table: jax.Array, tokens: jax.Array) -> jax.Array:
        logits = jnp.matmul(hidden, table, preferred_element_type=jnp.float32)
        logits = lax.with_sharding_constraint(logits, NamedSharding(mesh, BATCH_SPEC))
        following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, following)
        return losses[:, :-1].sum()

    return jax.value_and_grad(loss, (0, 1))


class _Arm:
    """One head, compiled and called on arrays drawn from a seed; the requests are those of `bench head`."""

    def __init__(self, head: str, sizes: dict[str, Any], mesh: dict[str, int]) -> None:
        parallel.tune_cpu()
        jax.config.update("jax_num_cpu_devices", math.prod(mesh.values()))
        jax.config.update("jax_enable_compilation_cache", False)
        self.sizes, self.mesh = Sizes(**sizes), MeshShape(**mesh).make()
        self.head = make_heads(self.sizes, self.mesh)[head]
        rng = np.random.default_rng(0)
        abstract = arguments(self.sizes, self.mesh)
        hidden, table = (rng.standard_normal(x.shape, np.float32) for x in abstract[:2])
        drawn = hidden, table / self.sizes.width**0.5, rng.integers(0, self.sizes.vocabulary, abstract[2].shape)
        self.arrays = [jax.device_put(x.astype(a.dtype), a.sharding) for x, a in zip(drawn, abstract, strict=True)]

    def versions(self) -> dict[str, Any]:
        """What runs."""
        return {"versions": f"jax {jax.__version__}, {self.mesh.size} x {jax.devices()[0].device_kind}"}

    def prepare(self, save: str) -> dict[str, Any]:
        """Compile, call once, and write loss and gradients to a file."""
        began = time.perf_counter()
        self.program = self.head.lower(*self.arrays).compile()
        seconds = time.perf_counter() - began
        loss, (dhidden, dtable) = self.program(*self.arrays)
        np.savez(save, loss=loss, hidden=dhidden, table=dtable)
        return {"seconds": seconds, "temporary_bytes": self.program.memory_analysis().temp_size_in_bytes}

    def run(self) -> dict[str, Any]:
        """Time one call."""
        gc.collect()
        return timed(lambda: jax.block_until_ready(self.program(*self.arrays)))


if __name__ == "__main__":
    answer_requests(_Arm)
