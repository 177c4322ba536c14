"""Attention to a part of the keys, and how parts become the whole: what devices that share a row compute.

A part gives its normalised output and the log of its sum of exps; two parts merge by these logs, so the keys may be
gathered and attended to at once, or visit one after the other. Scores are computed by blocks of queries and again in
the backward pass; they are never all there.

Legend: B rows, T queries, S keys, H query heads, K key heads, R = H / K, D head width, N blocks, C queries of a block.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_MASKED = -1e30  # finite: a query without any key must not become NaN


class Part(NamedTuple):
    """Attention to some keys.

    Attributes:
        out: `[B, T, H, D]` float32.
        log: log of the sum of exps, `[B, T, H]` float32; about -1e30 where the query sees none of the keys.
    """

    out: jax.Array
    log: jax.Array

    def merge(self, other: Part) -> Part:
        """Attention to the keys of both."""
        log = jnp.logaddexp(self.log, other.log)
        out = self.out * jnp.exp(self.log - log)[..., None] + other.out * jnp.exp(other.log - log)[..., None]
        return Part(out, log)


def attend_part(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    q_segments_BT: jax.Array,
    k_segments_BS: jax.Array,
    ahead: jax.Array | int,
    *,
    block: int = 0,
) -> Part:
    """Causal attention within segments to keys of another stretch of the row.

    Args:
        q_BTHD: Queries, scaled.
        k_BSKD: Keys.
        v_BSKD: Values.
        q_segments_BT: int32, segments of the queries.
        k_segments_BS: int32, segments of the keys, numbered alike.
        ahead: int32 scalar, places from the first key to the first query; a query sees keys up to its own place.
        block: Queries of one block; 0 takes 128.

    Returns:
        The part.
    """
    rows, time, heads, width = q_BTHD.shape
    num_keys, block = k_BSKD.shape[2], min(block or 128, time)
    pad = -time % block
    q = jnp.pad(q_BTHD, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(rows, -1, block, num_keys, heads // num_keys, width)
    q_NBKRCD = jnp.transpose(q, (1, 0, 3, 4, 2, 5))
    segments = jnp.pad(q_segments_BT, ((0, 0), (0, pad)), constant_values=-1).reshape(rows, -1, block)
    segments_NBC = jnp.moveaxis(segments, 1, 0)
    k, v = jnp.moveaxis(k_BSKD, 1, 2), jnp.moveaxis(v_BSKD, 1, 2)
    out, log = _attend(q_NBKRCD, k, v, segments_NBC, k_segments_BS, jnp.asarray(ahead, jnp.int32))
    out_BTHD = jnp.transpose(out, (1, 0, 4, 2, 3, 5)).reshape(rows, -1, heads, width)
    log_BTH = jnp.transpose(log, (1, 0, 4, 2, 3)).reshape(rows, -1, heads)
    return Part(out_BTHD[:, :time], log_BTH[:, :time])


def _scores(
    q_BKRCD: jax.Array, k_BKSD: jax.Array, q_segments: jax.Array, k_segments: jax.Array, first: jax.Array
) -> jax.Array:
    """Masked scores `[B, K, R, C, S]` of one block, float32; `first` is the place of its first query among the keys."""
    places = first + jnp.arange(q_BKRCD.shape[3])
    causal = places[:, None] >= jnp.arange(k_BKSD.shape[2])[None]
    seen = (q_segments[:, :, None] == k_segments[:, None]) & causal[None]
    scores = jnp.einsum("bkrcd,bksd->bkrcs", q_BKRCD, k_BKSD, preferred_element_type=jnp.float32)
    return jnp.where(seen[:, None, None], scores, _MASKED)


@jax.custom_vjp
def _attend(
    q_NBKRCD: jax.Array,
    k_BKSD: jax.Array,
    v_BKSD: jax.Array,
    q_segments_NBC: jax.Array,
    k_segments_BS: jax.Array,
    ahead: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Outputs `[N, B, K, R, C, D]` and logs `[N, B, K, R, C]`, float32."""

    def one(carry: None, block: tuple[jax.Array, ...]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        q, segments, first = block
        scores = _scores(q, k_BKSD, segments, k_segments_BS, first)
        top = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        out = jnp.einsum("bkrcs,bksd->bkrcd", weights.astype(v_BKSD.dtype), v_BKSD, preferred_element_type=jnp.float32)
        return carry, (out / total, (top + jnp.log(total))[..., 0])

    return lax.scan(one, None, (q_NBKRCD, q_segments_NBC, _firsts(q_NBKRCD, ahead)))[1]


def _firsts(q_NBKRCD: jax.Array, ahead: jax.Array) -> jax.Array:
    return ahead + q_NBKRCD.shape[4] * jnp.arange(q_NBKRCD.shape[0], dtype=jnp.int32)


def _attend_forward(*arrays: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    out, log = _attend(*arrays)
    return (out, log), (*arrays, out, log)


def _attend_backward(
    saved: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    q_NBKRCD, k, v, q_segments, k_segments, ahead, out, log = saved
    dout, dlog = cotangents
    offset = dlog - (dout * out).sum(-1)

    def one(
        carry: tuple[jax.Array, jax.Array], block: tuple[jax.Array, ...]
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        dk, dv = carry
        q, segments, first, dout, offset, log = block
        weights = jnp.exp(_scores(q, k, segments, k_segments, first) - log[..., None])
        low = dout.astype(v.dtype)
        dweights = jnp.einsum("bkrcd,bksd->bkrcs", low, v, preferred_element_type=jnp.float32)
        dscores = (weights * (dweights + offset[..., None])).astype(q.dtype)
        dq = jnp.einsum("bkrcs,bksd->bkrcd", dscores, k, preferred_element_type=jnp.float32).astype(q.dtype)
        dk = dk + jnp.einsum("bkrcs,bkrcd->bksd", dscores, q, preferred_element_type=jnp.float32)
        dv = dv + jnp.einsum("bkrcs,bkrcd->bksd", weights.astype(v.dtype), low, preferred_element_type=jnp.float32)
        return (dk, dv), dq

    nothing = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    blocks = (q_NBKRCD, q_segments, _firsts(q_NBKRCD, ahead), dout, offset, log)
    (dk, dv), dq = lax.scan(one, nothing, blocks)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, None, None


_attend.defvjp(_attend_forward, _attend_backward)
