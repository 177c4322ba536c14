"""Gated DeltaNet: a linear-attention state that decays, is corrected by the delta rule, and is read by queries.

Per value head, with state S of shape [P, V] and key k, query q, value v, log-decay g <= 0, step beta:

    S <- exp(g) S;  S <- S + k (beta (v - k^T S))^T;  o = q^T S

`delta_recurrent` computes exactly that and is the oracle. `delta_chunked` solves a chunk of C tokens at once (Yang et al.,
"Gated Delta Networks", 2024, section 3.3): with G the running sum of g in the chunk, A strictly lower triangular
A_ij = beta_i (k_i . k_j) exp(G_i - G_j), and M = (I + A)^-1,

    U = M (beta v);  W = M (beta exp(G) k);  v' = U - W S
    o = exp(G) q S + tril((q . k) exp(G_i - G_j)) v';  S <- exp(G_C) S + (exp(G_C - G) k)^T v'

A token that starts a segment forgets the state: every product that would couple two segments is masked, before any exp,
and sums of g never include another segment's, so values of one segment never touch the rounding of another.

Legend: B rows, T time, N chunks, C chunk, K key heads, H value heads, R = H / K, P key width, V value width.
"""

from __future__ import annotations

import math

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
    q, k = jnp.repeat(q_BKP, repeats, axis=1)[..., None], jnp.repeat(k_BKP, repeats, axis=1)[..., None]
    state = state_BHPV * jnp.exp(g_BH)[..., None, None]
    correction = (v_BHV - (state * k).sum(2)) * beta_BH[..., None]
    state = state + k * correction[:, :, None, :]
    return (state * q).sum(2), state


@jax.custom_vjp
def unit_lower_inverse(a: jax.Array) -> jax.Array:
    """`(I + A)^-1` for strictly lower triangular `A`, `[..., C, C]`.

    The Neumann series of a nilpotent matrix ends: the product of (I + A^(2^i)) needs log2(C) squarings. The gradient
    needs the inverse only: dA = -M^T dM M^T.
    """
    size = a.shape[-1]
    power = -a
    inverse = jnp.eye(size, dtype=a.dtype).reshape(*(1,) * (a.ndim - 2), size, size) + power
    for _ in range(max(math.ceil(math.log2(size)) - 1, 0)):
        power = power @ power
        inverse = inverse + inverse @ power
    return inverse


def _inverse_forward(a: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(a)
    return inverse, inverse


def _inverse_backward(inverse: jax.Array, dinverse: jax.Array) -> tuple[jax.Array]:
    transposed = jnp.swapaxes(inverse, -1, -2)
    return (-(transposed @ dinverse @ transposed),)


unit_lower_inverse.defvjp(_inverse_forward, _inverse_backward)


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
    time, chunk = q_BTKP.shape[1], min(chunk, q_BTKP.shape[1])
    run_BT = jnp.cumsum(starts_BT.astype(jnp.int32), axis=1)
    arrays = (q_BTKP, k_BTKP, v_BTHV, g_BTH, beta_BTH)
    if pad := -time % chunk:
        arrays = tuple(jnp.pad(x, ((0, 0), (0, pad), *((0, 0),) * (x.ndim - 2))) for x in arrays)
        run_BT = jnp.pad(run_BT, ((0, 0), (0, pad)), mode="edge")
    num_chunks = (time + pad) // chunk
    q, k, v, g, beta = (_to_chunks(x, num_chunks, chunk) for x in arrays)  # [B, heads, N, C, ...]
    q, k, v = lax.optimization_barrier((q, k, v))

    run_BNC = run_BT.reshape(run_BT.shape[0], num_chunks, chunk)
    last_BN = run_BNC[..., -1]
    carried_BN = jnp.pad(last_BN[:, :-1], ((0, 0), (1, 0)))
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))
    same = (run_BNC[..., :, None] == run_BNC[..., None, :]) & lower[None, None]  # [B, N, C, C]
    same_BHNCC = same[:, None]
    total = jnp.where(same_BHNCC, g[..., None, :], 0).sum(-1)  # running sum within the segment
    decay = jnp.exp(jnp.where(same_BHNCC, total[..., :, None] - total[..., None, :], -jnp.inf))
    from_state = jnp.exp(total) * (run_BNC == carried_BN[..., None])[:, None]
    to_state = jnp.exp(jnp.where((run_BNC == last_BN[..., None])[:, None], total[..., -1:] - total, -jnp.inf))
    keep = jnp.exp(total[..., -1]) * (last_BN == carried_BN)[:, None]

    repeats = v.shape[1] // k.shape[1]
    products = jnp.einsum("bhncp,bhnsp->bhncs", k, k), jnp.einsum("bhncp,bhnsp->bhncs", q, k)
    kk, qk, q, k = (jnp.repeat(x, repeats, axis=1) for x in (*products, q, k))
    inverse = unit_lower_inverse(jnp.where(jnp.tril(lower, -1)[None, None, None], kk * decay * beta[..., None], 0))
    scaled = inverse * beta[..., None, :]
    u = scaled @ v
    w = (scaled * from_state[..., None, :]) @ k
    inner = qk * decay
    out, state = _scan_chunks(u, w, inner, q, k, from_state, to_state, keep, state_BHPV)
    return out.reshape(out.shape[0], num_chunks * chunk, *out.shape[3:])[:, :time], state


def _scan_chunks(
    u: jax.Array,
    w: jax.Array,
    inner: jax.Array,
    q: jax.Array,
    k: jax.Array,
    from_state: jax.Array,
    to_state: jax.Array,
    keep: jax.Array,
    state: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Carry the state over chunks `[B, H, N, ...]`; outputs come as `[B, N, C, H, V]`."""

    def step(state: jax.Array, n: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        u, w, inner, q, k, from_state, to_state, keep = n
        fresh = u - w @ state
        out = (q @ state) * from_state[..., None] + inner @ fresh
        state = state * keep[..., None, None] + jnp.einsum("bhcp,bhcv->bhpv", k, fresh * to_state[..., None])
        return state, out

    inputs = (u, w, inner, q, k, from_state, to_state, keep)
    state, outs = lax.scan(step, state, jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), inputs))
    return jnp.moveaxis(outs, (0, 2), (1, 3)), state


def _to_chunks(x: jax.Array, num_chunks: int, chunk: int) -> jax.Array:
    """`[B, T, H, ...]` to `[B, H, N, C, ...]`."""
    return jnp.moveaxis(x.reshape(x.shape[0], num_chunks, chunk, *x.shape[2:]), 3, 1)
