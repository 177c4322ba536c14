"""Policy gradient with the ratio forced to 1.

Differs from PPO and GRPO, whose ratio compares the policy with the one that sampled: here the ratio's value is 1 by
construction, so clipping never acts and only its gradient remains; being off-policy is handled by importance weights
and the sequence gate. One update per batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def on_policy_loss(logprobs: jax.Array, advantages: jax.Array) -> jax.Array:
    """Return `-A exp(lp - sg(lp))`.

    Args:
        logprobs: Trainer log-probabilities, float32 `[rows, time]`.
        advantages: float32 `[rows, time]`.

    Returns:
        Loss of each token, float32 `[rows, time]`; its value is -A, its gradient that of `-A lp`.
    """
    return -advantages * jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))
