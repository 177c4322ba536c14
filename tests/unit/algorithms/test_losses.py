"""Hand-computed values and gradients of every loss, weight, gate, filter, normaliser and KL estimator."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swerve import algorithms

# Two sequences of 3 and 2 tokens and one slot of padding; the first token of each is given, not sampled.
SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 0]], jnp.int32)
MASK = jnp.array([[0, 1, 1, 0, 1, 0]], jnp.float32)


def row(*values: float) -> jax.Array:
    return jnp.array([values], jnp.float32)


def test_segment_sums_and_back() -> None:
    values = row(1, 2, 3, 4, 5, 6)
    sums = algorithms.segment_sum(values, SEGMENTS)
    np.testing.assert_allclose(sums, [[6, 6, 9, 0, 0, 0, 0]])
    np.testing.assert_allclose(algorithms.per_token(sums, SEGMENTS), [[6, 6, 6, 9, 9, 6]])
    np.testing.assert_allclose(algorithms.segment_mean(values, MASK, SEGMENTS), [[0, 2.5, 5, 0, 0, 0, 0]])
    np.testing.assert_allclose(algorithms.segment_counts(MASK, SEGMENTS), [[0, 2, 1, 0, 0, 0, 0]])


def test_segments_of_different_rows_are_different() -> None:
    segments = jnp.array([[1, 1], [1, 2]], jnp.int32)
    sums = algorithms.segment_sum(jnp.array([[1.0, 2.0], [3.0, 4.0]]), segments)
    np.testing.assert_allclose(sums, [[0, 3, 0], [0, 3, 4]])


def test_importance_weights_are_not_truncated_and_drop_what_is_not_finite() -> None:
    logprobs = row(-1, -1, 200, 0, jnp.nan, 0)
    behaviour = row(-1, -6, -1, 0, -1, 0)
    np.testing.assert_allclose(
        algorithms.importance_weights(logprobs, behaviour), [[1, np.exp(5), 0, 1, 0, 1]], rtol=1e-6
    )


def test_truncated_weights() -> None:
    weights = algorithms.truncated_importance_weights(row(-1, -1, 200, jnp.nan), row(-1, -6, -1, -1))
    np.testing.assert_allclose(weights, [[1, 2, 2, 0]])
    weights = algorithms.truncated_importance_weights(row(-2.0), row(-1.0))
    np.testing.assert_allclose(weights, [[np.exp(-1)]], rtol=1e-6)


def test_the_gate_reads_the_geometric_mean_over_sampled_tokens() -> None:
    # Sequence 1: (+0.5 - 0.499) / 2 = 0.0005 passes although its tokens are far off; the prompt token is not read.
    logprobs = row(9.0, 0.5, -0.499, 7.0, 0.0025, 0.0)
    gate = algorithms.sequence_gate(logprobs, jnp.zeros((1, 6)), MASK, SEGMENTS)
    np.testing.assert_array_equal(gate[0, 1:3], [1, 0])


@pytest.mark.parametrize(("ratio", "passes"), [(0.9985, 0), (0.9991, 1), (1.0, 1), (1.0019, 1), (1.0025, 0)])
def test_the_gate_is_not_symmetric(ratio: float, passes: int) -> None:
    logprobs = jnp.full((1, 6), np.log(ratio), jnp.float32)
    gate = algorithms.sequence_gate(logprobs, jnp.zeros((1, 6)), MASK, SEGMENTS)
    np.testing.assert_array_equal(gate[0, 1:3], [passes, passes])


def test_the_gate_rejects_what_is_not_a_number() -> None:
    gate = algorithms.sequence_gate(row(0, jnp.nan, 0, 0, 0, 0), jnp.zeros((1, 6)), MASK, SEGMENTS)
    np.testing.assert_array_equal(gate[0, 1:3], [0, 1])


def test_corrections_have_no_gradient() -> None:
    behaviour = jnp.zeros((1, 6))

    def total(logprobs: jax.Array) -> jax.Array:
        return (
            algorithms.importance_weights(logprobs, behaviour).sum()
            + algorithms.truncated_importance_weights(logprobs, behaviour).sum()
            + algorithms.sequence_gate(logprobs, behaviour, MASK, SEGMENTS).sum()
            + algorithms.logprob_error(logprobs, behaviour, MASK, SEGMENTS).sum()
        )

    assert not jax.grad(total)(row(0.1, 0.2, 0.3, 0.4, 0.5, 0.6)).any()


def test_logprob_error_and_its_filter() -> None:
    gap = float(np.log(3.0))
    error = algorithms.logprob_error(row(5, gap, -gap, 0, 0, 0), jnp.zeros((1, 6)), MASK, SEGMENTS)
    np.testing.assert_allclose(error[0, :3], [0, 3, 1], rtol=1e-6)
    np.testing.assert_array_equal(algorithms.logprob_error_filter(error, 2.0)[0, :3], [1, 0, 1])
    assert algorithms.logprob_error_filter(row(jnp.nan, 2.0), 2.0).tolist() == [[0, 1]]


def test_overlong_filter_rejects_exactly_the_cap() -> None:
    assert algorithms.overlong_filter([511, 512, 10], 512).tolist() == [True, False, True]


def loss_and_gradient(loss, logprobs: jax.Array) -> tuple[list[float], list[float]]:
    return loss(logprobs)[0].tolist(), jax.grad(lambda x: loss(x).sum())(logprobs)[0].tolist()


def test_on_policy_loss_has_the_value_of_ratio_one() -> None:
    value, gradient = loss_and_gradient(lambda lp: algorithms.on_policy_loss(lp, row(2.0, -0.5)), row(-3.0, -0.1))
    assert value == [-2.0, 0.5]
    assert gradient == [-2.0, 0.5]


# Ratios 0.5, 1, 1.5, 4.
LOGPROBS = jnp.log(row(0.5, 1.0, 1.5, 4.0))


def test_clipped_loss() -> None:
    up = lambda lp: algorithms.clipped_loss(lp, jnp.zeros((1, 4)), jnp.ones((1, 4)))  # noqa: E731
    value, gradient = loss_and_gradient(up, LOGPROBS)
    np.testing.assert_allclose(value, [-0.5, -1, -1.28, -1.28], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-0.5, -1, 0, 0], rtol=1e-6)
    down = lambda lp: algorithms.clipped_loss(lp, jnp.zeros((1, 4)), -jnp.ones((1, 4)))  # noqa: E731
    value, gradient = loss_and_gradient(down, LOGPROBS)
    np.testing.assert_allclose(value, [0.8, 1, 1.5, 4], rtol=1e-6)
    np.testing.assert_allclose(gradient, [0, 1, 1.5, 4], rtol=1e-6)


def test_unclipped_loss() -> None:
    value, gradient = loss_and_gradient(
        lambda lp: algorithms.unclipped_loss(lp, jnp.zeros((1, 4)), row(1, 1, -1, -2)), LOGPROBS
    )
    np.testing.assert_allclose(value, [-0.5, -1, 1.5, 8], rtol=1e-6)
    np.testing.assert_allclose(gradient, value, rtol=1e-6)


def test_dual_clip_bounds_only_negative_advantages() -> None:
    value, gradient = loss_and_gradient(
        lambda lp: algorithms.dual_clipped_loss(lp, jnp.zeros((1, 4)), row(1, 1, -1, -2)), LOGPROBS
    )
    np.testing.assert_allclose(value, [-0.5, -1, 1.5, 6], rtol=1e-6)
    np.testing.assert_allclose(gradient, [-0.5, -1, 1.5, 0], rtol=1e-6)


def test_cispo_clips_the_weight_and_keeps_every_gradient() -> None:
    value, gradient = loss_and_gradient(
        lambda lp: algorithms.cispo_loss(lp, jnp.zeros((1, 4)), row(1, 1, 1, -1)), LOGPROBS
    )
    np.testing.assert_allclose(gradient, [-0.5, -1, -1.28, 1.28], rtol=1e-6)
    np.testing.assert_allclose(value, np.array([-0.5, -1, -1.28, 1.28]) * np.asarray(LOGPROBS[0]), rtol=1e-6)


def test_gspo_uses_one_ratio_per_sequence() -> None:
    # Sequence 1 averages (0.3 - 0.3002) / 2 = -0.0001: inside. Sequence 2 is at +0.01: outside, A > 0: no gradient.
    logprobs = row(0, 0.3, -0.3002, 0, 0.01, 0)
    loss = lambda lp: algorithms.gspo_loss(lp, jnp.zeros((1, 6)), jnp.ones((1, 6)), MASK, SEGMENTS) * MASK  # noqa: E731
    value, gradient = loss_and_gradient(loss, logprobs)
    inside = -float(np.exp(-0.0001))
    np.testing.assert_allclose(value, [0, inside, inside, 0, -1.0004, 0], rtol=1e-5)
    np.testing.assert_allclose(gradient, [0, inside, inside, 0, 0, 0], rtol=1e-5)


def test_normalisers() -> None:
    weight, count = algorithms.token_normaliser(MASK, SEGMENTS)
    np.testing.assert_allclose(weight, MASK)
    assert count == 3
    weight, count = algorithms.sequence_normaliser(MASK, SEGMENTS)
    np.testing.assert_allclose(weight, [[0, 0.5, 0.5, 0, 1, 0]])
    assert count == 2
    weight, count = algorithms.constant_normaliser(MASK, SEGMENTS, constant=4.0)
    np.testing.assert_allclose(weight, MASK / 4)
    assert count == 2


def test_truncated_tokens_leave_numerator_and_denominator() -> None:
    segments = jnp.concatenate([jnp.full((1, 10), 1), jnp.full((1, 90), 2)], axis=1).astype(jnp.int32)
    mask = jnp.where(segments == 1, 1.0, 0.0)
    weight, count = algorithms.token_normaliser(mask, segments)
    assert (weight.sum(), count) == (10, 10)


def test_kl_estimators() -> None:
    logprobs, reference = row(-1.0, -2.0), row(-1.5, -2.0)
    np.testing.assert_allclose(algorithms.kl_k1(logprobs, reference), [[0.5, 0]])
    np.testing.assert_allclose(algorithms.kl_k2(logprobs, reference), [[0.125, 0]])
    np.testing.assert_allclose(algorithms.kl_k3(logprobs, reference), [[np.exp(-0.5) + 0.5 - 1, 0]], rtol=1e-5)
