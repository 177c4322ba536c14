"""The gate of seq-mask-tis: a sequence counts wholly or not at all.

Differs from sequence-level truncated importance sampling in that nothing is clipped: the geometric mean of a
sequence's token ratios only decides whether the sequence enters the numerator, and tokens keep their own weights. A
rejected sequence stays in the denominator.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from swerve.algorithms.correction.importance import token_log_ratio
from swerve.algorithms.segments import segment_mean

GATE_LOW = 0.999
"""Smallest geometric mean ratio that passes."""
GATE_HIGH = 1.002
"""Largest geometric mean ratio that passes."""


def sequence_gate(
    logprobs: jax.Array,
    behaviour_logprobs: jax.Array,
    mask: jax.Array,
    segment_ids: jax.Array,
    low: float = GATE_LOW,
    high: float = GATE_HIGH,
) -> jax.Array:
    """Return `k = 1` where `low <= exp(mean_t m (sg(lp) - lp_gen)) <= high`, else 0.

    Args:
        logprobs: Trainer log-probabilities, float32 `[rows, time]`.
        behaviour_logprobs: Sampler log-probabilities of the same tokens, float32 `[rows, time]`.
        mask: float32 `[rows, time]`, 1 where the token is trained on; the mean is over these.
        segment_ids: int32 `[rows, time]`.
        low: Smallest geometric mean ratio that passes.
        high: Largest one.

    Returns:
        float32 `[rows, time + 1]` indexed by segment; 1 where no token of the segment is trained on, 0 where the mean
        is not a number.
    """
    ratio = jnp.exp(segment_mean(token_log_ratio(logprobs, behaviour_logprobs), mask, segment_ids))
    return jnp.where((ratio >= low) & (ratio <= high), 1.0, 0.0)
