"""Routed experts: a router that picks the top k, and a swiglu network per expert.

`experts_sorted` sorts the (token, choice) pairs by expert into blocks that belong to one expert each; a padding token
has no place. `experts_dense` runs every expert on every token: the oracle.

A device may hold some of the experts only: pairs of others have no place on it. It may also compute a limited number of
pairs, its capacity; those beyond it are counted as dropped, and whoever uses the result must look at that count.
Without a capacity every pair has a place.

Legend: N tokens, D width, E experts, J choices per token, F expert width, M blocks, L block length.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name


class Load(NamedTuple):
    """How tokens are spread over experts: sums over valid tokens, which add up over chunks and devices.

    Attributes:
        choices: float32 `[E]`, tokens that chose the expert.
        probabilities: float32 `[E]`, sum of the router's probabilities.
        tokens: float32 scalar.
    """

    choices: jax.Array
    probabilities: jax.Array
    tokens: jax.Array

    def balance(self, top_k: int) -> jax.Array:
        """E times the sum over experts of (share of choices) * (mean probability): 1 when balanced; `[...]`."""
        count = jnp.maximum(self.tokens, 1)[..., None]
        share = self.choices / (count * top_k)
        return self.choices.shape[-1] * (share * self.probabilities / count).sum(-1)


class Routing(NamedTuple):
    """Where each token goes.

    Attributes:
        experts: int32 `[N, J]`.
        weights: float32 `[N, J]`, summing to 1 over J; 0 for padding tokens.
        load: Of the experts.
    """

    experts: jax.Array
    weights: jax.Array
    load: Load


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
    load = Load((chosen.any(1) * mask[:, None]).sum(0), (probs * mask[:, None]).sum(0), mask.sum())
    return Routing(experts, jnp.where(valid_N[:, None], weights, 0), load)


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
    first: jax.Array | int = 0,
    capacity: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The same as `experts_dense`, computing only what is routed.

    Args:
        x_ND: Token activations.
        routing: Where each token goes.
        gate_up_ED2F: Gate and up projections of the experts held here.
        down_EFD: Down projection.
        valid_N: bool, False for padding: such tokens take no place.
        block: Places of one block.
        first: Number of the first expert held here.
        capacity: Pairs computed at most; all if `None`.

    Returns:
        `[N, D]`, what the experts held here contribute, zero for padding; and the pairs dropped, int32 scalar.
    """
    num_experts, width, _, inner = gate_up_ED2F.shape
    plan = plan_blocks(routing.experts - first, valid_N, num_experts, block, capacity)
    sorted_x = take_sorted(x_ND, plan.source, plan.place).reshape(-1, block, width)
    hidden = _owned(sorted_x, gate_up_ED2F.reshape(num_experts, width, 2 * inner), plan.owner)
    hidden = lax.optimization_barrier(jax.nn.silu(hidden[..., :inner]) * hidden[..., inner:])
    hidden = checkpoint_name(hidden, "expert_hidden")
    out = _owned(hidden, down_EFD, plan.owner)
    return combine(out.reshape(-1, width), routing.weights, plan.source, plan.place), plan.dropped


