"""The plain head, the twin of the sharded one: written for whole arrays, its gradient and its exchanges left to JAX.

All rows are scored together, some columns at a time; what the backward pass needs of a chunk is computed again. On a
mesh the shardings of chunks and table are pinned: unpinned, the compiler spreads the same lines in ways that differ by
a factor of six in work. Each chunk then gathers the table, and the devices that share a row all compute all of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class HeadLayout(NamedTuple):
    """Where a head's arrays live.

    Attributes:
        mesh: Axes of any names, in any order.
        tokens: Of arrays `[rows, time]`; hidden states have the same, and a whole width.
        table: Of the weight `[M, V]`.
    """

    mesh: Mesh
    tokens: PartitionSpec
    table: PartitionSpec


def plain_token_logprobs(
    hidden: jax.Array,
    weight: jax.Array,
    tokens: jax.Array,
    segment_ids: jax.Array,
    temperature: float | jax.Array = 1.0,
    *,
    chunk: int = 1024,
    used: jax.Array | None = None,
    layout: HeadLayout | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each token given those before it in its segment.

    Args:
        hidden: `[B, T, M]` from `forward`.
        weight: The head's, `[M, V]`.
        tokens: int32 `[B, T]`.
        segment_ids: int32 `[B, T]`.
        temperature: Divides the logits.
        chunk: Columns that are scored at a time.
        used: bool `[B, T]`, tokens whose scores are wanted: others get 0, and add nothing to any gradient whatever the
            hidden states before them hold; all where it is not given.
        layout: Where the arrays live; `None` pins nothing.

    Returns:
        Log-probabilities and entropies, nats, float32 `[B, T]`, as from `token_logprobs`.
    """
    rows, time = tokens.shape
    chunk = min(chunk, time)
    wanted = _earlier((segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0))
    if used is not None:
        wanted &= _earlier(used[:, 1:])

    def pinned(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return x if layout is None else lax.with_sharding_constraint(x, NamedSharding(layout.mesh, spec))

    of_rows = None if layout is None else entry(layout.tokens, 0)
    at_rest = PartitionSpec() if layout is None else layout.table

    def chunks(x: jax.Array) -> jax.Array:
        """`[B, T, ...]` to `[n, B, chunk, ...]`, every chunk whole along its columns."""
        x = jnp.pad(x, ((0, 0), (0, -time % chunk), *((0, 0),) * (x.ndim - 2)))
        x = jnp.moveaxis(x.reshape(rows, -1, chunk, *x.shape[2:]), 1, 0)
        return pinned(x, PartitionSpec(None, of_rows))

    @jax.checkpoint
    def score(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden, targets, wanted = inputs
        hidden = pinned(jnp.where(wanted[..., None], hidden, 0), PartitionSpec(of_rows))
        table = pinned(pinned(weight.astype(hidden.dtype), at_rest), PartitionSpec())  # at rest, then whole
        logits = jnp.einsum("btm,mv->btv", hidden, table, preferred_element_type=jnp.float32) / temperature
        logprobs = jax.nn.log_softmax(pinned(logits, PartitionSpec(of_rows)))
        chosen = jnp.take_along_axis(logprobs, targets[..., None], axis=-1)[..., 0]
        probs = jnp.exp(logprobs)
        entropy = -(probs * jnp.where(probs == 0, 0.0, logprobs)).sum(-1)
        return jnp.where(wanted, chosen, 0.0), jnp.where(wanted, entropy, 0.0)

    scores = lax.map(score, (chunks(hidden), chunks(_earlier(tokens[:, 1:])), chunks(wanted)))

    def moved(x: jax.Array) -> jax.Array:
        """`[n, B, chunk]` to `[B, T]`, each score at the token that it is of."""
        whole = jnp.moveaxis(x, 0, 1).reshape(rows, -1)[:, : time - 1]
        return pinned(jnp.pad(whole, ((0, 0), (1, 0))), PartitionSpec() if layout is None else layout.tokens)

    return moved(scores[0]), moved(scores[1])


def entry(spec: PartitionSpec, dim: int) -> Any:
    """What a spec says of one dimension; `None` where it says nothing."""
    return spec[dim] if dim < len(spec) else None


def _earlier(x: jax.Array) -> jax.Array:
    """`[B, T - 1]` of tokens 1.. at the places that they are predicted from, `[B, T]`."""
    return jnp.pad(x, ((0, 0), (0, 1)))
