"""The sharded head, its plain twin and a formula written out: values, gradients, guards, layouts, fall-backs."""

import functools
import itertools
import logging
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import P
from jax.sharding import Mesh, NamedSharding

from swerve.models import HeadLayout, plain_token_logprobs, sharded_token_logprobs
from swerve.models.scoring import Table, scored
from swerve.models.sharded_head import _say_once

ROWS, TIME, WIDTH, VOCAB = 4, 12, 8, 24
Head = Callable[..., tuple[jax.Array, jax.Array]]


def on_one_device(hidden: jax.Array, weight: jax.Array, tokens: Any, segments: Any, temperature: Any = 1.0) -> Any:
    """The sharded head's core without a mesh, in chunks that do not divide the tokens."""
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1))).reshape(-1)
    scale = 1 / jnp.asarray(temperature, jnp.float32)
    found = scored(hidden.reshape(-1, hidden.shape[-1]), weight, following, scale, 7, Table())
    inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return tuple(jnp.pad(jnp.where(inside, x.reshape(tokens.shape)[:, :-1], 0), ((0, 0), (1, 0))) for x in found)


def plain(*arrays: Any) -> Any:
    return plain_token_logprobs(*arrays, chunk=5)


HEADS = pytest.mark.parametrize("head", [on_one_device, plain], ids=["sharded", "plain"])