def capacity_of(num_tokens: int, top_k: int, num_shards: int, buffer_factor: float | None, multiple: int = 1) -> int:
    """Pairs that a device with 1 / `num_shards` of the experts computes at most.

    Args:
        num_tokens: Tokens routed among all shards.
        top_k: Choices per token.
        num_shards: Devices that share the experts.
        buffer_factor: Times the balanced load `num_tokens * top_k / num_shards`; `None` for all pairs.
        multiple: The result is rounded up to a multiple of this.

    Returns:
        The capacity, at most all pairs, rounded.
    """
    pairs = num_tokens * top_k
    if buffer_factor is not None:
        pairs = min(pairs, math.ceil(buffer_factor * pairs / num_shards))
    return -(-pairs // multiple) * multiple


def num_blocks(num_pairs: int, num_experts: int, block: int) -> int:
    """Blocks that hold any distribution of `num_pairs` over the experts."""
    return (num_pairs + num_experts * (block - 1)) // block


class Plan(NamedTuple):
    """Where the (token, choice) pairs are computed.

    Attributes:
        source: int32 `[M * L]`, flat index of the pair in a place, `N * J` for an empty one.
        place: int32 `[N, J]`, where the pair is, `M * L` for one that is not computed here.
        owner: int32 `[M]`, the expert of each block.
        sizes: int32 `[E]`, pairs of each expert.
        dropped: int32 scalar, pairs beyond the capacity.
    """

    source: jax.Array
    place: jax.Array
    owner: jax.Array
    sizes: jax.Array
    dropped: jax.Array


def plan_blocks(
    experts_NJ: jax.Array, valid_N: jax.Array, num_experts: int, block: int, capacity: int | None = None
) -> Plan:
    """Give every valid (token, choice) pair of an expert from 0 to `num_experts - 1` a place in a block of it.

    Args:
        experts_NJ: int32; pairs of other experts get no place.
        valid_N: bool, False for tokens that get none.
        num_experts: Experts held here.
        block: Places of one block.
        capacity: Pairs that get a place at most, those of low experts and early tokens first; all if `None`.

    Returns:
        The plan.
    """
    num_tokens, choices = experts_NJ.shape
    pairs = num_tokens * choices
    capacity = pairs if capacity is None else capacity
    blocks = num_blocks(capacity, num_experts, block)
    here = valid_N[:, None] & (experts_NJ >= 0) & (experts_NJ < num_experts)
    expert = jnp.where(here, experts_NJ, num_experts).reshape(-1)
    order = _stable_order(expert, num_experts)
    ordered = expert[order]
    wanted = (expert[:, None] == jnp.arange(num_experts)[None]).sum(0, dtype=jnp.int32)
    ends = jnp.minimum(jnp.cumsum(wanted), capacity)
    sizes = jnp.diff(ends, prepend=0)
    used = -(-sizes // block)
    first_block = jnp.cumsum(used) - used
    offset = jnp.append(first_block * block - (ends - sizes), 0)
    placed = (ordered < num_experts) & (jnp.arange(pairs) < capacity)
    slot = jnp.where(placed, jnp.arange(pairs) + offset[ordered], blocks * block).astype(jnp.int32)
    order = order.astype(jnp.int32)
    source = jnp.full(blocks * block, pairs, jnp.int32).at[slot].set(order, mode="drop", unique_indices=False)
    place = jnp.zeros(pairs, jnp.int32).at[order].set(slot, unique_indices=True)
    owner = jnp.minimum((jnp.arange(blocks)[:, None] >= jnp.cumsum(used)[None]).sum(1), num_experts - 1)
    return Plan(source, place.reshape(num_tokens, choices), owner, sizes, wanted.sum() - ends[-1])


def _stable_order(expert: jax.Array, num_experts: int) -> jax.Array:
    """`argsort` of numbers from 0 to `num_experts`: on CPUs, whole keys sort ten times faster than pairs of arrays."""
    pairs = expert.shape[0]
    if (num_experts + 1) * pairs > jnp.iinfo(jnp.int32).max:
        return jnp.argsort(expert)
    return jnp.sort(expert * pairs + jnp.arange(pairs, dtype=jnp.int32)) % pairs


@jax.custom_vjp
def take_sorted(x_ND: jax.Array, source: jax.Array, place_NJ: jax.Array) -> jax.Array:
    """Rows of `x` in their places, zeros in empty ones: `[M * L, D]`. Its gradient gathers, never scatters."""
    return jnp.take(x_ND, source // place_NJ.shape[1], axis=0, mode="fill", fill_value=0)


def _take_sorted_forward(x: jax.Array, source: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
    return take_sorted(x, source, place), place


def _take_sorted_backward(place: jax.Array, dout: jax.Array) -> tuple[jax.Array | None, ...]:
    dout = lax.optimization_barrier(dout)
    total = jnp.zeros((), jnp.float32)
    for choice in range(place.shape[1]):
        total = total + _taken(dout, place[:, choice])
    return total.astype(dout.dtype), None, None


take_sorted.defvjp(_take_sorted_forward, _take_sorted_backward)


@jax.custom_vjp
def combine(rows: jax.Array, weights_NJ: jax.Array, source: jax.Array, place_NJ: jax.Array) -> jax.Array:
    """The weighted sum of each token's rows, added in float32: `[N, D]`. Its gradient gathers, never scatters."""
    total = jnp.zeros((), jnp.float32)
    for choice in range(place_NJ.shape[1]):
        total = total + _taken(rows, place_NJ[:, choice]) * weights_NJ[:, choice, None]
    return total.astype(rows.dtype)


def _taken(rows: jax.Array, index: jax.Array) -> jax.Array:
    """Rows in float32, zeros where the index is past the end."""
    return jnp.take(rows, index, axis=0, mode="fill", fill_value=0).astype(jnp.float32)


def _combine_forward(
    rows: jax.Array, weights: jax.Array, source: jax.Array, place: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    return combine(rows, weights, source, place), (rows, weights, source, place)


def _combine_backward(saved: tuple[jax.Array, ...], dout: jax.Array) -> tuple[jax.Array | None, ...]:
    rows, weights, source, place = saved
    dout = lax.optimization_barrier(dout)
    arriving = _taken(dout, source // place.shape[1])  # [M * L, D]
    weight = jnp.take(weights.reshape(-1), source, mode="fill", fill_value=0)
    dweights = jnp.take((arriving * rows.astype(jnp.float32)).sum(-1), place, mode="fill", fill_value=0)
    return (arriving * weight[:, None]).astype(rows.dtype), dweights.astype(weights.dtype), None, None


combine.defvjp(_combine_forward, _combine_backward)


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
