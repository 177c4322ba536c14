"""The core of the sharded head: one device scores its own tokens against the whole table.

The table is gathered once forward and once backward, logits live for one chunk of tokens at a time, and the gradient of
the table is added up in float32 on the device and reduced once. Called inside a manual program, or on one device.

A token whose results nothing depends on adds exactly nothing to either gradient, whatever its hidden state holds; a
value that is not finite at a token that counts makes both gradients so.

Legend: N tokens of a device, M hidden width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


class Table(NamedTuple):
    """How the parts `[m, v]` of the head's weight become the whole `[M, V]`.

    Attributes:
        steps: The dimension and the mesh axes of each exchange, in the order in which gradients are reduced; the table
            is gathered in the other order.
        sum_in_float32: Send gradients in float32 rather than in the table's type.
    """

    steps: tuple[tuple[int, tuple[str, ...]], ...] = ()
    sum_in_float32: bool = False

    def gather(self, part: jax.Array) -> jax.Array:
        """The whole table from this device's part."""
        for dim, axes in reversed(self.steps):
            part = lax.all_gather(part, axes, axis=dim, tiled=True)
        return part

    def scatter_sum(self, whole: jax.Array) -> jax.Array:
        """This device's part of the sum over the devices that hold the others."""
        for dim, axes in self.steps:
            whole = lax.psum_scatter(whole, axes, scatter_dimension=dim, tiled=True)
        return whole


def _score(
    hidden_NM: jax.Array, part_MV: jax.Array, targets_N: jax.Array, scale: jax.Array, chunk: int, table: Table
) -> tuple[jax.Array, jax.Array]:
    weight = table.gather(part_MV).astype(hidden_NM.dtype)

    def score(inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden, targets = inputs
        shifted, total, exps = _softmax_parts(hidden, weight, scale)
        log_total = jnp.log(total)
        chosen = jnp.take_along_axis(shifted, targets[:, None], axis=1)
        entropy = log_total - _product(exps, shifted).sum(-1, keepdims=True) / total
        return (chosen - log_total)[:, 0], entropy[:, 0]

    lp, entropy = lax.map(score, (_chunks(hidden_NM, chunk), _chunks(targets_N, chunk)))
    return lp.reshape(-1)[: len(targets_N)], entropy.reshape(-1)[: len(targets_N)]


scored = jax.custom_vjp(_score, nondiff_argnums=(4, 5))
"""Log-probability of each target and entropy of its distribution, nats, float32 `[N]` each.

Args:
    hidden_NM: `[N, M]`, float32 or bfloat16.
    part_MV: This device's part of the table.
    targets_N: int32 `[N]`.
    scale: float32 scalar, multiplies the logits.
    chunk: Tokens whose logits are live at a time, at most N.
    table: How the parts become whole.
"""


def _forward(
    hidden: jax.Array, part: jax.Array, targets: jax.Array, scale: jax.Array, chunk: int, table: Table
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    out = _score(hidden, part, targets, scale, chunk, table)
    return out, (hidden, part, targets, scale, out[1])


def _backward(
    chunk: int, table: Table, saved: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    hidden_NM, part_MV, targets_N, scale, entropy_N = saved
    if table.steps:  # gathered anew, rather than kept from the forward pass
        part_MV, entropy_N = lax.optimization_barrier((part_MV, entropy_N))
    weight = table.gather(part_MV).astype(hidden_NM.dtype)

    def step(dweight: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        hidden, targets, entropy, dlp, dentropy = inputs
        counts = (dlp != 0) | (dentropy != 0)
        hidden, entropy = jnp.where(counts[:, None], hidden, 0), jnp.where(counts, entropy, 0)
        shifted, total, exps = _softmax_parts(hidden, weight, scale)
        probs = exps / total
        chosen = jnp.arange(weight.shape[1])[None] == targets[:, None]
        surprise = shifted - jnp.log(total) + entropy[:, None]  # log p + H
        dlogits = dlp[:, None] * (chosen - probs) - dentropy[:, None] * _product(probs, surprise)
        dlogits = lax.optimization_barrier((dlogits * scale).astype(hidden.dtype))
        dhidden = lax.dot_general(dlogits, weight, (((1,), (1,)), ((), ())))
        return dweight + lax.dot_general(
            hidden, dlogits, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        ), dhidden

    arrays = (hidden_NM, targets_N, entropy_N, *cotangents)
    dweight, dhidden = lax.scan(step, jnp.zeros(weight.shape, jnp.float32), tuple(_chunks(x, chunk) for x in arrays))
    dhidden = dhidden.reshape(-1, hidden_NM.shape[1])[: len(targets_N)]
    sent = dweight if table.sum_in_float32 else dweight.astype(part_MV.dtype)
    return dhidden, table.scatter_sum(sent).astype(part_MV.dtype), None, jnp.zeros_like(scale)


scored.defvjp(_forward, _backward)


def _softmax_parts(hidden: jax.Array, weight: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scaled logits less their maximum, the sum of their exps `[n, 1]`, and the exps."""
    scaled = jnp.matmul(hidden, weight, preferred_element_type=jnp.float32) * scale
    shifted = scaled - scaled.max(-1, keepdims=True)
    exps = jnp.exp(shifted)
    return shifted, exps.sum(-1, keepdims=True), exps


def _product(share: jax.Array, surprise: jax.Array) -> jax.Array:
    """Their product, 0 where the share is: what is impossible surprises by infinity, and adds nothing."""
    return jnp.where(share == 0, 0.0, share * surprise)


def _chunks(x: jax.Array, chunk: int) -> jax.Array:
    """`[N, ...]` to `[ceil(N / chunk), chunk, ...]`, padded with zeros."""
    pad = -x.shape[0] % chunk
    if pad:
        x = jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1)))
    return x.reshape(-1, chunk, *x.shape[1:])
