"""Sampling: the right distribution, the right log-probability, and randomness that depends on nothing else."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swerve.engine.sampling import SamplingRows, seed_words
from swerve.engine.sampling import sample as sample_eagerly

sample = jax.jit(sample_eagerly, static_argnames="truncated")


def rows(num: int, temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, seed: int = 0) -> SamplingRows:
    return SamplingRows(
        seed=jnp.tile(jnp.asarray([seed_words(seed)], jnp.uint32), (num, 1)),
        temperature=jnp.full(num, temperature, jnp.float32),
        top_p=jnp.full(num, top_p, jnp.float32),
        top_k=jnp.full(num, top_k, jnp.int32),
    )


def draw(
    logits: Sequence[float], num: int, settings: SamplingRows, *, truncated: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    batch = jnp.tile(jnp.asarray([logits], jnp.float32), (num, 1))
    tokens, logprobs = sample(batch, settings, jnp.arange(num, dtype=jnp.int32), truncated=truncated)
    return np.asarray(tokens), np.asarray(logprobs)


def test_logprob_is_of_the_scaled_distribution() -> None:
    tokens, logprobs = draw([2.0, 0.0], 64, rows(64, temperature=0.5))
    assert logprobs[tokens == 0] == pytest.approx(-0.018150, abs=1e-5)
    assert logprobs[tokens == 1] == pytest.approx(-4.018150, abs=1e-5)
    assert (tokens == 0).any()


def test_the_log_probability_is_that_of_the_token_drawn() -> None:
    """Whatever is drawn: neither the first entry's nor the most likely one's."""
    logits = np.array([0.0, 1.0, 0.5])
    expected = logits - np.log(np.exp(logits).sum())
    tokens, logprobs = draw(logits.tolist(), 64, rows(64))
    assert set(tokens) == {0, 1, 2}
    np.testing.assert_allclose(logprobs, expected[tokens], atol=1e-5)


def test_temperature_zero_is_certain() -> None:
    tokens, logprobs = draw([0.0, 3.0, 2.9], 32, rows(32, temperature=0.0))
    assert (tokens == 1).all()
    assert (logprobs == 0).all()


@pytest.mark.parametrize(
    ("temperature", "top_p", "top_k"), [(1.0, 1.0, 0), (0.5, 1.0, 0), (1.0, 0.8, 0), (2.0, 1.0, 3), (1.0, 0.9, 4)]
)
def test_draws_follow_the_distribution(temperature: float, top_p: float, top_k: int) -> None:
    logits = np.array([1.0, 0.0, 0.7, -0.5, 1.4, -3.0])
    num = 8_000
    tokens, logprobs = draw(logits.tolist(), num, rows(num, temperature, top_p, top_k, seed=5), truncated=True)
    probs = truncated_softmax(logits / temperature, top_p, top_k)
    counts = np.bincount(tokens, minlength=len(logits))
    assert (counts[probs == 0] == 0).all()
    kept = probs > 0
    chi_square = ((counts - num * probs)[kept] ** 2 / (num * probs)[kept]).sum()
    assert chi_square < 25  # five degrees of freedom at most: one chance in seven thousand
    np.testing.assert_allclose(logprobs, np.log(probs[tokens]), atol=1e-5)


def truncated_softmax(scaled: np.ndarray, top_p: float, top_k: int) -> np.ndarray:
    """The definition: sort, cut at k, renormalise, cut at the mass, renormalise."""
    order = np.argsort(-scaled, kind="stable")
    probs = np.exp(scaled - scaled.max())
    if top_k:
        probs[order[top_k:]] = 0
    probs /= probs.sum()
    mass_before = np.cumsum(probs[order]) - probs[order]
    probs[order[mass_before >= top_p]] = 0
    return probs / probs.sum()


@settings(max_examples=60, deadline=None)
@given(
    logits=st.lists(st.integers(-20, 20), min_size=16, max_size=16),
    top_k=st.integers(0, 20),
    top_p=st.sampled_from([0.05, 0.33, 0.61, 0.97, 1.0]),
)
def test_truncation_keeps_what_sorting_keeps(logits: list[int], top_k: int, top_p: float) -> None:
    scaled = np.asarray(logits) / 7.3
    tokens, logprobs = draw(scaled.tolist(), 64, rows(64, 1.0, top_p, top_k, seed=3), truncated=True)
    probs = truncated_softmax(scaled.astype(np.float32).astype(np.float64), top_p, top_k)
    assert (probs[tokens] > 0).all()
    np.testing.assert_allclose(logprobs, np.log(probs[tokens]), atol=1e-5)


def test_ties_go_to_the_smaller_id() -> None:
    tokens, _ = draw([1.0, 1.0, 1.0, 1.0], 400, rows(400, top_k=2), truncated=True)
    assert set(tokens.tolist()) == {0, 1}


def test_a_row_that_does_not_truncate_draws_the_same_beside_one_that_does() -> None:
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(8, 50)), jnp.float32)
    plain = rows(8, seed=9)
    mixed = plain._replace(top_k=jnp.asarray([0, 3] * 4, jnp.int32))
    position = jnp.arange(8, dtype=jnp.int32)
    alone, lone_scores = sample(logits, plain, position, truncated=False)
    beside, scores = sample(logits, mixed, position, truncated=True)
    np.testing.assert_array_equal(alone[::2], beside[::2])
    np.testing.assert_array_equal(lone_scores[::2], scores[::2])


def test_randomness_is_of_seed_and_position_only() -> None:
    logits = jnp.zeros((6, 1000))
    settings = rows(6)._replace(
        seed=jnp.asarray([seed_words(s) for s in (1, 2, 1, 2, 2**40 + 1, 2**64 + 1)], jnp.uint32)
    )
    tokens, _ = sample(logits, settings, jnp.asarray([4, 4, 4, 5, 4, 4], jnp.int32), truncated=False)
    a, b, c, d, e, f = np.asarray(tokens).tolist()
    assert a == c == f
    assert len({a, b, d, e}) == 4


def test_rows_differ_in_temperature() -> None:
    settings = rows(2)._replace(temperature=jnp.asarray([0.0, 1.0], jnp.float32))
    tokens, logprobs = sample(jnp.asarray([[0.0, 1.0]] * 2), settings, jnp.zeros(2, jnp.int32), truncated=False)
    assert int(tokens[0]) == 1
    assert float(logprobs[0]) == 0.0
    assert float(logprobs[1]) < 0.0
