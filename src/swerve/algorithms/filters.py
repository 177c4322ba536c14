"""Filters: which sequences are trained on at all.

A sequence that a filter rejects leaves the mask m, and with it numerator and denominator together, but not the
baseline of its group. Both filters read lengths or forward values only, so no second pass is needed to know the
denominator.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from swerve.algorithms.segments import segment_mean
from swerve.types import BoolArray


def overlong_filter(lengths: ArrayLike, context_length: int) -> BoolArray:
    """Keep the sequences that did not run into the context cap.

    Differs from DAPO's overlong filtering (Yu et al. 2025, arXiv:2503.14476) in looking at the whole sequence, prompt
    and tool results included, not at the length of one response.

    Args:
        lengths: Total tokens of each sequence, `[n]`.
        context_length: The cap; a sequence whose length equals it was cut.

    Returns:
        bool `[n]`, true where the sequence is kept.
    """
    return np.asarray(lengths) < context_length


def logprob_error(
    logprobs: jax.Array, behaviour_logprobs: jax.Array, mask: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    """Return each sequence's multiplicative log-probability error, `mean_t exp|lp_gen - lp|`.

    Args:
        logprobs: Trainer log-probabilities, float32 `[rows, time]`.
        behaviour_logprobs: Sampler log-probabilities of the same tokens, float32 `[rows, time]`.
        mask: float32 `[rows, time]`, 1 where the token is trained on; the mean is over these.
        segment_ids: int32 `[rows, time]`.

    Returns:
        float32 `[rows, time + 1]` indexed by segment, without gradient; 1 is agreement, 0 means no token to compare.
    """
    gap = jnp.abs(jax.lax.stop_gradient(behaviour_logprobs) - jax.lax.stop_gradient(logprobs))
    return segment_mean(jnp.exp(gap), mask, segment_ids)


def logprob_error_filter(error: jax.Array, threshold: float) -> jax.Array:
    """Keep the sequences whose error does not exceed the threshold.

    Args:
        error: `logprob_error`, float32 `[rows, time + 1]`.
        threshold: Largest error that is kept; 2.0 in the benchmark.

    Returns:
        float32 `[rows, time + 1]`, 1 where kept; 0 also where the error is not a number.
    """
    return jnp.where(error <= threshold, 1.0, 0.0)
