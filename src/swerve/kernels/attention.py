"""Softmax attention with grouped query heads, over packed rows and over a cache.

Scores and their softmax are float32 whatever the type of the activations, as are sums over keys.

`packed_attention` walks blocks of queries, each against the keys up to its end, and keeps only the output and the
log-sum of each query for the backward pass, which computes the scores again. `packed_attention_naive` is its oracle.

Legend: B rows, T queries, S keys, H query heads, K key heads, R = H / K, D head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

_MASKED = -1e30  # finite: a row without any key must not become NaN
_FEW = 32  # queries that meet a whole cache at once
_PLACES = 256  # places of a cache that a block of more queries meets at a time


def query_block(time: int) -> int:
    """Queries of one block: few enough that their scores stay in a CPU's cache, and at most 32 blocks in a program."""
    return max(128, -(-time // 32))


def packed_attention_naive(
    q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array, segment_ids_BT: jax.Array
) -> jax.Array:
    """Causal attention within segments.

    Args:
        q_BTHD: Queries, scaled.
        k_BTKD: Keys.
        v_BTKD: Values.
        segment_ids_BT: int32; a token attends to itself and to earlier tokens of the same id.

    Returns:
        `[B, T, H, D]`.
    """
    rows, time, _, width = q_BTHD.shape
    q = q_BTHD.reshape(rows, time, k_BTKD.shape[2], -1, width)
    scores = jnp.einsum("btkrd,bskd->bkrts", q, k_BTKD, preferred_element_type=jnp.float32)
    seen = (segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]) & jnp.tril(jnp.ones((1, time, time), bool))
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, _MASKED), axis=-1)
    return jnp.einsum("bkrts,bskd->btkrd", weights.astype(v_BTKD.dtype), v_BTKD).reshape(q_BTHD.shape)


