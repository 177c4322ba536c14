"""Importance weights of single tokens, not truncated.

Differs from the truncated weights of Yao et al. 2025 ("Your efficient RL framework secretly brings you off-policy RL
training") in having no cap: sequences that drifted are dropped whole by `sequence_gate` instead.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def token_log_ratio(logprobs: jax.Array, behaviour_logprobs: jax.Array) -> jax.Array:
    """Return `sg(lp) - lp_gen`.

    Args:
        logprobs: Trainer log-probabilities, float32 `[rows, time]`.
        behaviour_logprobs: Sampler log-probabilities of the same tokens, float32 `[rows, time]`.

    Returns:
        float32 `[rows, time]`, without gradient.
    """
    return jax.lax.stop_gradient(logprobs) - jax.lax.stop_gradient(behaviour_logprobs)


def importance_weights(logprobs: jax.Array, behaviour_logprobs: jax.Array) -> jax.Array:
    """Return `w = exp(sg(lp) - lp_gen)`, 0 where that is not finite.

    Args:
        logprobs: Trainer log-probabilities, float32 `[rows, time]`.
        behaviour_logprobs: Sampler log-probabilities of the same tokens, float32 `[rows, time]`.

    Returns:
        float32 `[rows, time]`, without gradient.
    """
    weights = jnp.exp(token_log_ratio(logprobs, behaviour_logprobs))
    return jnp.where(jnp.isfinite(weights), weights, 0.0)
