"""Estimators of KL(policy || reference) from the log-probabilities of sampled tokens.

As in Schulman 2020 ("Approximating KL divergence"). GRPO's paper uses k3. With samples of the policy, k1 and k3 are
unbiased as values; as a loss, the gradient of k2 is the unbiased one, and the gradient of k1 is 0 in expectation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import jax
import jax.numpy as jnp


def kl_k1(logprobs: jax.Array, reference_logprobs: jax.Array) -> jax.Array:
    """Return `lp - lp_ref`: unbiased, of either sign.

    Args:
        logprobs: Trainer log-probabilities, float32 `[rows, time]`.
        reference_logprobs: Reference log-probabilities of the same tokens, float32 `[rows, time]`.

    Returns:
        float32 `[rows, time]`.
    """
    return logprobs - reference_logprobs


def kl_k2(logprobs: jax.Array, reference_logprobs: jax.Array) -> jax.Array:
    """Return `(lp - lp_ref)^2 / 2`: biased, never negative.

    Args:
        logprobs: Trainer log-probabilities, float32 `[rows, time]`.
        reference_logprobs: Reference log-probabilities of the same tokens, float32 `[rows, time]`.

    Returns:
        float32 `[rows, time]`.
    """
    return 0.5 * jnp.square(logprobs - reference_logprobs)


def kl_k3(logprobs: jax.Array, reference_logprobs: jax.Array) -> jax.Array:
    """Return `exp(lp_ref - lp) - (lp_ref - lp) - 1`: unbiased, never negative.

    Args:
        logprobs: Trainer log-probabilities, float32 `[rows, time]`.
        reference_logprobs: Reference log-probabilities of the same tokens, float32 `[rows, time]`.

    Returns:
        float32 `[rows, time]`.
    """
    gap = reference_logprobs - logprobs
    return jnp.expm1(gap) - gap


KL_ESTIMATORS: Mapping[str, Callable[[jax.Array, jax.Array], jax.Array]] = MappingProxyType(
    {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
)
"""Every estimator by the name recipes call it."""