def packed_attention(
    q_BTHD: jax.Array, k_BTKD: jax.Array, v_BTKD: jax.Array, segment_ids_BT: jax.Array, *, block: int = 0
) -> jax.Array:
    """The same as `packed_attention_naive`, by blocks of `block` queries; 0 takes `query_block`."""
    rows, time, heads, width = q_BTHD.shape
    num_keys = k_BTKD.shape[2]
    q = jnp.moveaxis(q_BTHD.reshape(rows, time, num_keys, heads // num_keys, width), 1, 3)  # [B, K, R, T, D]
    k, v = jnp.moveaxis(k_BTKD, 1, 2), jnp.moveaxis(v_BTKD, 1, 2)  # [B, K, T, D]
    out = _blocked(q, k, v, segment_ids_BT, block or query_block(time))
    return jnp.moveaxis(out, 3, 1).reshape(q_BTHD.shape)


def _blocks(time: int, block: int) -> list[tuple[int, int]]:
    return [(start, min(start + block, time)) for start in range(0, time, block)]


def _scores(q: jax.Array, k: jax.Array, segments: jax.Array, start: int, end: int) -> jax.Array:
    """Masked scores, float32 `[B, K, R, end - start, end]`, of one block of queries."""
    seen = (segments[:, start:end, None] == segments[:, None, :end]) & (
        jnp.arange(start, end)[None, :, None] >= jnp.arange(end)[None, None]
    )
    rows, keys, repeats, _, width = q.shape
    flat = q[:, :, :, start:end].reshape(rows, keys, repeats * (end - start), width)
    scores = _product("bktd,bksd->bkts", flat, k[:, :, :end])
    scores = scores.reshape(rows, keys, repeats, end - start, end)
    return jnp.where(seen[:, None, None], scores, _MASKED)


def _blocked_output(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, block: int) -> jax.Array:
    return _blocked_forward(q, k, v, segments, block)[0]


_blocked = jax.custom_vjp(_blocked_output, nondiff_argnums=(4,))


def _blocked_forward(
    q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, block: int
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    outs, logs = [], []
    for start, end in _blocks(q.shape[3], block):
        scores = _scores(q, k, segments, start, end)
        top = scores.max(-1, keepdims=True)
        weights = jnp.exp(scores - top)
        total = weights.sum(-1, keepdims=True)
        flat = weights.reshape(*weights.shape[:2], -1, end)
        out = _product("bkts,bksd->bktd", flat, v[:, :, :end])
        outs.append((out.reshape(*weights.shape[:4], -1) / total).astype(v.dtype))
        logs.append(top + jnp.log(total))
    out, log = jnp.concatenate(outs, axis=3), jnp.concatenate(logs, axis=3)
    return out, (q, k, v, segments, out, log)


def _blocked_backward(block: int, saved: tuple[jax.Array, ...], dout: jax.Array) -> tuple[jax.Array | None, ...]:
    q, k, v, segments, out, log = saved
    dout = lax.optimization_barrier(dout)
    dot = (dout.astype(jnp.float32) * out).sum(-1, keepdims=True)
    dq, dk_T, dv_T = [], *(jnp.zeros_like(_transposed(x), jnp.float32) for x in (k, v))
    for start, end in _blocks(q.shape[3], block):
        here = slice(start, end)
        weights = jnp.exp(_scores(q, k, segments, start, end) - log[:, :, :, here])
        dflat = _flat(dout[:, :, :, here])
        dweights = _product("bktd,bksd->bkts", dflat, v[:, :, :end]).reshape(weights.shape)
        dscores = _flat(weights * (dweights - dot[:, :, :, here]))
        dq.append(_product("bkts,bksd->bktd", dscores, k[:, :, :end]).astype(q.dtype).reshape(q[:, :, :, here].shape))
        # the small operand is transposed, not the scores
        dk_T = dk_T.at[..., :end].add(_product("bkdt,bkts->bkds", _transposed(_flat(q[:, :, :, here])), dscores))
        dv_T = dv_T.at[..., :end].add(_product("bkdt,bkts->bkds", _transposed(dflat), _flat(weights)))
    dk, dv = jnp.swapaxes(dk_T, -1, -2), jnp.swapaxes(dv_T, -1, -2)
    return jnp.concatenate(dq, axis=3), dk.astype(k.dtype), dv.astype(v.dtype), None


def _product(form: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """A product in the narrower of both types, its sums kept in float32."""
    dtype = min(x.dtype, y.dtype, key=lambda t: t.itemsize)
    return jnp.einsum(form, x.astype(dtype), y.astype(dtype), preferred_element_type=jnp.float32)


def _flat(x: jax.Array) -> jax.Array:
    """`[B, K, R, T, X]` to `[B, K, R * T, X]`."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])


def _transposed(x: jax.Array) -> jax.Array:
    """The last two dimensions swapped, in memory."""
    return lax.optimization_barrier(jnp.swapaxes(x, -1, -2))


_blocked.defvjp(_blocked_forward, _blocked_backward)


def cached_attention(q_BTHD: jax.Array, k_BKDS: jax.Array, v_BKSD: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """Attention of the newest tokens to a cache that holds them already.

    The cache lies as both products read it: keys by column, values by row.

    Args:
        q_BTHD: Queries, scaled, of tokens at positions `lengths .. lengths + T - 1`.
        k_BKDS: Keys of all positions.
        v_BKSD: Values of all positions.
        lengths_B: int32, tokens before the first query of each row.

    Returns:
        `[B, T, H, D]`.
    """
    rows, time, heads, width = q_BTHD.shape
    q = jnp.transpose(q_BTHD.reshape(rows, time, v_BKSD.shape[1], -1, width), (0, 2, 3, 1, 4))  # [B, K, R, T, D]
    last_BT = lengths_B[:, None] + jnp.arange(time)[None]
    if time <= _FEW:
        out = _attend_all(q, k_BKDS, v_BKSD, last_BT)
    else:
        block = query_block(time)
        blocks = [
            _attend_blocks(q[:, :, :, start:end], k_BKDS, v_BKSD, last_BT[:, start:end])
            for start, end in _blocks(time, block)
        ]
        out = jnp.concatenate(blocks, axis=3)
    return jnp.transpose(out, (0, 3, 1, 2, 4)).reshape(rows, time, heads, width)


def _attend_all(q: jax.Array, k_BKDS: jax.Array, v_BKSD: jax.Array, last_BT: jax.Array) -> jax.Array:
    """Queries `[B, K, R, T, D]` against all places up to `last`, at once."""
    rows, num_keys, places, width = v_BKSD.shape
    flat = q.reshape(rows, num_keys, -1, width)
    scores = jnp.matmul(flat, k_BKDS, preferred_element_type=jnp.float32).reshape(*q.shape[:4], places)
    seen = jnp.arange(places)[None, None] <= last_BT[..., None]  # [B, T, S]
    weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, _MASKED), axis=-1).astype(q.dtype)
    return (weights.reshape(rows, num_keys, -1, places) @ v_BKSD).reshape(q.shape)


def _attend_blocks(q: jax.Array, k_BKDS: jax.Array, v_BKSD: jax.Array, last_BT: jax.Array) -> jax.Array:
    """The same by blocks of places, as many as the longest row needs; sums are rescaled as the maximum grows."""
    rows, num_keys, places, width = v_BKSD.shape
    block = min(_PLACES, places)
    flat = q.reshape(rows, num_keys, -1, width)

    def attend(i: jax.Array, running: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        out, top, total = running
        start = jnp.minimum(i * block, places - block)  # the last block may begin inside the one before
        k = lax.dynamic_slice_in_dim(k_BKDS, start, block, axis=3)
        v = lax.dynamic_slice_in_dim(v_BKSD, start, block, axis=2)
        place = (start + jnp.arange(block))[None, None]
        seen = (place <= last_BT[..., None]) & (place >= i * block)  # [B, T, S]
        scores = jnp.matmul(flat, k, preferred_element_type=jnp.float32).reshape(*q.shape[:4], block)
        scores = jnp.where(seen[:, None, None], scores, _MASKED).reshape(*flat.shape[:3], block)
        higher = jnp.maximum(top, scores.max(-1, keepdims=True))
        weights, shrunk = jnp.exp(scores - higher), jnp.exp(top - higher)
        added = jnp.matmul(weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        return out * shrunk + added, higher, total * shrunk + weights.sum(-1, keepdims=True)

    none = jnp.full((*flat.shape[:3], 1), _MASKED, jnp.float32)
    running = (jnp.zeros(flat.shape, jnp.float32), none, jnp.zeros_like(none))
    out, _, total = lax.fori_loop(0, last_BT.max() // block + 1, attend, running)
    return (out / total).astype(q.dtype).reshape(q.shape)
