"""Dual-clip PPO (Ye et al. 2020, arXiv:1912.09729).

As in the paper, on top of the asymmetric clip: with a negative advantage and a large ratio the surrogate is unbounded,
so it is cut at `-c A`. The paper's c is 3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from swerve.algorithms.policy_loss.clipped import CLIP_HIGH, CLIP_LOW, clipped_loss

DUAL_CLIP = 3.0
"""Largest ratio that counts against a negative advantage."""


def dual_clipped_loss(
    logprobs: jax.Array,
    behaviour_logprobs: jax.Array,
    advantages: jax.Array,
    low: float = CLIP_LOW,
    high: float = CLIP_HIGH,
    dual: float = DUAL_CLIP,
) -> jax.Array:
    """Return the clipped loss, at most `-dual A` where A is negative.

    Args:
        logprobs: Trainer log-probabilities, float32 `[rows, time]`.
        behaviour_logprobs: Sampler log-probabilities of the same tokens, float32 `[rows, time]`.
        advantages: float32 `[rows, time]`.
        low: Bound below 1.
        high: Bound above 1.
        dual: Bound of the ratio for negative advantages, above 1.

    Returns:
        Loss of each token, float32 `[rows, time]`.
    """
    loss = clipped_loss(logprobs, behaviour_logprobs, advantages, low, high)
    return jnp.where(advantages < 0, jnp.minimum(loss, -dual * advantages), loss)
