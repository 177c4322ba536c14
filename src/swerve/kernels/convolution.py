"""Causal depthwise convolution followed by silu, exact at segment borders; computed in float32.

Legend: B rows, T time, C channels, W kernel width, Z = W - 1 inputs before the row.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def causal_convolution(
    x_BTC: jax.Array, weight_WC: jax.Array, history_BZC: jax.Array, reach_BT: jax.Array
) -> jax.Array:
    """`silu(sum_s weight[W-1-s] * x[t-s])` over the `s` that reach back no further than allowed.

    Args:
        x_BTC: Inputs.
        weight_WC: The last row multiplies the present input.
        history_BZC: The inputs before the row; zeros at the start of a sequence.
        reach_BT: int32, how many inputs before t belong to the same sequence (any larger number means all).

    Returns:
        `[B, T, C]`, of the inputs' type.
    """
    return _convolve(x_BTC, weight_WC, history_BZC, reach_BT)


@jax.custom_vjp
def _convolve(x: jax.Array, weight: jax.Array, history: jax.Array, reach: jax.Array) -> jax.Array:
    return _forward(x, weight, history, reach)[0]


def _weighted_sum(padded: jax.Array, weight: jax.Array, reach: jax.Array) -> jax.Array:
    width, time = weight.shape[0], reach.shape[1]
    padded, weight = padded.astype(jnp.float32), weight.astype(jnp.float32)
    total = padded[:, width - 1 :] * weight[None, -1:]
    for back in range(1, width):
        seen = padded[:, width - 1 - back : width - 1 - back + time]
        total += jnp.where((reach >= back)[..., None], seen, 0) * weight[None, None, width - 1 - back]
    return total


def _forward(
    x: jax.Array, weight: jax.Array, history: jax.Array, reach: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    padded = jnp.concatenate([history, x], axis=1)
    return jax.nn.silu(_weighted_sum(padded, weight, reach)).astype(x.dtype), (padded, weight, reach)


def _backward(saved: tuple[jax.Array, ...], dout: jax.Array) -> tuple[jax.Array | None, ...]:
    padded, weight, reach = saved
    width, time = weight.shape[0], reach.shape[1]
    before = _weighted_sum(padded, weight, reach)
    gate = jax.nn.sigmoid(before)
    edge = width - 1
    dsum = jnp.pad(dout * gate * (1 + before * (1 - gate)), ((0, 0), (edge, edge), (0, 0)))
    dsum, seen = lax.optimization_barrier((dsum, jnp.pad(reach, ((0, 0), (edge, edge)), constant_values=-1)))
    dpadded, dweight = jnp.zeros_like(padded, jnp.float32), []
    for back in range(width):
        ahead = slice(back, back + time + edge)  # where the input at each padded place is `back` places old
        used = jnp.where((seen[:, ahead] >= back)[..., None], dsum[:, ahead], 0)
        dpadded += used * weight[None, None, edge - back]
        dweight.append((used * padded).sum((0, 1)))
    dpadded, dtype = dpadded.astype(padded.dtype), weight.dtype
    return dpadded[:, edge:], jnp.stack(dweight[::-1]).astype(dtype), dpadded[:, :edge], None


_convolve.defvjp(_forward, _backward)


def causal_convolution_naive(
    x_BTC: jax.Array, weight_WC: jax.Array, history_BZC: jax.Array, reach_BT: jax.Array
) -> jax.Array:
    """The same, plainly: the oracle of `causal_convolution` and of its gradient."""
    padded = jnp.concatenate([history_BZC, x_BTC], axis=1)
    return jax.nn.silu(_weighted_sum(padded, weight_WC, reach_BT)).astype(x_BTC.dtype)
