"""Gated DeltaNet: a linear-attention state that decays, is corrected by the delta rule, and is read by queries.

Per value head, with state S of shape [P, V] and key k, query q, value v, log-decay g <= 0, step beta:

    S <- exp(g) S;  S <- S + k (beta (v - k^T S))^T;  o = q^T S

`delta_recurrent` computes exactly that and is the oracle. `delta_chunked` solves a chunk of C tokens at once (Yang et
al., "Gated Delta Networks", 2024, section 3.3): with G the running sum of g in the chunk, A strictly lower triangular
A_ij = beta_i (k_i . k_j) exp(G_i - G_j), and M = (I + A)^-1,

    U = M (beta v);  W = M (beta exp(G) k);  v' = U - W S
    o = exp(G) q S + tril((q . k) exp(G_i - G_j)) v';  S <- exp(G_C) S + (exp(G_C - G) k)^T v'

A token that starts a segment forgets the state: every product that would couple two segments is masked, before any exp,
and sums of g never include another segment's, so values of one segment never touch the rounding of another.

Legend: B rows, T time, N chunks, C chunk, K key heads, H value heads, R = H / K, P key width, V value width.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


def delta_recurrent(
    q_BTKP: jax.Array,
    k_BTKP: jax.Array,
    v_BTHV: jax.Array,
    g_BTH: jax.Array,
    beta_BTH: jax.Array,
    starts_BT: jax.Array,
    state_BHPV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Token by token.

    Args:
        q_BTKP: Queries, normalised and scaled.
        k_BTKP: Keys, normalised. A token with `g` and `beta` 0 leaves the state as it is.
        v_BTHV: Values.
        g_BTH: Log-decay, at most 0.
        beta_BTH: Step of the correction.
        starts_BT: bool, the token starts a segment: it sees a zero state.
        state_BHPV: State before the first token.

    Returns:
        Outputs `[B, T, H, V]` and the state after the last token.
    """

    def step(state: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, beta, starts = inputs
        state = jnp.where(starts[:, None, None, None], 0, state)
        out, state = delta_step(q, k, v, g, beta, state)
        return state, out

    inputs = (q_BTKP, k_BTKP, v_BTHV, g_BTH, beta_BTH, starts_BT)
    state, out = lax.scan(step, state_BHPV, jax.tree.map(lambda x: jnp.moveaxis(x, 1, 0), inputs))
    return jnp.moveaxis(out, 0, 1), state


def delta_step(
    q_BKP: jax.Array, k_BKP: jax.Array, v_BHV: jax.Array, g_BH: jax.Array, beta_BH: jax.Array, state_BHPV: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """One token of the recurrence: decode.

    Returns:
        Outputs `[B, H, V]` and the new state.
    """
    repeats = v_BHV.shape[1] // k_BKP.shape[1]
    q, k = jnp.repeat(q_BKP, repeats, axis=1), jnp.repeat(k_BKP, repeats, axis=1)
    decay = jnp.exp(g_BH)[..., None]
    read = jnp.stack([k, q], axis=2) @ state_BHPV  # the old state is read once, for the correction and for the output
    correction = (v_BHV - decay * read[:, :, 0]) * beta_BH[..., None]
    out = decay * read[:, :, 1] + (k * q).sum(-1, keepdims=True) * correction
    return out, decay[..., None] * state_BHPV + k[..., None] * correction[:, :, None, :]


def unit_lower_inverse(a: jax.Array) -> jax.Array:
    """`(I + A)^-1` for strictly lower triangular `A`, `[..., C, C]`.

    The Neumann series of a nilpotent matrix ends: (I - A)(I + A^2)(I + A^4)... needs log2(C) squarings.
    """
    size = a.shape[-1]
    power = -a
    inverse = jnp.eye(size, dtype=a.dtype).reshape(*(1,) * (a.ndim - 2), size, size) + power
    for _ in range(max(math.ceil(math.log2(size)) - 1, 0)):
        power = power @ power
        inverse = inverse + inverse @ power
    return inverse


def delta_chunked(
    q_BTKP: jax.Array,
    k_BTKP: jax.Array,
    v_BTHV: jax.Array,
    g_BTH: jax.Array,
    beta_BTH: jax.Array,
    starts_BT: jax.Array,
    state_BHPV: jax.Array,
    *,
    chunk: int = 16,
) -> tuple[jax.Array, jax.Array]:
    """Chunk by chunk; arguments and results as `delta_recurrent`, in float32."""
    time = q_BTKP.shape[1]
    chunk = min(chunk, time)
    run_BT = jnp.cumsum(starts_BT.astype(jnp.int32), axis=1)
    arrays = (q_BTKP, k_BTKP, v_BTHV, g_BTH, beta_BTH)
    if pad := -time % chunk:
        arrays = tuple(jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2))) for x in arrays)
        run_BT = jnp.pad(run_BT, ((0, 0), (0, pad)), mode="edge")
    q, k, v, g, beta = (_to_chunks(x, chunk) for x in arrays)
    q, k, v = lax.optimization_barrier((q, k, v))
    run_NBC = jnp.moveaxis(run_BT.reshape(run_BT.shape[0], -1, chunk), 1, 0)
    out_NBHCV, state = _chunks(q, k, v, beta, *_decays(g, run_NBC), state_BHPV)
    out_BNCHV = jnp.transpose(out_NBHCV, (1, 0, 3, 2, 4))
    return out_BNCHV.reshape(out_BNCHV.shape[0], time + pad, *out_BNCHV.shape[3:])[:, :time], state


