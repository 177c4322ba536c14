"""Truncated importance sampling per token (TIS).

As in Yao et al. 2025 ("Your efficient RL framework secretly brings you off-policy RL training"): `min(ratio, cap)`. A
ratio that is not a number counts as 0; one that is infinite is cut to the cap like any other.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from swerve.algorithms.correction.importance import token_log_ratio


def truncated_importance_weights(logprobs: jax.Array, behaviour_logprobs: jax.Array, cap: float = 2.0) -> jax.Array:
    """Return `min(exp(sg(lp) - lp_gen), cap)`.

    Args:
        logprobs: Trainer log-probabilities, float32 `[rows, time]`.
        behaviour_logprobs: Sampler log-probabilities of the same tokens, float32 `[rows, time]`.
        cap: Largest weight.

    Returns:
        float32 `[rows, time]`, without gradient.
    """
    weights = jnp.minimum(jnp.exp(token_log_ratio(logprobs, behaviour_logprobs)), cap)
    return jnp.where(jnp.isnan(weights), 0.0, weights)
