"""The loss of a micro-batch without a model: log-probabilities in, numerator and sums out."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swerve.config.schema import Algorithm
from swerve.trainer.objective import Scored, Sums, micro_batch_objective

from .samples import OPEN

CONTEXT = 8

# Row 0: sequences of 4 and 3 tokens and one slot of padding; row 1: a sequence of 8.
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 0], [1] * 8], np.int32)
MASK = np.array([[0, 1, 0, 1, 0, 1, 1, 0], [0, 0, 1, 1, 1, 0, 0, 1]], np.float32)
ADVANTAGES = np.array([[2, 2, 2, 2, -1, -1, -1, 0], [0.5] * 8], np.float32)
BEHAVIOUR = np.where(MASK > 0, -np.linspace(0.5, 3, 16).reshape(2, 8), 0).astype(np.float32)


def scored(logprobs: jax.Array | np.ndarray, rows: slice = slice(None), reference: np.ndarray | None = None) -> Scored:
    return Scored(
        logprobs=jnp.asarray(logprobs)[rows],
        entropy=jnp.ones((2, CONTEXT))[rows],
        reference_logprobs=None if reference is None else jnp.asarray(reference)[rows],
        behaviour_logprobs=jnp.asarray(BEHAVIOUR)[rows],
        advantages=jnp.asarray(ADVANTAGES)[rows],
        loss_mask=jnp.asarray(MASK)[rows],
        segment_ids=jnp.asarray(SEGMENTS)[rows],
    )


def evaluate(algorithm: Algorithm, logprobs: np.ndarray, rows: slice = slice(None)) -> tuple[Sums, np.ndarray]:
    def numerator(lp: jax.Array) -> tuple[jax.Array, Sums]:
        return micro_batch_objective(algorithm, scored(lp, rows), CONTEXT)

    gradient, sums = jax.grad(numerator, has_aux=True)(jnp.asarray(logprobs))
    return sums, np.asarray(gradient)


@pytest.mark.parametrize("loss", ["forced_on_policy", "clip", "dual_clip", "cispo", "gspo", "no_clip"])
def test_what_is_not_a_number_outside_the_loss_mask_reaches_no_sum_and_no_gradient(loss: str) -> None:
    algorithm = dataclasses.replace(OPEN, loss=loss, importance="none", kl_coefficient=0.1)
    spoilt = np.where(MASK > 0, BEHAVIOUR, np.nan).astype(np.float32)

    def numerator(lp: jax.Array, reference: np.ndarray) -> tuple[jax.Array, Sums]:
        return micro_batch_objective(algorithm, scored(lp, reference=reference), CONTEXT)

    found, clean = (jax.grad(numerator, has_aux=True)(jnp.asarray(x), x - 0.5) for x in (spoilt, BEHAVIOUR))
    assert np.isfinite(clean[0]).all() and np.asarray(clean[0])[MASK > 0].all()
    jax.tree.map(np.testing.assert_array_equal, found, clean)
    counts = jax.grad(numerator, has_aux=True)(jnp.asarray(BEHAVIOUR).at[0, 1].set(np.nan), BEHAVIOUR)[0]
    assert np.isnan(counts[0, 1])


def test_the_default_is_the_exact_formula() -> None:
    """Gate by geometric mean, weight not truncated, denominator untouched by the gate."""
    shift = np.zeros((2, CONTEXT), np.float32)
    shift[0, 1], shift[0, 3] = 0.3, -0.2990  # sequence 1 of row 0: mean +0.0005, inside
    shift[0, 5], shift[0, 6] = 0.01, 0.0  # sequence 2: mean +0.005, outside
    sums, gradient = evaluate(Algorithm(), BEHAVIOUR + shift)
    weight = np.exp(shift)
    k = np.array([[1, 1, 1, 1, 0, 0, 0, 0], [1] * 8])
    np.testing.assert_allclose(gradient, -MASK * k * weight * ADVANTAGES, rtol=1e-5)
    assert (sums.num_tokens, sums.denominator) == (8, 8)
    assert (sums.num_candidates, sums.num_sequences, sums.num_gate_passed) == (3, 3, 2)
    assert float(sums.numerator) == pytest.approx(float((-MASK * k * weight * ADVANTAGES).sum()), rel=1e-5)
    assert float(sums.entropy) == 8
    assert float(sums.logdiff) == pytest.approx(0.3 + 0.299 + 0.01, rel=1e-4)
    assert float(sums.weight) == pytest.approx(float((MASK * weight).sum()), rel=1e-5)


def test_a_sequence_beyond_the_error_threshold_leaves_the_denominator() -> None:
    shift = np.zeros((2, CONTEXT), np.float32)
    shift[1] = MASK[1] * 0.7  # e^0.7 = 2.01
    sums, gradient = evaluate(Algorithm(), BEHAVIOUR + shift)
    assert (sums.num_tokens, sums.denominator, sums.num_candidates, sums.num_sequences) == (4, 4, 3, 2)
    assert not gradient[1].any()
    assert float(sums.logprob_error_max) == pytest.approx(np.exp(0.7), rel=1e-5)
    shift[1] = MASK[1] * 0.69  # e^0.69 = 1.99: stays, and the gate rejects it
    sums, gradient = evaluate(Algorithm(), BEHAVIOUR + shift)
    assert (sums.num_tokens, sums.num_sequences, sums.num_gate_passed) == (8, 3, 2)
    assert not gradient[1].any()


@pytest.mark.parametrize("normaliser", ["token", "sequence", "constant"])
@pytest.mark.parametrize("loss", ["forced_on_policy", "clip", "dual_clip", "no_clip", "cispo", "gspo"])
def test_on_the_sampling_policy_every_surrogate_has_the_same_gradient_however_the_batch_is_cut(
    loss: str, normaliser: str
) -> None:
    algorithm = dataclasses.replace(OPEN, loss=loss, normaliser=normaliser)
    whole, gradient = evaluate(algorithm, BEHAVIOUR)
    lengths = np.where(SEGMENTS == 1, np.array([[2], [4]]), 2)
    weights = {"token": MASK / 8, "sequence": MASK / lengths / 3, "constant": MASK / CONTEXT / 3}[normaliser]
    np.testing.assert_allclose(gradient / whole.denominator, -weights * ADVANTAGES, rtol=1e-5)
    parts = [evaluate(algorithm, BEHAVIOUR, slice(row, row + 1)) for row in (1, 0)]
    total = Sums.zero().add(parts[0][0]).add(parts[1][0])
    np.testing.assert_allclose((parts[0][1] + parts[1][1]) / total.denominator, gradient / whole.denominator, rtol=1e-6)
    for name in Sums._fields:
        np.testing.assert_allclose(getattr(total, name), getattr(whole, name), rtol=1e-6, err_msg=name)


def test_token_weights_are_capped_and_the_gate_is_off() -> None:
    shift = MASK * 5.0
    _, gradient = evaluate(dataclasses.replace(OPEN, importance="token", importance_cap=3.0), BEHAVIOUR + shift)
    np.testing.assert_allclose(gradient, -MASK * 3.0 * ADVANTAGES, rtol=1e-5)


def test_a_surrogate_with_the_sequence_gate_is_only_gated() -> None:
    shift = np.zeros((2, CONTEXT), np.float32)
    shift[1] = MASK[1] * 0.05
    gated = dataclasses.replace(OPEN, loss="no_clip", importance="sequence_mask")
    _, gradient = evaluate(gated, BEHAVIOUR + shift)
    assert not gradient[1].any()
    np.testing.assert_allclose(gradient[0], -(MASK * ADVANTAGES)[0], rtol=1e-5)


def test_bounds_of_the_recipe_reach_the_surrogate() -> None:
    shift = MASK * np.float32(np.log(1.5))
    for high, moving in ((0.4, False), (0.6, True)):
        algorithm = dataclasses.replace(OPEN, loss="clip", clip_high=high)
        _, gradient = evaluate(algorithm, BEHAVIOUR + shift)
        assert gradient[1].any() == moving


def test_divergence_from_the_reference_is_weighed_and_counted() -> None:
    algorithm = dataclasses.replace(OPEN, kl_coefficient=0.1, kl_estimator="k2")
    reference = BEHAVIOUR - 0.5 * MASK

    def numerator(lp: jax.Array) -> tuple[jax.Array, Sums]:
        return micro_batch_objective(algorithm, scored(lp, reference=reference), CONTEXT)

    gradient, sums = jax.grad(numerator, has_aux=True)(jnp.asarray(BEHAVIOUR))
    np.testing.assert_allclose(gradient, MASK * (0.1 * 0.5 - ADVANTAGES), rtol=1e-5)
    assert float(sums.kl) == pytest.approx(8 * 0.125)


def test_values_in_masked_places_do_not_matter() -> None:
    """Neither a prompt's log-probability nor padding reaches the loss, whatever it holds."""
    expected, gradient = evaluate(Algorithm(), BEHAVIOUR)
    wild = np.where(MASK > 0, BEHAVIOUR, -1000.0).astype(np.float32)
    found, other = evaluate(Algorithm(), wild)
    np.testing.assert_array_equal(other, gradient)
    for name in Sums._fields:
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