def _to_chunks(x: jax.Array, chunk: int) -> jax.Array:
    """`[B, T, heads, ...]` to `[N, B, heads, C, ...]`."""
    cut = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return jnp.transpose(cut, (1, 0, 3, 2, *range(4, cut.ndim)))


def _decays(g_NBHC: jax.Array, run_NBC: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """How much of one position is left at another, 0 across segments.

    Args:
        g_NBHC: Log-decays.
        run_NBC: Number of the segment of each position; 0 is the one the first state belongs to.

    Returns:
        `[N, B, H, C, C]` between positions of a chunk; `[N, B, H, C]` from the carried state to each position;
        `[N, B, H, C]` from each position to the end of the chunk; `[N, B, H]` of the carried state at the end.
    """
    chunk = g_NBHC.shape[-1]
    last_NB = run_NBC[..., -1]
    carried_NB = jnp.pad(last_NB[:-1], ((1, 0), (0, 0)))
    lower = jnp.tril(jnp.ones((1, 1, chunk, chunk), bool))
    seen = ((run_NBC[..., :, None] == run_NBC[..., None, :]) & lower)[:, :, None]
    total = jnp.where(seen, g_NBHC[..., None, :], 0).sum(-1)  # since the segment's first position in the chunk
    between = jnp.exp(jnp.where(seen, total[..., :, None] - total[..., None, :], -jnp.inf))
    carried = (run_NBC == carried_NB[..., None])[:, :, None]
    from_state = jnp.where(carried, jnp.exp(total), 0)
    ends = (run_NBC == last_NB[..., None])[:, :, None]
    to_state = jnp.exp(jnp.where(ends, total[..., -1:] - total, -jnp.inf))
    return between, from_state, to_state, from_state[..., -1]


class _Saved(NamedTuple):
    """What the backward pass of `_chunks` starts from; shapes as there, `states` are those before each chunk."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    beta: jax.Array
    between: jax.Array
    from_state: jax.Array
    to_state: jax.Array
    keep: jax.Array
    inverse: jax.Array
    w: jax.Array
    fresh: jax.Array
    states: jax.Array


@jax.custom_vjp
def _chunks(
    q_NBKCP: jax.Array,
    k_NBKCP: jax.Array,
    v_NBHCV: jax.Array,
    beta_NBHC: jax.Array,
    between_NBHCC: jax.Array,
    from_state_NBHC: jax.Array,
    to_state_NBHC: jax.Array,
    keep_NBH: jax.Array,
    state_BHPV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Outputs `[N, B, H, C, V]` and the state after the last chunk.

    Differentiated by hand: what can be formed for all chunks at once is, and only the products that need the running
    state stay in the loop, forward and backward.
    """
    return _chunks_forward(
        q_NBKCP, k_NBKCP, v_NBHCV, beta_NBHC, between_NBHCC, from_state_NBHC, to_state_NBHC, keep_NBH, state_BHPV
    )[0]


def _chunks_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    between: jax.Array,
    from_state: jax.Array,
    to_state: jax.Array,
    keep: jax.Array,
    state: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], _Saved]:
    heads = v.shape[2]
    kk, qk = _by_head(k @ _t(k), heads), _by_head(q @ _t(k), heads)
    inverse = unit_lower_inverse(_strictly_lower(kk * between * beta[..., None]))
    q_H, k_H = _by_head(q, heads), _by_head(k, heads)
    u = (inverse * beta[..., None, :]) @ v
    w = (inverse * (beta * from_state)[..., None, :]) @ k_H
    parts = (u, w, qk * between, q_H * from_state[..., None], k_H * to_state[..., None], keep)

    def step(state: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        u, w, inner, queries, keys, keep = parts
        fresh = u - w @ state
        out = queries @ state + inner @ fresh
        return state * keep[..., None, None] + _t(keys) @ fresh, (out, fresh, state)

    state, (out, fresh, states) = lax.scan(step, state, parts)
    return (out, state), _Saved(q, k, v, beta, between, from_state, to_state, keep, inverse, w, fresh, states)


def _chunks_backward(saved: _Saved, cotangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
    dout, dstate = cotangents
    heads = saved.v.shape[2]
    kk, qk = _by_head(saved.k @ _t(saved.k), heads), _by_head(saved.q @ _t(saved.k), heads)
    q_H, k_H = _by_head(saved.q, heads), _by_head(saved.k, heads)
    from_state, to_state, beta = saved.from_state, saved.to_state, saved.beta
    parts = (dout, saved.w, qk * saved.between, q_H * from_state[..., None], k_H * to_state[..., None], saved.keep)

    def step(dstate: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        dout, w, inner, queries, keys, keep = parts
        dfresh = _t(inner) @ dout + keys @ dstate
        before = dstate * keep[..., None, None] + _t(queries) @ dout - _t(w) @ dfresh
        return before, (dfresh, dstate)

    dfirst, (dfresh, dstates) = lax.scan(step, dstate, parts, reverse=True)
    states_T, fresh_T = _t(saved.states), _t(saved.fresh)
    dqueries, dw = dout @ states_T, -(dfresh @ states_T)
    dkeys, dinner = saved.fresh @ _t(dstates), dout @ fresh_T
    dkeep = (saved.states * dstates).sum((-2, -1))

    # u = (M beta) v and w = (M beta from_state) k
    scaled = saved.inverse * beta[..., None, :]
    from_w = dw @ _t(k_H)
    dscaled = dfresh @ _t(saved.v) + from_w * from_state[..., None, :]
    dv = _t(scaled) @ dfresh
    dk_w = _t(scaled * from_state[..., None, :]) @ dw
    inverse_T = _t(saved.inverse)
    da = _strictly_lower(-(inverse_T @ (dscaled * beta[..., None, :]) @ inverse_T))
    weighted = da * kk
    dbeta = (dscaled * saved.inverse).sum(-2) + (weighted * saved.between).sum(-1)
    dbetween = weighted * beta[..., None] + dinner * qk
    dfrom_state = (dqueries * q_H).sum(-1) + (from_w * scaled).sum(-2)
    dto_state = (dkeys * k_H).sum(-1)

    num_keys = saved.k.shape[2]
    dqk = _by_key(dinner * saved.between, num_keys)
    dkk = _by_key(da * saved.between * beta[..., None], num_keys)
    dq = _by_key(dqueries * from_state[..., None], num_keys) + dqk @ saved.k
    dk = _by_key(dkeys * to_state[..., None] + dk_w, num_keys) + _t(dqk) @ saved.q + (dkk + _t(dkk)) @ saved.k
    return dq, dk, dv, dbeta, dbetween, dfrom_state, dto_state, dkeep, dfirst


_chunks.defvjp(_chunks_forward, _chunks_backward)


def _t(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _strictly_lower(x: jax.Array) -> jax.Array:
    size = x.shape[-1]
    return jnp.where(jnp.tril(jnp.ones((size, size), bool), -1).reshape(*(1,) * (x.ndim - 2), size, size), x, 0)


def _by_head(x_NBK: jax.Array, heads: int) -> jax.Array:
    """Repeat what belongs to a key head for each of its value heads."""
    return jnp.repeat(x_NBK, heads // x_NBK.shape[2], axis=2)


def _by_key(x_NBH: jax.Array, num_keys: int) -> jax.Array:
    """Sum what belongs to the value heads of a key head."""
    rows = x_NBH.reshape(*x_NBH.shape[:2], num_keys, -1, *x_NBH.shape[3:])
    return rows.sum(3)
