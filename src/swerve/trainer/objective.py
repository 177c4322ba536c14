"""The loss of one micro-batch, not yet divided by anything.

Differs from the MLPerf reference in needing one forward pass instead of two: filters, gate and weights read forward
values only, advantages do not depend on the mask, and the denominator is applied once, at the update. So each
micro-batch yields a numerator to differentiate and sums to add up, and a batch's gradient is the same however it was
cut.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from swerve import algorithms
from swerve.config.schema import Algorithm
from swerve.types import SwerveError


class Scored(NamedTuple):
    """A micro-batch with the trainer's log-probabilities, all `[rows, time]`.

    Attributes:
        logprobs: Trainer log-probability of each token, float32; 0 at segment starts and in padding.
        entropy: Entropy of the distribution each token was scored under, float32.
        reference_logprobs: Log-probability under the reference policy, float32, or `None`.
        behaviour_logprobs: Log-probability under the sampling distribution, float32.
        advantages: float32.
        loss_mask: float32, 1 where the token was sampled and its sequence is trained on.
        segment_ids: int32, 0 in padding.
    """

    logprobs: jax.Array
    entropy: jax.Array
    reference_logprobs: jax.Array | None
    behaviour_logprobs: jax.Array
    advantages: jax.Array
    loss_mask: jax.Array
    segment_ids: jax.Array


class Sums(NamedTuple):
    """What adds up over micro-batches, as scalars of the device or the host; maxima are named so.

    Attributes:
        numerator: Of the loss, float32.
        denominator: Of the loss, float32.
        num_tokens: Tokens trained on (m = 1), int32.
        num_candidates: Sequences with a token in the loss mask, before the log-probability filter, int32.
        num_sequences: Sequences with a token trained on, int32.
        num_gate_passed: Of those, the ones that passed the sequence gate, int32.
        entropy: Over tokens trained on, nats, float32.
        logdiff: |lp - lp_gen| over tokens trained on, nats, float32.
        weight: Importance weights of tokens trained on, float32.
        kl: Estimated divergence from the reference over tokens trained on, nats, float32.
        logprob_error_max: Largest `mean_t exp|lp_gen - lp|` of a sequence before the filter, float32.
        dropped_used: (token, expert) pairs that were not computed in a micro-batch that counts, int32.
    """

    numerator: jax.Array
    denominator: jax.Array
    num_tokens: jax.Array
    num_candidates: jax.Array
    num_sequences: jax.Array
    num_gate_passed: jax.Array
    entropy: jax.Array
    logdiff: jax.Array
    weight: jax.Array
    kl: jax.Array
    logprob_error_max: jax.Array
    dropped_used: jax.Array

    @classmethod
    def zero(cls) -> Sums:
        """Return the sums of nothing."""
        integers = {"num_tokens", "num_candidates", "num_sequences", "num_gate_passed", "dropped_used"}
        zeros: dict[str, Any] = {name: (np.int32 if name in integers else np.float32)(0) for name in cls._fields}
        return cls(**zeros)

    @classmethod
    def of_skipped(cls, num_sequences: int, num_tokens: int, normaliser: str) -> Sums:
        """Return what sequences that are not computed add: they are counted, and nothing of theirs is measured.

        Args:
            num_sequences: How many, each with a token trained on.
            num_tokens: Their tokens.
            normaliser: By its name.
        """
        counts: dict[str, Any] = dict.fromkeys(
            ("num_candidates", "num_sequences", "num_gate_passed"), np.int32(num_sequences)
        )
        counts["num_tokens"] = np.int32(num_tokens)
        counts["denominator"] = np.float32(algorithms.count_without_mask(normaliser, num_sequences, num_tokens))
        return cls.zero()._replace(**counts)

    def add(self, other: Sums) -> Sums:
        """Return the sums of both."""
        total = {name: getattr(self, name) + getattr(other, name) for name in self._fields}
        total["logprob_error_max"] = jnp.maximum(self.logprob_error_max, other.logprob_error_max)
        return Sums(**total)


def check_algorithm(algorithm: Algorithm) -> None:
    """Refuse settings that contradict each other, also where no recipe was read.

    Args:
        algorithm: The loss and its correction.

    Raises:
        SwerveError: Two settings contradict each other.
    """
    for key, text in algorithm.contradictions():
        raise SwerveError(f"algorithm.{key} = {getattr(algorithm, key)} {text}")


def micro_batch_objective(algorithm: Algorithm, scored: Scored, context_length: int) -> tuple[jax.Array, Sums]:
    """Return the numerator of a micro-batch's loss and its sums.

    Args:
        algorithm: The loss, its correction, its filters and its normaliser.
        scored: The micro-batch.
        context_length: Tokens one episode can hold; the `constant` normaliser divides by it.

    Returns:
        The numerator, float32 scalar, to be differentiated; and the sums, without gradient.
    """
    scored = _candidates_only(scored)
    lp, behaviour, segments = scored.logprobs, scored.behaviour_logprobs, scored.segment_ids
    candidates = scored.loss_mask
    error = algorithms.logprob_error(lp, behaviour, candidates, segments)
    kept = algorithms.logprob_error_filter(error, algorithm.logprob_error_threshold)
    mask = candidates * algorithms.per_token(kept, segments)
    gate = _gate(algorithm, lp, behaviour, mask, segments)
    weight = _weight(algorithm, lp, behaviour)
    normaliser_weight, denominator = algorithms.NORMALISERS[algorithm.normaliser](mask, segments, float(context_length))
    losses = algorithms.per_token(gate, segments) * weight * _surrogate(algorithm, scored, mask)
    kl = jnp.zeros_like(lp)
    if scored.reference_logprobs is not None:
        kl = algorithms.KL_ESTIMATORS[algorithm.kl_estimator](lp, scored.reference_logprobs)
        losses = losses + algorithm.kl_coefficient * kl
    numerator = jnp.sum(jnp.where(mask > 0, losses, 0.0) * normaliser_weight)

    present = algorithms.segment_counts(mask, segments) > 0
    sums = Sums(
        numerator=numerator,
        denominator=denominator,
        num_tokens=_number(mask > 0),
        num_candidates=_number(algorithms.segment_counts(candidates, segments) > 0),
        num_sequences=_number(present),
        num_gate_passed=_number(present & (gate > 0)),
        entropy=_total(scored.entropy, mask),
        logdiff=_total(jnp.abs(lp - behaviour), mask),
        weight=_total(weight, mask),
        kl=_total(kl, mask),
        logprob_error_max=jnp.max(error),
        dropped_used=jnp.int32(0),
    )
    return numerator, jax.lax.stop_gradient(sums)


def _candidates_only(scored: Scored) -> Scored:
    """Scores of other tokens replaced by 0, so that what is not a number there reaches no sum and no gradient."""

    def kept(x: jax.Array) -> jax.Array:
        return jnp.where(scored.loss_mask > 0, x, 0.0)

    reference = scored.reference_logprobs
    return scored._replace(
        logprobs=kept(scored.logprobs),
        entropy=kept(scored.entropy),
        reference_logprobs=None if reference is None else kept(reference),
    )


def _gate(algorithm: Algorithm, lp: jax.Array, behaviour: jax.Array, mask: jax.Array, segments: jax.Array) -> jax.Array:
    if algorithm.importance != "sequence_mask":
        return jnp.ones((mask.shape[0], mask.shape[1] + 1), jnp.float32)
    low, high = algorithm.sequence_gate_low, algorithm.sequence_gate_high
    return algorithms.sequence_gate(lp, behaviour, mask, segments, low, high)


def _weight(algorithm: Algorithm, lp: jax.Array, behaviour: jax.Array) -> jax.Array:
    if algorithm.loss != "forced_on_policy" or algorithm.importance == "none":
        return jnp.ones_like(lp)
    if algorithm.importance == "token":
        return algorithms.truncated_importance_weights(lp, behaviour, algorithm.importance_cap)
    return algorithms.importance_weights(lp, behaviour)


def _surrogate(algorithm: Algorithm, scored: Scored, mask: jax.Array) -> jax.Array:
    lp, behaviour, advantages = scored.logprobs, scored.behaviour_logprobs, scored.advantages
    low, high = algorithm.clip_low, algorithm.clip_high
    match algorithm.loss:
        case "forced_on_policy":
            return algorithms.on_policy_loss(lp, advantages)
        case "clip":
            return algorithms.clipped_loss(lp, behaviour, advantages, low, high)
        case "dual_clip":
            return algorithms.dual_clipped_loss(lp, behaviour, advantages, low, high, algorithm.dual_clip)
        case "no_clip":
            return algorithms.unclipped_loss(lp, behaviour, advantages)
        case "cispo":
            return algorithms.cispo_loss(lp, behaviour, advantages, low, high)
        case "gspo":
            return algorithms.gspo_loss(lp, behaviour, advantages, mask, scored.segment_ids, low, high)


def _number(where: jax.Array) -> jax.Array:
    return jnp.sum(where, dtype=jnp.int32)


def _total(values: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.sum(jnp.where(mask > 0, values, 0.0))
