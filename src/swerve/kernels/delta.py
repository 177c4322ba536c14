"""Gated DeltaNet: a linear-attention state that decays, is corrected by the delta rule, and is read by queries.

Per value head, with state S of shape [P, V] and key k, query q, value v, log-decay g <= 0, step beta:

    S <- exp(g) S;  S <- S + k (beta (v - k^T S))^T;  o = q^T S

`delta_recurrent` computes exactly that and is the oracle. `delta_chunked` solves a chunk of C tokens at once (Yang et
al., "Gated Delta Networks", 2024, section 3.3): with G the running sum of g in the chunk, A strictly lower triangular
A_ij = beta_i (k_i . k_j) exp(G_i - G_j), and M = (I + A)^-1,

    v' = M beta (v - exp(G) k S)
    o = exp(G) q S + tril((q . k) exp(G_i - G_j)) v';  S <- exp(G_C) S + k^T (exp(G_C - G) v')

A token that starts a segment forgets the state: every product that would couple two segments is masked, before any exp,
and sums of g never include another segment's, so values of one segment never touch the rounding of another.

Legend: B rows, T time, N chunks, C chunk, K key heads, H value heads, R = H / K, P key width, V value width. `Q` stands
for 2 C places: a chunk's keys, then its queries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

_NEUMANN = 16  # largest matrix that is inverted by its series

_Arrays: TypeAlias = tuple[jax.Array, ...]
_Step: TypeAlias = Callable[[jax.Array, _Arrays], tuple[jax.Array, _Arrays]]


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

    Large ones by halves: the two inverses on the diagonal give the block below it. Small ones by the Neumann series,
    which ends for a nilpotent matrix: (I - A)(I + A^2)(I + A^4)... needs log2(C) squarings.
    """
    size = a.shape[-1]
    if size > _NEUMANN and size % 2 == 0:
        half = size // 2
        top, bottom = jnp.split(a, 2, axis=-2)
        inverses = unit_lower_inverse(jnp.stack([top[..., :half], bottom[..., half:]], axis=-3))
        first, last = inverses[..., 0, :, :], inverses[..., 1, :, :]
        below = -last @ (bottom[..., :half] @ first)
        rows = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1), jnp.concatenate([below, last], axis=-1)
        return jnp.concatenate(rows, axis=-2)
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
    chunk: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Chunk by chunk; arguments and results as `delta_recurrent`, in float32.

    Args:
        q_BTKP: As there, like all others.
        k_BTKP: Keys.
        v_BTHV: Values.
        g_BTH: Log-decay.
        beta_BTH: Step.
        starts_BT: Starts of segments.
        state_BHPV: State before the first token.
        chunk: Tokens of a chunk; 0 takes `balanced_chunk`.

    Returns:
        Outputs `[B, T, H, V]` and the state after the last token.
    """
    rows, time, num_keys, key_width = q_BTKP.shape
    chunk = min(chunk or balanced_chunk(key_width), time)
    run_BT = jnp.cumsum(starts_BT.astype(jnp.int32), axis=1)
    arrays = (q_BTKP, k_BTKP, *(x.reshape(rows, time, num_keys, -1, *x.shape[3:]) for x in (v_BTHV, g_BTH, beta_BTH)))
    if pad := -time % chunk:
        arrays = tuple(jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2))) for x in arrays)
        run_BT = jnp.pad(run_BT, ((0, 0), (0, pad)), mode="edge")
    q, k, v, g, beta = (_to_chunks(x, chunk, heads) for x, heads in zip(arrays, (1, 1, 2, 2, 2), strict=True))
    kq, v = lax.optimization_barrier((jnp.concatenate([k, q], axis=-2), v))
    run_NBC = jnp.moveaxis(run_BT.reshape(rows, -1, chunk), 1, 0)
    state_BKPRV = jnp.swapaxes(state_BHPV.reshape(rows, num_keys, -1, *state_BHPV.shape[2:]), 2, 3)
    out_NBKRCV, state_BKPRV = _chunks(kq, v, beta, *_decays(g, run_NBC), state_BKPRV)
    out = jnp.transpose(out_NBKRCV, (1, 0, 4, 2, 3, 5)).reshape(rows, time + pad, *v_BTHV.shape[2:])
    return out[:, :time], jnp.swapaxes(state_BKPRV, 2, 3).reshape(state_BHPV.shape)


def balanced_chunk(key_width: int) -> int:
    """Tokens of a chunk such that products inside chunks cost no more than those with the state: half a key's width."""
    return max(16, key_width // 2)


def _to_chunks(x: jax.Array, chunk: int, heads: int) -> jax.Array:
    """`[B, T, *heads, ...]` to `[N, B, *heads, C, ...]`, where `heads` says how many dimensions of heads there are."""
    cut = x.reshape(x.shape[0], -1, chunk, *x.shape[2:])
    return jnp.transpose(cut, (1, 0, *range(3, 3 + heads), 2, *range(3 + heads, cut.ndim)))


def _decays(g_NBKRC: jax.Array, run_NBC: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """How much of one position is left at another, 0 across segments.

    Args:
        g_NBKRC: Log-decays.
        run_NBC: Number of the segment of each position; 0 is the one the first state belongs to.

    Returns:
        `[N, B, K, R, C, C]` between positions of a chunk; `[N, B, K, R, C]` from the carried state to each position;
        `[N, B, K, R, C]` from each position to the end of the chunk; `[N, B, K, R]` of the carried state at the end.
    """
    chunk = g_NBKRC.shape[-1]
    last_NB = run_NBC[..., -1]
    carried_NB = jnp.pad(last_NB[:-1], ((1, 0), (0, 0)))
    lower = jnp.tril(jnp.ones((1, 1, chunk, chunk), bool))
    seen = ((run_NBC[..., :, None] == run_NBC[..., None, :]) & lower)[:, :, None, None]
    total = jnp.where(seen, g_NBKRC[..., None, :], 0).sum(-1)  # since the segment's first position in the chunk
    between = jnp.exp(jnp.where(seen, total[..., :, None] - total[..., None, :], -jnp.inf))
    carried = (run_NBC == carried_NB[..., None])[:, :, None, None]
    from_state = jnp.where(carried, jnp.exp(total), 0)
    ends = (run_NBC == last_NB[..., None])[:, :, None, None]
    to_state = jnp.exp(jnp.where(ends, total[..., -1:] - total, -jnp.inf))
    return between, from_state, to_state, from_state[..., -1]


class _Saved(NamedTuple):
    """What the backward pass of `_chunks` starts from; names as there."""

    kq: jax.Array
    v: jax.Array
    beta: jax.Array
    between: jax.Array
    from_state: jax.Array
    to_state: jax.Array
    keep: jax.Array
    inverse: jax.Array
    fresh: jax.Array
    states: jax.Array


@jax.custom_vjp
def _chunks(
    kq_NBKQP: jax.Array,
    v_NBKRCV: jax.Array,
    beta_NBKRC: jax.Array,
    between_NBKRCC: jax.Array,
    from_state_NBKRC: jax.Array,
    to_state_NBKRC: jax.Array,
    keep_NBKR: jax.Array,
    state_BKPRV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Outputs `[N, B, K, R, C, V]` and the state after the last chunk.

    Differentiated by hand: what can be formed for all chunks at once is, and only the products that need the running
    state stay in the loop, forward and backward. The state lies such that one product serves all value heads of a key.
    """
    arrays = (kq_NBKQP, v_NBKRCV, beta_NBKRC, between_NBKRCC, from_state_NBKRC, to_state_NBKRC, keep_NBKR)
    return _forward(*arrays, state_BKPRV, saves=False)[0]


def _chunks_forward(*arrays: Any) -> tuple[tuple[jax.Array, jax.Array], _Saved]:
    outputs, (inverse, fresh, states) = _forward(*arrays, saves=True)
    return outputs, _Saved(*arrays[:-1], inverse=inverse, fresh=fresh, states=states)


def _forward(
    kq: jax.Array,
    v: jax.Array,
    beta: jax.Array,
    between: jax.Array,
    from_state: jax.Array,
    to_state: jax.Array,
    keep: jax.Array,
    state: jax.Array,
    *,
    saves: bool,
) -> tuple[tuple[jax.Array, jax.Array], _Arrays]:
    """Outputs and last state; and, if it saves anything, what `_Saved` holds beyond the arguments."""
    chunk = v.shape[-2]
    kk, qk = _products(kq)
    inverse = unit_lower_inverse(_strictly_lower(kk * between * beta[..., None]))

    def step(state: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        kq, v, inverse, beta, from_state, to_state, keep = parts
        read = jnp.einsum("bkqp,bkprv->bkqrv", kq, state)
        fresh = inverse @ (beta[..., None] * (v - from_state[..., None] * _by_head(read[:, :, :chunk])))
        added = jnp.einsum("bkcp,bkrcv->bkprv", kq[:, :, :chunk], to_state[..., None] * fresh)
        results = (_by_head(read[:, :, chunk:]), fresh, *([state] if saves else []))
        return state * keep[:, :, None, :, None] + added, results

    parts = (kq, v, inverse, beta, from_state, to_state, keep)
    state, (read_q, fresh, *states) = _scan(step, state, parts, kq[0, 0, 0, 0, 0])
    out = from_state[..., None] * read_q + (qk * between) @ fresh
    return (out, state), (inverse, fresh, *states)


def _chunks_backward(saved: _Saved, cotangents: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
    kq, v, beta, between, from_state, to_state, keep, inverse, fresh, states = saved
    dout, dstate = cotangents
    dout = lax.optimization_barrier(dout)
    chunk = v.shape[-2]
    k = kq[..., :chunk, :]
    kk, qk = _products(kq)
    dfresh_out, dread_q = _t(qk * between) @ dout, _by_head(from_state[..., None] * dout)

    def step(dstate: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        kq, dfresh, dread_q, inverse, beta, from_state, to_state, keep = parts
        dadded = _by_head(jnp.einsum("bkcp,bkprv->bkcrv", kq[:, :, :chunk], dstate))
        solved = _t(inverse) @ (dfresh + to_state[..., None] * dadded)
        dread_k = _by_head(-(from_state * beta)[..., None] * solved)
        dread = jnp.concatenate([dread_k, dread_q], axis=2)
        before = dstate * keep[:, :, None, :, None] + jnp.einsum("bkqp,bkqrv->bkprv", kq, dread)
        return before, (solved, dread, dadded, dstate)

    parts = (kq, dfresh_out, dread_q, inverse, beta, from_state, to_state, keep)
    dfirst, (solved, dread, dadded, dstates) = _scan(step, dstate, parts, dout[0, 0, 0, 0, 0, 0], reverse=True)
    read = _by_head(jnp.einsum("nbkqp,nbkprv->nbkqrv", kq, states))
    read_k, read_q = read[..., :chunk, :], read[..., chunk:, :]
    dv = beta[..., None] * solved
    dfrom_state = (dout * read_q - dv * read_k).sum(-1)
    dto_state = (dadded * fresh).sum(-1)
    dkeep = (states * dstates).sum((-3, -1))
    dkq = jnp.einsum("nbkqrv,nbkprv->nbkqp", dread, states)
    dk = jnp.einsum("nbkrcv,nbkprv->nbkcp", to_state[..., None] * fresh, dstates)

    # fresh = M beta r, so the gradient of A = M^-1 - I is -(M^T dfresh) fresh^T
    dA, dinner = -_strictly_lower(solved @ _t(fresh)), dout @ _t(fresh)
    weighted = dA * kk
    dbeta = (solved * (v - from_state[..., None] * read_k)).sum(-1) + (weighted * between).sum(-1)
    dbetween = weighted * beta[..., None] + dinner * qk
    dboth = jnp.concatenate([(dA * between * beta[..., None]).sum(3), (dinner * between).sum(3)], axis=-2)
    dkq, dk = dkq + dboth @ k, dk + _t(dboth) @ kq
    dkq = dkq.at[..., :chunk, :].add(dk)
    return dkq, dv, dbeta, dbetween, dfrom_state, dto_state, dkeep, dfirst


_chunks.defvjp(_chunks_forward, _chunks_backward)


def _scan(step: _Step, carry: jax.Array, parts: _Arrays, fill: jax.Array, reverse: bool = False) -> tuple[Any, Any]:
    """`lax.scan`, whose results begin filled with a number that differs from loop to loop.

    They are all overwritten. But XLA makes one array of what begins alike, and a copy of it for every loop.
    """
    num = parts[0].shape[0]
    results = jax.eval_shape(lambda *a: step(*a)[1], carry, tuple(x[0] for x in parts))
    filled = tuple(jnp.full((num, *r.shape), fill + i, r.dtype) for i, r in enumerate(results))

    def body(i: jax.Array, running: tuple[jax.Array, _Arrays]) -> tuple[jax.Array, _Arrays]:
        carry, stacked = running
        i = num - 1 - i if reverse else i
        carry, new = step(carry, tuple(lax.dynamic_index_in_dim(x, i, keepdims=False) for x in parts))
        return carry, tuple(lax.dynamic_update_index_in_dim(x, n, i, 0) for x, n in zip(stacked, new, strict=True))

    return lax.fori_loop(0, num, body, (carry, filled))


def _products(kq_NBKQP: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys and queries of a chunk times its keys, `[N, B, K, 1, C, C]` each."""
    chunk = kq_NBKQP.shape[-2] // 2
    both = kq_NBKQP @ _t(kq_NBKQP[..., :chunk, :])
    return both[:, :, :, None, :chunk], both[:, :, :, None, chunk:]


def _by_head(x: jax.Array) -> jax.Array:
    """`[..., C, R, V]` to `[..., R, C, V]`, and back."""
    return jnp.swapaxes(x, -3, -2)


def _t(x: jax.Array) -> jax.Array:
    return jnp.swapaxes(x, -1, -2)


def _strictly_lower(x: jax.Array) -> jax.Array:
    size = x.shape[-1]
    return jnp.where(jnp.tril(jnp.ones((size, size), bool), -1).reshape(*(1,) * (x.ndim - 2), size, size), x, 0)
