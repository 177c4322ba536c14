"""Routed experts: a router that picks the top k, and a swiglu network per expert.

`experts_sorted` sorts the (token, choice) pairs by expert into blocks that belong to one expert each; every pair has a
place, so nothing is ever dropped, and a padding token has none. `experts_dense` runs every expert on every token: the
oracle.

Legend: N tokens, D width, E experts, J choices per token, F expert width, M blocks, L block length.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Routing(NamedTuple):
    """Where each token goes.

    Attributes:
        experts: int32 `[N, J]`.
        weights: float32 `[N, J]`, summing to 1 over J; 0 for padding tokens.
        aux: float32 scalar: E * sum over experts of (share of choices) * (mean probability), over valid tokens. 1 when
            balanced.
    """

    experts: jax.Array
    weights: jax.Array
    aux: jax.Array


def route(
    x_ND: jax.Array, router_DE: jax.Array, valid_N: jax.Array, top_k: int, replay_NJ: jax.Array | None = None
) -> Routing:
    """Softmax over experts in float32, the `top_k` largest, renormalised.

    Args:
        x_ND: Token activations.
        router_DE: Router weight.
        valid_N: bool, False for padding.
        top_k: Choices per token.
        replay_NJ: int, experts recorded by a sampler; an entry below 0 keeps the live choice. The weights always come
            from the live router, so it receives a gradient.

    Returns:
        The routing of every token.
    """
    logits = jnp.matmul(x_ND.astype(jnp.float32), router_DE.astype(jnp.float32), precision=lax.Precision.HIGHEST)
    probs = jax.nn.softmax(logits, axis=-1)
    _, experts = lax.top_k(lax.stop_gradient(probs), top_k)
    if replay_NJ is not None:
        experts = jnp.where(replay_NJ >= 0, replay_NJ.astype(experts.dtype), experts)
    num_experts = router_DE.shape[1]
    chosen = experts[..., None] == jnp.arange(num_experts)[None, None]  # [N, J, E]
    weights = jnp.where(chosen, probs[:, None, :], 0).sum(-1)
    weights = weights / weights.sum(-1, keepdims=True)
    mask = valid_N.astype(jnp.float32)
    count = jnp.maximum(mask.sum(), 1)
    share = (chosen.any(1) * mask[:, None]).sum(0) / (count * top_k)
    aux = num_experts * (share * (probs * mask[:, None]).sum(0) / count).sum()
    return Routing(experts, jnp.where(valid_N[:, None], weights, 0), aux)


def experts_dense(x_ND: jax.Array, routing: Routing, gate_up_ED2F: jax.Array, down_EFD: jax.Array) -> jax.Array:
    """Every expert on every token, weighted: the oracle.

    Args:
        x_ND: Token activations.
        routing: Where each token goes.
        gate_up_ED2F: Gate and up projections, `[E, D, 2, F]`.
        down_EFD: Down projection.

    Returns:
        `[N, D]`, zero for padding.
    """
    chosen = routing.experts[..., None] == jnp.arange(gate_up_ED2F.shape[0])[None, None]
    combine = jnp.where(chosen, routing.weights[..., None], 0).sum(1).astype(x_ND.dtype)  # [N, E]
    hidden = jnp.einsum("nd,edgf->gnef", x_ND, gate_up_ED2F)
    hidden = jax.nn.silu(hidden[0]) * hidden[1] * combine[..., None]
    return jnp.einsum("nef,efd->nd", hidden, down_EFD)


def experts_sorted(
    x_ND: jax.Array,
    routing: Routing,
    gate_up_ED2F: jax.Array,
    down_EFD: jax.Array,
    valid_N: jax.Array,
    *,
    block: int = 128,
) -> jax.Array:
    """The same as `experts_dense`, computing only what is routed.

    Args:
        x_ND: Token activations.
        routing: Where each token goes.
        gate_up_ED2F: Gate and up projections.
        down_EFD: Down projection.
        valid_N: bool, False for padding: such tokens take no place.
        block: Places of one block.

    Returns:
        `[N, D]`, zero for padding.
    """
    num_experts, width, _, inner = gate_up_ED2F.shape
    source, place, owner = plan_blocks(routing.experts, valid_N, num_experts, block)
    sorted_x = take_sorted(x_ND, source, place).reshape(-1, block, width)
    hidden = _owned(sorted_x, gate_up_ED2F.reshape(num_experts, width, 2 * inner), owner)
    hidden = lax.optimization_barrier(jax.nn.silu(hidden[..., :inner]) * hidden[..., inner:])
    out = _owned(hidden, down_EFD, owner)
    gathered = take_back(out.reshape(-1, width), source, place)  # [N, J, D]
    return (gathered * routing.weights[..., None].astype(gathered.dtype)).sum(1)


def num_blocks(num_pairs: int, num_experts: int, block: int) -> int:
    """Blocks that hold any distribution of `num_pairs` over the experts."""
    return (num_pairs + num_experts * (block - 1)) // block


def plan_blocks(
    experts_NJ: jax.Array, valid_N: jax.Array, num_experts: int, block: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Give every valid (token, choice) pair a place in a block of its expert.

    Returns:
        `source` int32 `[M * L]`: flat index of the pair in a place, `N * J` for an empty one;
        `place` int32 `[N, J]`: where the pair is, `M * L` for padding;
        `owner` int32 `[M]`: the expert of each block.
    """
    num_tokens, choices = experts_NJ.shape
    pairs = num_tokens * choices
    blocks = num_blocks(pairs, num_experts, block)
    expert = jnp.where(valid_N[:, None], experts_NJ, num_experts).reshape(-1)
    order = jnp.argsort(expert)
    ordered = expert[order]
    counts = (expert[:, None] == jnp.arange(num_experts)[None]).sum(0, dtype=jnp.int32)
    used = -(-counts // block)
    first_block = jnp.cumsum(used) - used
    first_pair = jnp.cumsum(counts) - counts
    offset = jnp.append(first_block * block - first_pair, 0)
    slot = jnp.where(ordered < num_experts, jnp.arange(pairs) + offset[ordered], blocks * block).astype(jnp.int32)
    order = order.astype(jnp.int32)
    source = jnp.full(blocks * block, pairs, jnp.int32).at[slot].set(order, mode="drop", unique_indices=False)
    place = jnp.zeros(pairs, jnp.int32).at[order].set(slot, unique_indices=True)
    owner = jnp.minimum((jnp.arange(blocks)[:, None] >= jnp.cumsum(used)[None]).sum(1), num_experts - 1)
    return source, place.reshape(num_tokens, choices), owner


@jax.custom_vjp
def take_sorted(x_ND: jax.Array, source: jax.Array, place_NJ: jax.Array) -> jax.Array:
    """Rows of `x` in their places, zeros in empty ones: `[M * L, D]`. Its gradient gathers, never scatters."""
    return jnp.take(x_ND, source // place_NJ.shape[1], axis=0, mode="fill", fill_value=0)


def _take_sorted_forward(x: jax.Array, source: jax.Array, place: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return take_sorted(x, source, place), (source, place)


def _take_sorted_backward(saved: tuple[jax.Array, ...], dout: jax.Array) -> tuple[jax.Array | None, ...]:
    source, place = saved
    return take_back(lax.optimization_barrier(dout), source, place).sum(1), None, None


take_sorted.defvjp(_take_sorted_forward, _take_sorted_backward)


@jax.custom_vjp
def take_back(rows: jax.Array, source: jax.Array, place_NJ: jax.Array) -> jax.Array:
    """The row of every pair, zeros for padding: `[N, J, D]`. Its gradient gathers, never scatters."""
    return jnp.take(rows, place_NJ, axis=0, mode="fill", fill_value=0)


def _take_back_forward(rows: jax.Array, source: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
    return take_back(rows, source, place), source


def _take_back_backward(source: jax.Array, dout: jax.Array) -> tuple[jax.Array | None, ...]:
    flat = dout.reshape(-1, dout.shape[-1])
    return jnp.take(flat, source, axis=0, mode="fill", fill_value=0), None, None


take_back.defvjp(_take_back_forward, _take_back_backward)


@jax.custom_vjp
def _owned(x_MLD: jax.Array, w_EDF: jax.Array, owner_M: jax.Array) -> jax.Array:
    """Each block times the matrix of its owner: `[M, L, F]`."""
    return jnp.einsum("mld,mdf->mlf", x_MLD, w_EDF[owner_M])


def _owned_forward(x: jax.Array, w: jax.Array, owner: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return _owned(x, w, owner), (x, w, owner)


def _owned_backward(saved: tuple[jax.Array, ...], dout: jax.Array) -> tuple[jax.Array | None, ...]:
    x, w, owner = saved
    dout = lax.optimization_barrier(dout)
    dx = jnp.einsum("mlf,mdf->mld", dout, w[owner])
    per_block = jnp.einsum("mld,mlf->mdf", x, dout)
    belongs = (owner[None] == jnp.arange(w.shape[0])[:, None]).astype(per_block.dtype)  # [E, M]
    return dx, (belongs @ per_block.reshape(per_block.shape[0], -1)).reshape(w.shape), None


_owned.defvjp(_owned_forward, _owned_backward)
