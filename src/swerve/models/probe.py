"""Log-probabilities of one list of tokens, in a program of its own: what an engine elsewhere is held against."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from swerve.models.config import Qwen35MoeConfig
from swerve.models.forward import forward
from swerve.models.head import token_logprobs
from swerve.models.parameters import Params
from swerve.types import Float32Array


def score_tokens(params: Params, config: Qwen35MoeConfig, tokens: Sequence[int]) -> Float32Array:
    """Score tokens at temperature 1, with activations in float32.

    Args:
        params: Parameters.
        config: The model's shape.
        tokens: `[n]` token ids of one sequence.

    Returns:
        Nats, float32 `[n]`: entry t is of `tokens[t]` given those before it, and entry 0 is 0.
    """

    def score(params: Params, row: jax.Array) -> jax.Array:
        segments, positions = jnp.ones_like(row), jnp.arange(row.shape[1], dtype=jnp.int32)[None]
        hidden = forward(params, config, row, segments, positions).hidden
        return token_logprobs(params, config, hidden, row, segments)[0][0]

    return np.asarray(jax.jit(score)(params, jnp.asarray(tokens, jnp.int32)[None]))
