"""The gradient of a batch in two passes: the slow twin of the trainer's one.

First every micro-batch is scored. Then filters, gate and weights are applied on the host, in float64 and with the whole
batch at hand, and every token gets the slope of the loss along its log-probability, divided by the count of the whole
batch. Last, these slopes are constants of a forward and backward pass over each micro-batch. One forward pass more than
the trainer takes, and none of its arithmetic: neither its loss nor its sums, its normalisers or its division.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swerve import models
from swerve.config.schema import Algorithm
from swerve.trainer.optimizer import Params
from swerve.trainer.programs import DeviceBatch, Objective, freeze_routers
from swerve.types import Float32Array, PackedMicroBatch


class TwoPasses:
    """Gradients on one device; see the module.

    Args:
        objective: What the trainer computes; without a balance term of the router.
    """

    def __init__(self, objective: Objective) -> None:
        self._objective = objective
        self.score = jax.jit(self._score)
        """`(params, batch) -> log-probabilities`, float32 `[rows, time]`."""
        self.add_gradient = jax.jit(self._add_gradient, donate_argnums=3)
        """`(params, batch, slopes, gradients) -> gradients`, the last argument consumed."""

    def gradient(
        self, params: Params, micro_batches: Sequence[PackedMicroBatch], reference: Params | None = None
    ) -> Params:
        """The batch's gradient, divided, float32.

        Args:
            params: Parameters.
            micro_batches: All of the batch.
            reference: Policy of the divergence term, where the algorithm has one.
        """
        batches = [on_device(micro_batch) for micro_batch in micro_batches]
        scored = [np.asarray(self.score(params, batch)) for batch in batches]
        references = None if reference is None else [np.asarray(self.score(reference, batch)) for batch in batches]
        all_slopes = slopes(
            self._objective.algorithm, micro_batches, scored, references, self._objective.context_length
        )
        gradients = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        for batch, of_batch in zip(batches, all_slopes, strict=True):
            gradients = self.add_gradient(params, batch, of_batch, gradients)
        return gradients

    def _score(self, params: Params, batch: DeviceBatch) -> jax.Array:
        objective = self._objective
        hidden = models.forward(
            params,
            objective.config,
            batch.tokens,
            batch.segment_ids,
            batch.positions,
            routing=batch.routing,
            execution=objective.execution,
            dtype=objective.activation_dtype,
        ).hidden
        return models.token_logprobs(
            params, objective.config, hidden, batch.tokens, batch.segment_ids, objective.temperature,
            execution=objective.execution,
        )[0]  # fmt: skip

    def _add_gradient(self, params: Params, batch: DeviceBatch, slopes: jax.Array, gradients: Params) -> Params:
        def loss(params: Params) -> jax.Array:
            params = freeze_routers(params) if self._objective.freeze_router else params
            return jnp.sum(slopes * self._score(params, batch))

        return jax.tree.map(lambda a, g: a + g.astype(jnp.float32), gradients, jax.grad(loss)(params))


def on_device(micro_batch: PackedMicroBatch) -> DeviceBatch:
    """A micro-batch on the default device."""
    arrays = {name: getattr(micro_batch, name) for name in DeviceBatch._fields}
    return jax.tree.map(jnp.asarray, DeviceBatch(**arrays))


def slopes(
    algorithm: Algorithm,
    micro_batches: Sequence[PackedMicroBatch],
    logprobs: Sequence[Float32Array],
    references: Sequence[Float32Array] | None,
    context_length: int,
) -> list[Float32Array]:
    """The derivative of the batch's loss along each token's log-probability, every ratio and count a constant.

    Args:
        algorithm: Loss, corrections, filters, normaliser.
        micro_batches: All of the batch.
        logprobs: The trainer's, `[rows, time]` for each micro-batch.
        references: Those of the reference policy, likewise, or `None`.
        context_length: Tokens one episode can hold.

    Returns:
        float32 `[rows, time]` for each micro-batch.
    """
    lp, behaviour, advantages, candidates = (
        np.concatenate([np.asarray(array, np.float64).ravel() for array in arrays])
        for arrays in (
            logprobs,
            [one.behaviour_logprobs for one in micro_batches],
            [one.advantages for one in micro_batches],
            [one.loss_mask for one in micro_batches],
        )
    )
    sequences = np.concatenate([one.sequence_ids.ravel() for one in micro_batches]) + 1  # 0 is padding
    gap = np.where(candidates > 0, lp - behaviour, 0.0)

    def means(values: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """Of each sequence, given to all its tokens."""
        counts = np.bincount(sequences, mask)
        return (np.bincount(sequences, mask * values) / np.maximum(counts, 1.0))[sequences]

    mask = candidates * (means(np.exp(np.abs(gap)), candidates) <= algorithm.logprob_error_threshold)
    mean_ratio = np.exp(means(gap, mask))
    slope = _surrogate(algorithm, np.exp(gap), mean_ratio, advantages)
    if algorithm.importance == "sequence_mask":
        slope *= (algorithm.sequence_gate_low <= mean_ratio) & (mean_ratio <= algorithm.sequence_gate_high)
    if algorithm.loss == "forced_on_policy" and algorithm.importance != "none":
        slope *= np.minimum(np.exp(gap), algorithm.importance_cap if algorithm.importance == "token" else np.inf)
    if references is not None:
        beyond = lp - np.concatenate([np.asarray(one, np.float64).ravel() for one in references])
        of_estimator = {"k1": np.ones_like(beyond), "k2": beyond, "k3": -np.expm1(-np.where(mask > 0, beyond, 0.0))}
        slope = slope + algorithm.kl_coefficient * of_estimator[algorithm.kl_estimator]
    lengths = np.bincount(sequences, mask)
    weight, count = {
        "token": (1.0, mask.sum()),
        "sequence": (1 / np.maximum(lengths[sequences], 1.0), np.count_nonzero(lengths)),
        "constant": (1 / context_length, np.count_nonzero(lengths)),
    }[algorithm.normaliser]
    whole = (mask * slope * weight / count).astype(np.float32)
    sizes = [one.tokens.size for one in micro_batches]
    parts: list[Any] = np.split(whole, np.cumsum(sizes)[:-1])
    return [part.reshape(one.tokens.shape) for part, one in zip(parts, micro_batches, strict=True)]


def _surrogate(algorithm: Algorithm, ratio: np.ndarray, mean_ratio: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    """Slope of the surrogate alone; `ratio` is of each token, `mean_ratio` of its sequence."""
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    if algorithm.loss == "forced_on_policy":
        return -advantages
    if algorithm.loss == "no_clip":
        return -ratio * advantages
    if algorithm.loss == "cispo":
        return -np.clip(ratio, low, high) * advantages
    ratio = mean_ratio if algorithm.loss == "gspo" else ratio
    # Beyond the bound on the side to which the advantage pushes, the surrogate is flat.
    flat = np.where(advantages > 0, ratio > high, ratio < low)
    if algorithm.loss == "dual_clip":
        flat |= (advantages < 0) & (ratio > algorithm.dual_clip)
    return np.where(flat, 0.0, -ratio * advantages)
