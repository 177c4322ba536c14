"""Importance-weighted policy gradient without a clip.

PPO's surrogate (Schulman et al. 2017, arXiv:1707.06347, eq. 6, "conservative policy iteration") as it is, unbiased and
of unbounded variance.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def unclipped_loss(logprobs: jax.Array, behaviour_logprobs: jax.Array, advantages: jax.Array) -> jax.Array:
    """Return `-exp(lp - lp_gen) A`.

    Args:
        logprobs: Trainer log-probabilities, float32 `[rows, time]`.
        behaviour_logprobs: Sampler log-probabilities of the same tokens, float32 `[rows, time]`.
        advantages: float32 `[rows, time]`.

    Returns:
        Loss of each token, float32 `[rows, time]`.
    """
    return -jnp.exp(logprobs - behaviour_logprobs) * advantages
