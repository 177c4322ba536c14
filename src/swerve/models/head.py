"""From hidden states to log-probabilities, without ever holding the logits of all tokens.

On a mesh the table is gathered once forward and once backward, each device scores its own tokens, and the gradient of
the table is added up in float32 on the device and reduced once; see `scoring`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from swerve.models.config import Qwen35MoeConfig
from swerve.models.execution import DEFAULT, Execution
from swerve.models.parameters import Params, parameters
from swerve.models.plain_head import plain_token_logprobs
from swerve.models.scoring import Table, scored
from swerve.models.sharding import RULES
from swerve.parallel import MeshShape


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

    Raises:
        ValueError: The plain head was chosen on a mesh, whose arrays it takes whole: `plain_token_logprobs`.
    """
    mesh, shape, chunk = execution.mesh, tokens.shape, execution.logprob_chunk
    weight = head_weight(params, config)
    if execution.head == "plain":
        if mesh.size() > 1:
            raise ValueError("on a mesh the plain head works on whole arrays, outside of the manual program")
        return plain_token_logprobs(hidden, weight, tokens, segment_ids, temperature, chunk=chunk)
    following = jnp.concatenate([tokens[:, 1:], mesh.from_after(tokens[:, :1], "context")], axis=1)
    flat, targets = _share(hidden.reshape(-1, hidden.shape[-1]), mesh), _share(following.reshape(-1), mesh)
    scale = 1 / jnp.asarray(temperature, jnp.float32)
    scores = scored(flat, weight, targets, scale, min(chunk, flat.shape[0]), head_table(config, execution))
    before = mesh.from_before(segment_ids[:, -1:], "context")
    inside = (jnp.concatenate([before, segment_ids[:, :-1]], axis=1) == segment_ids) & (segment_ids > 0)

    def shifted(values: jax.Array) -> jax.Array:
        values = mesh.gather(values, ("tensor",), 0).reshape(shape)
        moved = jnp.concatenate([mesh.from_before(values[:, -1:], "context"), values[:, :-1]], axis=1)
        return jnp.where(inside, moved, 0)

    return shifted(scores[0]), shifted(scores[1])


def head_table(config: Qwen35MoeConfig, execution: Execution) -> Table:
    """How a model's table `[M, V]` is spread; where the embedding serves as head, it is the transposed one."""
    splits = RULES.splits(parameters(config)["embedding" if config.tie_word_embeddings else "head"])
    if config.tie_word_embeddings:
        splits = splits[::-1]
    steps = ((dim, axes) for dim, split in enumerate(splits) for axes in execution.mesh.steps(split.storage))
    return Table(tuple(steps), execution.sum_in_float32)


def _share(x: jax.Array, mesh: MeshShape) -> jax.Array:
    """The tokens that this rank of the tensor axis scores, of those that all its ranks hold."""
    if mesh.tensor == 1:
        return x
    size = x.shape[0] // mesh.tensor
    return lax.dynamic_slice_in_dim(x, mesh.index("tensor") * size, size, 0)
