"""The chunked Gated DeltaNet against its recurrence: values, states and gradients, segments starting anywhere."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swerve import kernels
from swerve.kernels.delta import balanced_chunk, unit_lower_inverse

ROWS, TIME, KEYS, HEADS, KEY_WIDTH, VALUE_WIDTH = 2, 45, 2, 4, 8, 6


def inputs() -> tuple[tuple[jax.Array, ...], jax.Array, jax.Array]:
    rng = np.random.default_rng(0)

    def values(*shape: int) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape), jnp.float32)

    def unit(x: jax.Array) -> jax.Array:
        return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

    q, k = (unit(values(ROWS, TIME, KEYS, KEY_WIDTH)) for _ in range(2))
    g, beta = -jnp.abs(values(ROWS, TIME, HEADS)), jax.nn.sigmoid(values(ROWS, TIME, HEADS))
    starts = np.zeros((ROWS, TIME), bool)
    starts[0, [0, 5, 6, 16, 32, 44]] = True  # length 1, chunk borders, last position
    starts[1, [3, 30]] = True  # the first state serves positions 0 to 2
    state = values(ROWS, HEADS, KEY_WIDTH, VALUE_WIDTH)
    return (q, k, values(ROWS, TIME, HEADS, VALUE_WIDTH), g, beta), jnp.asarray(starts), state


Inputs = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


@functools.partial(jax.jit, static_argnums=0)
def outcome(chunk: int, arrays: Inputs, starts: jax.Array, state: jax.Array) -> Any:
    def loss(arrays: Inputs, state: jax.Array) -> tuple[jax.Array, Any]:
        if chunk:
            out, last = kernels.delta_chunked(*arrays, starts, state, chunk=chunk)
        else:
            out, last = kernels.delta_recurrent(*arrays, starts, state)
        return (out * jnp.cos(out)).sum() + (last**2).sum(), (out, last)

    return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(arrays, state)


@pytest.mark.parametrize("chunk", [1, 7, 16, 32, 64])
def test_chunks_equal_the_recurrence_in_values_and_gradients(chunk: int) -> None:
    arrays, starts, state = inputs()
    found, expected = outcome(chunk, arrays, starts, state), outcome(0, arrays, starts, state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), found, expected)


@given(where=st.lists(st.integers(0, TIME - 1), max_size=12), chunk=st.sampled_from([7, 16]))
@settings(max_examples=20, derandomize=True)
def test_segments_may_start_anywhere_in_a_chunk(where: list[int], chunk: int) -> None:
    arrays, starts, state = inputs()
    starts = starts.at[0].set(jnp.zeros(TIME, bool).at[np.asarray(where, int)].set(True))
    found, expected = outcome(chunk, arrays, starts, state), outcome(0, arrays, starts, state)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-4), found, expected)


def test_a_token_without_step_and_decay_leaves_the_state_bit_for_bit() -> None:
    (q, k, v, g, beta), starts, state = inputs()
    _, after = kernels.delta_chunked(q, k, v, g * 0, beta * 0, starts & False, state)
    assert np.array_equal(after, state)


@pytest.mark.parametrize("chunk", [4, 16, 32])
def test_other_segments_do_not_touch_even_the_rounding(chunk: int) -> None:
    (q, k, v, g, beta), starts, state = inputs()
    out, _ = kernels.delta_chunked(q, k, v, g, beta, starts, state, chunk=chunk)
    changed, _ = kernels.delta_chunked(
        q, k.at[0, 8].mul(-3), v.at[0, 8].add(1), g.at[0, 8].add(-1), beta, starts, state, chunk=chunk
    )
    differs = np.flatnonzero(np.asarray(out != changed)[0].any((-2, -1)))
    assert differs.min() >= 8
    assert differs.max() <= 15


@pytest.mark.parametrize("size", [1, 7, 16, 64, 96])
def test_the_inverse_of_a_unit_triangle_is_one(size: int) -> None:
    a = np.tril(np.random.default_rng(0).standard_normal((3, size, size)) * 0.2, -1)
    inverse = unit_lower_inverse(jnp.asarray(a, jnp.float32))
    np.testing.assert_allclose(inverse, np.linalg.inv(np.eye(size) + a), rtol=1e-4, atol=1e-4)
    assert not np.triu(np.asarray(inverse), 1).any()


def test_chunks_by_default_fit_the_keys() -> None:
    (q, k, v, g, beta), starts, state = inputs()
    found = kernels.delta_chunked(q, k, v, g, beta, starts, state)
    expected = kernels.delta_chunked(q, k, v, g, beta, starts, state, chunk=balanced_chunk(KEY_WIDTH))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert [balanced_chunk(width) for width in (8, 32, 64, 128)] == [16, 16, 32, 64]


def test_one_step_equals_the_recurrence() -> None:
    (q, k, v, g, beta), starts, state = inputs()
    expected, last = kernels.delta_recurrent(
        q[:, :1], k[:, :1], v[:, :1], g[:, :1], beta[:, :1], starts[:, :1] & False, state
    )
    out, after = kernels.delta_step(q[:, 0], k[:, 0], v[:, 0], g[:, 0], beta[:, 0], state)
    np.testing.assert_allclose(out, expected[:, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after, last, rtol=1e-5, atol=1e-6)
