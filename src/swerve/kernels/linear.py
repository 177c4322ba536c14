"""Matrix product whose gradient XLA's CPU compiler cannot smear.

Without the barrier the element-wise work that produces the incoming gradient is fused into both products of the
backward pass, computed twice and read column by column.
"""

from __future__ import annotations

import jax
from jax import lax


@jax.custom_vjp
def matmul(x: jax.Array, w: jax.Array) -> jax.Array:
    """`x @ w`.

    Args:
        x: `[..., K]`.
        w: `[K, N]`.

    Returns:
        `[..., N]`.
    """
    return lax.dot_general(x, w, (((x.ndim - 1,), (0,)), ((), ())))


def _forward(x: jax.Array, w: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return matmul(x, w), (x, w)


def _backward(saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    dy = lax.optimization_barrier(dy)
    rows = tuple(range(x.ndim - 1))
    dx = lax.dot_general(dy, w, (((dy.ndim - 1,), (1,)), ((), ())))
    dw = lax.dot_general(x, dy, ((rows, rows), ((), ())))
    return dx, dw


matmul.defvjp(_forward, _backward)
