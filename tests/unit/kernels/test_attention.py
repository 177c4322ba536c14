"""Blocked attention against the naive one, and attention over a cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swerve import kernels

ROWS, TIME, KEYS, HEADS, WIDTH = 2, 37, 2, 4, 8


def inputs() -> tuple[tuple[jax.Array, ...], jax.Array]:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((ROWS, TIME, n, WIDTH)), jnp.float32) for n in (HEADS, KEYS, KEYS))
    lengths = [[1, 15, 1, 9, 11], [30, 2, 2, 3, 0]]
    segments = np.stack([np.repeat(np.arange(1, 6), n) for n in lengths]).astype(np.int32)
    segments[1, 34:] = 0
    return (q, k, v), jnp.asarray(segments)


Inputs = tuple[jax.Array, jax.Array, jax.Array]


@functools.partial(jax.jit, static_argnums=0)
def outcome(block: int, arrays: Inputs, segments: jax.Array) -> Any:
    def loss(arrays: Inputs) -> tuple[jax.Array, jax.Array]:
        if block:
            out = kernels.packed_attention(*arrays, segments, block=block)
        else:
            out = kernels.packed_attention_naive(*arrays, segments)
        return (out * jnp.cos(out)).sum(), out

    return jax.value_and_grad(loss, has_aux=True)(arrays)


@pytest.mark.parametrize("block", [8, 16, 64])
def test_blocks_equal_the_naive_form_in_values_and_gradients(block: int) -> None:
    arrays, segments = inputs()
    found, expected = outcome(block, arrays, segments), outcome(0, arrays, segments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=3e-5), found, expected)


ids = st.lists(st.integers(1, 12), min_size=12, max_size=12).map(
    lambda lengths: np.repeat([1, 2, 0, 3, 0, 4, 5, 6, 7, 8, 9, 10], lengths)
)


@given(rows=st.tuples(ids, ids), block=st.sampled_from([8, 16]))
@settings(max_examples=20, derandomize=True)
def test_segments_may_start_anywhere_in_a_block(rows: tuple[np.ndarray, np.ndarray], block: int) -> None:
    arrays, _ = inputs()
    segments = jnp.asarray([np.pad(row, (0, TIME))[:TIME] for row in rows], jnp.int32)
    found, expected = outcome(block, arrays, segments), outcome(0, arrays, segments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4), found, expected)


@given(at=st.integers(0, TIME - 1))
@settings(max_examples=20)
def test_a_token_changes_no_bit_of_other_segments_and_earlier_places(at: int) -> None:
    arrays, segments = inputs()
    before = outcome(8, arrays, segments)[0][1]
    after = outcome(8, jax.tree.map(lambda x: x.at[0, at].add(1), arrays), segments)[0][1]
    differs = np.flatnonzero(np.asarray(before != after)[0].any((-2, -1)))
    own = np.flatnonzero(np.asarray(segments)[0] == int(segments[0, at]))
    assert at in differs
    assert set(differs) <= set(own[own >= at])
    assert np.array_equal(before[1], after[1])


def test_cached_queries_equal_the_last_of_a_packed_row() -> None:
    (q, k, v), segments = inputs()
    expected = kernels.packed_attention_naive(q, k, v, jnp.ones_like(segments))
    lengths = jnp.asarray([TIME - 3, 5], jnp.int32)
    rows = jnp.arange(ROWS)[:, None]
    where = lengths[:, None] + jnp.arange(3)[None]
    keys, values = jnp.transpose(k, (0, 2, 3, 1)), jnp.transpose(v, (0, 2, 1, 3))
    out = kernels.cached_attention(q[rows, where], keys, values, lengths)  # keys beyond a query's position are not seen
    np.testing.assert_allclose(out, expected[rows, where], rtol=1e-5, atol=1e-6)


def test_bfloat16_loses_no_more_than_its_own_rounding() -> None:
    arrays, segments = inputs()
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), arrays)
    exact = outcome(16, jax.tree.map(lambda x: x.astype(jnp.float32), narrow), segments)
    found = outcome(16, narrow, segments)
    limits = (0.004, 0.002, 0.01, 0.01, 0.003)  # loss, output, gradients of q, k and v; rounding once: 0.0016
    for a, b, limit in zip(jax.tree.leaves(found), jax.tree.leaves(exact), limits, strict=True):
        error = np.asarray(a, np.float32) - b
        assert np.sqrt((error**2).mean()) < limit * np.sqrt((np.asarray(b) ** 2).mean())


def test_many_cached_queries_meet_only_the_places_that_they_see() -> None:
    rng = np.random.default_rng(1)
    time, places = 150, 600  # two blocks of queries, three of places, the last of which overlaps the one before
    q = jnp.asarray(rng.standard_normal((2, time, HEADS, WIDTH)), jnp.float32)
    k = jnp.asarray(rng.standard_normal((2, KEYS, WIDTH, places)), jnp.float32)
    v = jnp.asarray(rng.standard_normal((2, KEYS, places, WIDTH)), jnp.float32)
    for lengths in ((0, 0), (450, 3)):
        out = kernels.cached_attention(q, k, v, jnp.asarray(lengths, jnp.int32))
        for first in range(0, time, 30):  # few at a time meet the whole cache at once
            few = jnp.asarray(lengths, jnp.int32) + first
            expected = kernels.cached_attention(q[:, first : first + 30], k, v, few)
            np.testing.assert_allclose(out[:, first : first + 30], expected, rtol=1e-5, atol=2e-6)
