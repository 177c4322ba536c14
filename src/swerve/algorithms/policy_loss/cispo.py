"""CISPO (MiniMax 2025, arXiv:2506.13585): clip the importance weight, never the gradient.

As in the paper with its published setting: no lower bound in effect (the lower clip is 1, hence a ratio of 0) and an
upper bound on the ratio. Every token keeps a gradient.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

CISPO_LOW = 1.0
"""How far below 1 the weight may fall; 1 is no bound."""
CISPO_HIGH = 0.28
"""How far above 1 the weight may rise."""


def cispo_loss(
    logprobs: jax.Array,
    behaviour_logprobs: jax.Array,
    advantages: jax.Array,
    low: float = CISPO_LOW,
    high: float = CISPO_HIGH,
) -> jax.Array:
    """Return `-sg(clip(ratio, 1 - low, 1 + high)) A lp`.

    Args:
        logprobs: Trainer log-probabilities, float32 `[rows, time]`.
        behaviour_logprobs: Sampler log-probabilities of the same tokens, float32 `[rows, time]`.
        advantages: float32 `[rows, time]`.
        low: Bound below 1.
        high: Bound above 1.

    Returns:
        Loss of each token, float32 `[rows, time]`.
    """
    ratio = jax.lax.stop_gradient(jnp.exp(logprobs - behaviour_logprobs))
    return -jnp.clip(ratio, 1.0 - low, 1.0 + high) * advantages * logprobs
