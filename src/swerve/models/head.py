"""From hidden states to log-probabilities, without ever holding the logits of all tokens.

On a mesh the table is gathered once forward and once backward, each device scores its own tokens, and the gradient of
the table is added up in float32 on the device and reduced once.

Legend: N tokens, M hidden width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from swerve.models.config import Qwen35MoeConfig
from swerve.models.execution import DEFAULT, Execution
from swerve.models.parameters import Params, parameters
from swerve.models.sharding import RULES
from swerve.parallel import MeshShape, Parameter


def head_weight(params: Params, config: Qwen35MoeConfig) -> jax.Array:
    """The head's weight `[M, V]`: the transposed embedding where they are tied."""
    return params["embedding"].T if config.tie_word_embeddings else params["head"]


def logits(params: Params, config: Qwen35MoeConfig, hidden: jax.Array) -> jax.Array:
    """Logits of the next token, float32 `[..., V]`, for hidden states `[..., M]`."""
    weight = head_weight(params, config).astype(hidden.dtype)
    return jnp.matmul(hidden, weight, preferred_element_type=jnp.float32)


def token_logprobs(
    params: Params,
    config: Qwen35MoeConfig,
    hidden: jax.Array,
    tokens: jax.Array,
    segment_ids: jax.Array,
    temperature: float | jax.Array = 1.0,
    *,
    execution: Execution = DEFAULT,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each token given those before it in its segment.

    Args:
        params: Parameters.
        config: The model's shape.
        hidden: `[B, T, M]` from `forward`.
        tokens: int32 `[B, T]`, the same rows.
        segment_ids: int32 `[B, T]`.
        temperature: Divides the logits.
        execution: Its `logprob_chunk` bounds the logits that are live; on its mesh all arrays are this device's.

    Returns:
        Log-probabilities and entropies of the distributions they come from (nats), float32 `[B, T]`: entry t is scored
        from the hidden state at t - 1 of the same segment; 0 at segment starts and in padding.
    """
    mesh, shape = execution.mesh, tokens.shape
    following = jnp.concatenate([tokens[:, 1:], mesh.from_after(tokens[:, :1], "context")], axis=1)
    flat, targets = _share(hidden.reshape(-1, hidden.shape[-1]), mesh), _share(following.reshape(-1), mesh)
    scale = 1 / jnp.asarray(temperature, jnp.float32)
    table = _Table.of(config, mesh)
    chunk = min(execution.logprob_chunk, flat.shape[0])
    scores = _scored(flat, head_weight(params, config), targets, scale, chunk, table)
    before = mesh.from_before(segment_ids[:, -1:], "context")
    inside = (jnp.concatenate([before, segment_ids[:, :-1]], axis=1) == segment_ids) & (segment_ids > 0)

    def shifted(values: jax.Array) -> jax.Array:
        values = mesh.gather(values, ("tensor",), 0).reshape(shape)
        moved = jnp.concatenate([mesh.from_before(values[:, -1:], "context"), values[:, :-1]], axis=1)
        return jnp.where(inside, moved, 0)

    return shifted(scores[0]), shifted(scores[1])


def _share(x: jax.Array, mesh: MeshShape) -> jax.Array:
    """The tokens that this rank of the tensor axis scores, of those that all its ranks hold."""
    if mesh.tensor == 1:
        return x
    size = x.shape[0] // mesh.tensor
    return lax.dynamic_slice_in_dim(x, mesh.index("tensor") * size, size, 0)


class _Table(NamedTuple):
    """How the parts `[M, V]` of the head's weight become whole."""

    declared: Parameter
    mesh: MeshShape

    @classmethod
    def of(cls, config: Qwen35MoeConfig, mesh: MeshShape) -> _Table:
        """The table of a model; where the embedding serves as head, it is the transposed one."""
        declared = parameters(config)["embedding" if config.tie_word_embeddings else "head"]
        if config.tie_word_embeddings:
            declared = replace(declared, shape=declared.shape[::-1], axes=declared.axes[::-1])
        return cls(declared, mesh)

    def gather(self, part: jax.Array) -> jax.Array:
        return RULES.gather(part, self.declared, self.mesh)

    def scatter_sum(self, whole: jax.Array) -> jax.Array:
        return RULES.scatter_sum(whole, self.declared, self.mesh)


def _score(
    hidden_NM: jax.Array, part_MV: jax.Array, targets_N: jax.Array, scale: jax.Array, chunk: int, table: _Table
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each target and entropy, `[N]` each, `chunk` tokens at a time."""
    weight = table.gather(part_MV).astype(hidden_NM.dtype)

    def score(inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden, targets = inputs
        shifted, total, exps = _softmax_parts(hidden, weight, scale)
        log_total = jnp.log(total)
        chosen = jnp.take_along_axis(shifted, targets[:, None], axis=1)
        entropy = log_total - (exps * shifted).sum(-1, keepdims=True) / total
        return (chosen - log_total)[:, 0], entropy[:, 0]

    lp, entropy = lax.map(score, (_chunks(hidden_NM, chunk), _chunks(targets_N, chunk)))
    return lp.reshape(-1)[: len(targets_N)], entropy.reshape(-1)[: len(targets_N)]


_scored = jax.custom_vjp(_score, nondiff_argnums=(4, 5))


def _scored_forward(
    hidden: jax.Array, part: jax.Array, targets: jax.Array, scale: jax.Array, chunk: int, table: _Table
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    out = _score(hidden, part, targets, scale, chunk, table)
    return out, (hidden, part, targets, scale, out[1])


def _scored_backward(
    chunk: int, table: _Table, saved: tuple[jax.Array, ...], cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array | None, ...]:
    hidden_NM, part_MV, targets_N, scale, entropy_N = saved
    if table.mesh.size() > 1:  # gathered anew, rather than kept from the forward pass
        part_MV, entropy_N = lax.optimization_barrier((part_MV, entropy_N))
    weight = table.gather(part_MV).astype(hidden_NM.dtype)

    def step(dweight: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        hidden, targets, entropy, dlp, dentropy = inputs
        shifted, total, exps = _softmax_parts(hidden, weight, scale)
        probs = exps / total
        chosen = jnp.arange(weight.shape[1])[None] == targets[:, None]
        surprise = shifted - jnp.log(total) + entropy[:, None]  # log p + H
        dlogits = dlp[:, None] * (chosen - probs) - dentropy[:, None] * probs * surprise
        dlogits = lax.optimization_barrier((dlogits * scale).astype(hidden.dtype))
        dhidden = lax.dot_general(dlogits, weight, (((1,), (1,)), ((), ())))
        return dweight + lax.dot_general(
            hidden, dlogits, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32
        ), dhidden

    arrays = (hidden_NM, targets_N, entropy_N, *cotangents)
    dweight, dhidden = lax.scan(step, jnp.zeros(weight.shape, jnp.float32), tuple(_chunks(x, chunk) for x in arrays))
    dhidden = dhidden.reshape(-1, hidden_NM.shape[1])[: len(targets_N)]
    return dhidden, table.scatter_sum(dweight.astype(part_MV.dtype)), None, jnp.zeros_like(scale)


_scored.defvjp(_scored_forward, _scored_backward)


def _softmax_parts(hidden: jax.Array, weight: jax.Array, scale: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Scaled logits less their maximum, the sum of their exps `[n, 1]`, and the exps."""
    scaled = jnp.matmul(hidden, weight, preferred_element_type=jnp.float32) * scale
    shifted = scaled - scaled.max(-1, keepdims=True)
    exps = jnp.exp(shifted)
    return shifted, exps.sum(-1, keepdims=True), exps


def _chunks(x: jax.Array, chunk: int) -> jax.Array:
    """`[N, ...]` to `[ceil(N / chunk), chunk, ...]`, padded with zeros."""
    pad = -x.shape[0] % chunk
    if pad:
        x = jnp.pad(x, ((0, pad), *((0, 0),) * (x.ndim - 1)))
    return x.reshape(-1, chunk, *x.shape[1:])
