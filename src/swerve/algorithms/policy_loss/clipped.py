"""PPO's clipped surrogate with separate bounds (clip-higher).

As in PPO (Schulman et al. 2017, arXiv:1707.06347, eq. 7) with DAPO's asymmetric bounds (Yu et al. 2025,
arXiv:2503.14476): 0.2 below, 0.28 above. The old policy is the one that sampled, whose log-probabilities the sampler
recorded; they are not recomputed by the trainer.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

CLIP_LOW = 0.2
"""How far below 1 the ratio may fall before its gradient stops."""
CLIP_HIGH = 0.28
"""How far above 1 the ratio may rise before its gradient stops."""


def clipped_loss(
    logprobs: jax.Array,
    behaviour_logprobs: jax.Array,
    advantages: jax.Array,
    low: float = CLIP_LOW,
    high: float = CLIP_HIGH,
) -> jax.Array:
    """Return `-min(ratio A, clip(ratio, 1 - low, 1 + high) A)` with `ratio = exp(lp - lp_gen)`.

    Args:
        logprobs: Trainer log-probabilities, float32 `[rows, time]`.
        behaviour_logprobs: Sampler log-probabilities of the same tokens, float32 `[rows, time]`.
        advantages: float32 `[rows, time]`.
        low: Bound below 1.
        high: Bound above 1.

    Returns:
        Loss of each token, float32 `[rows, time]`.
    """
    ratio = jnp.exp(logprobs - behaviour_logprobs)
    return -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1.0 - low, 1.0 + high) * advantages)