def batch(seed: int = 0, dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Hidden states, weight, tokens, and segments: two to a row and a little padding."""
    rng = np.random.default_rng(seed)
    segments = np.zeros((ROWS, TIME), np.int32)
    for row in range(ROWS):
        segments[row, : 3 + row], segments[row, 3 + row : 10 + row % 3] = 1, 2
    hidden, weight = rng.standard_normal((ROWS, TIME, WIDTH)), rng.standard_normal((WIDTH, VOCAB))
    tokens = rng.integers(0, VOCAB, (ROWS, TIME)).astype(np.int32)
    return jnp.asarray(hidden, dtype), jnp.asarray(weight, dtype), jnp.asarray(tokens), jnp.asarray(segments)


def value_and_gradients(
    head: Head, arrays: tuple[jax.Array, ...], temperature: float = 1.0, weights: Any = None
) -> Any:
    """Scores, and the gradients by hidden states and weight of a sum that weighs every token and entropy."""
    hidden, weight, tokens, segments = arrays
    if weights is None:
        weights = jnp.asarray(np.random.default_rng(9).standard_normal((2, ROWS, TIME)), jnp.float32)

    def loss(hidden: jax.Array, weight: jax.Array) -> tuple[jax.Array, Any]:
        lp, entropy = head(hidden, weight, tokens, segments, temperature)
        return jnp.where(weights[0] != 0, weights[0] * lp, 0).sum() + jnp.where(
            weights[1] != 0, weights[1] * entropy, 0
        ).sum(), (lp, entropy)

    (_, scores), gradients = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))(hidden, weight)
    return jax.device_get((*scores, *gradients))


def assert_close(found: Any, expected: Any, rtol: float = 1e-5) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.abs(b).max())


def written_out(arrays: tuple[jax.Array, ...], temperature: float) -> tuple[np.ndarray, np.ndarray]:
    """Token by token, in float64."""
    hidden, weight, tokens, segments = map(np.asarray, arrays)
    hidden, weight = hidden.astype(np.float64), weight.astype(np.float64)
    lp, entropy = np.zeros(tokens.shape), np.zeros(tokens.shape)
    for b, t in np.ndindex(*tokens.shape):
        if t and segments[b, t] and segments[b, t] == segments[b, t - 1]:
            logits = hidden[b, t - 1] @ weight / temperature
            logprobs = logits - np.log(np.exp(logits - logits.max()).sum()) - logits.max()
            lp[b, t], entropy[b, t] = logprobs[tokens[b, t]], -(np.exp(logprobs) * logprobs).sum()
    return lp, entropy


@HEADS
@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_scores_are_those_of_the_formula(head: Head, temperature: float) -> None:
    lp, entropy, *_ = value_and_gradients(head, batch(), temperature)
    assert_close((lp, entropy), written_out(batch(), temperature))


@HEADS
def test_gradients_of_log_probs_and_entropies_are_differences_of_the_formula(head: Head) -> None:
    hidden, weight, *rest = arrays = batch()
    weights = np.random.default_rng(9).standard_normal((2, ROWS, TIME))
    found = value_and_gradients(head, arrays, 0.5, jnp.asarray(weights, jnp.float32))[2:]

    def loss(hidden: Any, weight: Any) -> float:
        return sum((w * x).sum() for w, x in zip(weights, written_out((hidden, weight, *rest), 0.5), strict=True))

    wide = np.asarray(hidden, np.float64), np.asarray(weight, np.float64)
    for direction in range(3):
        rng = np.random.default_rng(direction)
        by, on = rng.standard_normal(hidden.shape), rng.standard_normal(weight.shape)
        ends = [loss(wide[0] + e * by, wide[1] + e * on) for e in (1e-5, -1e-5)]
        assert (found[0] * by).sum() + (found[1] * on).sum() == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4)


@HEADS
def test_temperature_divides_the_logits(head: Head) -> None:
    """Logits [2, 0] at temperature 0.5: log 1 / (1 + exp -4), not that of temperature 1."""
    one = jnp.ones((1, 2, 1)), jnp.array([[2.0, 0.0]]), jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), jnp.int32)
    assert float(head(*one, 0.5)[0][0, 1]) == pytest.approx(-0.01815, abs=1e-5)
    assert float(head(*one, 1.0)[0][0, 1]) == pytest.approx(-0.12693, abs=1e-5)


@HEADS
def test_a_token_is_looked_up_by_its_id_and_no_label_leaks_across_a_segment(head: Head) -> None:
    weight = jnp.log(jnp.asarray([[0.5, 0.25, 0.125, 0.125]]))
    tokens, segments = jnp.array([[0, 1, 2, 3, 1, 0]]), jnp.array([[1, 1, 1, 2, 2, 0]])
    lp, _ = head(jnp.ones((1, 6, 1)), weight, tokens, segments)
    np.testing.assert_allclose(lp[0], [0, np.log(0.25), np.log(0.125), 0, np.log(0.25), 0], atol=1e-6)


@HEADS
def test_the_last_token_changes_no_earlier_log_prob(head: Head) -> None:
    hidden, weight, tokens, _ = batch()
    whole = jnp.ones_like(tokens)
    lp, entropy = head(hidden, weight, tokens, whole)
    other = head(hidden, weight, tokens.at[:, -1].set((tokens[:, -1] + 1) % VOCAB), whole)
    np.testing.assert_array_equal(other[0][:, :-1], lp[:, :-1])
    np.testing.assert_array_equal(other[1], entropy)
    assert (np.asarray(other[0])[:, -1] != np.asarray(lp)[:, -1]).all()


# ------------------------------------------------------------------------------------------------ not finite


@HEADS
def test_impossible_tokens_and_huge_logits_leave_entropy_and_gradients_finite(head: Head) -> None:
    hidden, weight, tokens, segments = batch()
    weight = weight.at[:, 3].set(-1e10)
    hidden = jnp.abs(hidden).at[1].multiply(1e30)  # products of -1e40 are -inf
    found = value_and_gradients(head, (hidden, weight, jnp.where(tokens == 3, 4, tokens), segments))
    assert np.isfinite(found[0]).all() and np.isfinite(found[1]).all()
    assert (found[1] >= 0).all() and (found[1][1] < 1e-6).all()
    assert np.isfinite(found[2]).all() and np.isfinite(found[3]).all()


@HEADS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_token_without_cotangent_adds_exactly_nothing(head: Head, bad: float) -> None:
    hidden, weight, tokens, segments = batch()
    weights = np.random.default_rng(9).standard_normal((2, ROWS, TIME)).astype(np.float32)
    weights[:, :, :5] = 0.0  # prompts
    if head is plain:
        head = functools.partial(plain_token_logprobs, chunk=5, used=jnp.asarray(weights[0] != 0))
    good = value_and_gradients(head, batch(), weights=weights)
    spoilt = np.zeros((ROWS, TIME), bool)
    spoilt[:, :4] = True  # the fifth token, which has none, is scored from the fourth
    spoilt |= np.asarray(segments) == 0
    found = value_and_gradients(
        head, (jnp.where(spoilt[..., None], bad, hidden), weight, tokens, segments), weights=weights
    )
    np.testing.assert_array_equal(found[3], good[3])
    np.testing.assert_array_equal(found[2], good[2])
    assert not found[2][spoilt].any()


@HEADS
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_value_that_is_not_finite_at_a_token_that_counts_reaches_the_gradient(head: Head, bad: float) -> None:
    hidden, *rest = batch()
    found = value_and_gradients(head, (hidden.at[1, 1, 3].set(bad), *rest))
    assert not np.isfinite(found[0][1, 2])
    assert not np.isfinite(found[3]).all() and not np.isfinite(found[2][1, 1]).all()


# ------------------------------------------------------------------------------------------------ precision


def test_the_gradient_of_the_table_is_summed_in_float32() -> None:
    """Of many equal bfloat16 tokens: a sum in bfloat16 stands still once a term is less than half its last place."""
    count = 1024
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.uniform(0.5, 1.5, (1, count, WIDTH)), jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal((WIDTH, VOCAB)), jnp.bfloat16)
    segments, tokens = jnp.ones((1, count), jnp.int32), jnp.zeros((1, count), jnp.int32)

    def gradient(head: Head, *arrays: jax.Array) -> np.ndarray:
        return np.asarray(
            jax.jit(jax.grad(lambda w: head(arrays[0], w, tokens, segments)[0].sum()))(arrays[1]), np.float64
        )

    def error(head: Head) -> float:
        wide = gradient(plain_token_logprobs, hidden.astype(jnp.float32), weight.astype(jnp.float32))
        return float(np.abs(gradient(head, hidden, weight) - wide).max() / np.abs(wide).max())

    assert error(on_one_device) < 4e-3
    assert error(plain) > 10 * error(on_one_device)  # its chunks are added up in the type of the weight


# ------------------------------------------------------------------------------------------------ layouts


def laid_out(order: tuple[str, ...], tokens: P, table: P) -> HeadLayout:
    sizes = {"a": 2, "b": 2, "c": 2}
    return HeadLayout(Mesh(np.array(jax.devices()[:8]).reshape([sizes[x] for x in order]), order), tokens, table)


def on_layout(layout: HeadLayout, temperature: float = 0.7) -> Any:
    hidden, weight, tokens, segments = batch()

    def put(x: jax.Array, spec: P) -> jax.Array:
        return jax.device_put(x, NamedSharding(layout.mesh, spec))

    arrays = put(hidden, layout.tokens), put(weight, layout.table), put(tokens, layout.tokens), segments

    def head(*arrays: Any) -> Any:
        return sharded_token_logprobs(*arrays, chunk=4, layout=layout)

    return value_and_gradients(head, arrays, temperature)


ORDERS = list(itertools.permutations("abc"))
SPECS = [
    (P(("a", "b"), "c"), P(("a", "b"), "c")),
    (P(("b", "a"), "c"), P("c", ("b", "a"))),
    (P("a", ("c", "b")), P(("c", "a", "b"), None)),
    (P("b"), P(None, ("c", "a"))),  # two axes split no token as given, and no part of the table is split over all
    (P(None, ("b",)), P()),
]


@pytest.mark.parametrize(("tokens", "table"), SPECS, ids=str)
@pytest.mark.parametrize("order", [ORDERS[3]], ids="".join)
def test_the_order_of_axes_does_not_matter(order: tuple[str, ...], tokens: P, table: P) -> None:
    assert_close(on_layout(laid_out(order, tokens, table)), value_and_gradients(plain, batch(), 0.7))


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS, ids="".join)
def test_no_order_of_axes_matters(order: tuple[str, ...]) -> None:
    expected = value_and_gradients(plain, batch(), 0.7)
    specs = [P((x, y), z) for x, y, z in ORDERS] + [P(x, (y, z)) for x, y, z in ORDERS]
    for number, tokens in enumerate(specs):
        assert_close(on_layout(laid_out(order, tokens, specs[-1 - number])), expected)
    for tokens, table in SPECS:
        assert_close(on_layout(laid_out(order, tokens, table)), expected)


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        (lambda: None, "there is no mesh"),
        (lambda: HeadLayout(Mesh(np.array(jax.devices()[:1]), "a"), P("a"), P()), "there is no mesh"),
        (
            lambda: HeadLayout(Mesh(np.array(jax.devices()[:8]), "a"), P("a"), P()),
            "4 rows of 12 tokens cannot be split over a mesh of a 8",
        ),
        (
            lambda: HeadLayout(Mesh(np.array(jax.devices()[:5]), "a"), P(), P()),
            "4 rows of 12 tokens cannot be split over a mesh of a 5",
        ),
        (
            lambda: HeadLayout(Mesh(np.array(jax.devices()[:6]).reshape(2, 3), ("a", "b")), P("a", "b"), P("b", "a")),
            "dimension 0 of the head's weight, 8, cannot be split over 3 devices",
        ),
    ],
    ids=["none", "one device", "rows", "nothing", "table"],
)
def test_where_it_does_not_fit_the_plain_head_computes_and_one_line_says_why(
    layout: Any, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    _say_once.cache_clear()

    def head(*arrays: Any) -> Any:
        return sharded_token_logprobs(*arrays, chunk=5, layout=layout())

    with caplog.at_level(logging.WARNING, "swerve.models.sharded_head"):
        value_and_gradients(head, batch())
        found = value_and_gradients(head, batch())
    assert_close(found, value_and_gradients(plain, batch()))
    assert [record.getMessage() for record in caplog.records] == [
        f"the plain head is used instead of the sharded one: {reason}"
    ]


@pytest.mark.parametrize(
    ("tokens", "table", "message"),
    [
        (P("d"), P(), "no axis 'd', only a, b, c"),
        (P("a", ("b", "a")), P(), "'a' splits both"),
        (P(), P("c", "c"), "'c' splits"),
    ],
)
def test_a_layout_that_its_mesh_does_not_have_is_refused(tokens: P, table: P, message: str) -> None:
    layout = laid_out(("a", "b", "c"), tokens, table)
    with pytest.raises(ValueError, match=message):
        sharded_token_logprobs(*batch(), layout=layout)
