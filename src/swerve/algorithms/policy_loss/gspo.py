"""GSPO (Zheng et al. 2025, arXiv:2507.18071): one ratio per sequence.

The token form (GSPO-token, eq. 13): the value of every token's ratio is the geometric mean of its sequence's ratios,
the gradient is the token's own; with one advantage per sequence it equals the sequence form. The published bounds are
3e-4 below and 4e-4 above, and the loss is normalised per sequence.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from swerve.algorithms.correction.importance import token_log_ratio
from swerve.algorithms.segments import per_token, segment_mean

GSPO_LOW = 3e-4
"""How far below 1 the sequence's ratio may fall before its gradient stops."""
GSPO_HIGH = 4e-4
"""How far above 1 the sequence's ratio may rise before its gradient stops."""


def gspo_loss(
    logprobs: jax.Array,
    behaviour_logprobs: jax.Array,
    advantages: jax.Array,
    mask: jax.Array,
    segment_ids: jax.Array,
    low: float = GSPO_LOW,
    high: float = GSPO_HIGH,
) -> jax.Array:
    """Return `-min(s A, clip(s, 1 - low, 1 + high) A)` with `s = exp(mean_t m (lp - lp_gen))` per sequence.

    Args:
        logprobs: Trainer log-probabilities, float32 `[rows, time]`.
        behaviour_logprobs: Sampler log-probabilities of the same tokens, float32 `[rows, time]`.
        advantages: float32 `[rows, time]`.
        mask: float32 `[rows, time]`, 1 where the token is trained on; the mean is over these.
        segment_ids: int32 `[rows, time]`.
        low: Bound below 1.
        high: Bound above 1.

    Returns:
        Loss of each token, float32 `[rows, time]`.
    """
    log_ratio = segment_mean(token_log_ratio(logprobs, behaviour_logprobs), mask, segment_ids)
    ratio = per_token(jnp.exp(log_ratio), segment_ids) * jnp.exp(logprobs - jax.lax.stop_gradient(logprobs))
    return -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1.0 - low, 1.0 + high) * advantages)
