"""Decoding with state equals the full forward pass; rows without tokens are frozen bit for bit."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swerve import models

from .samples import CONFIG, FAST, forward, make_params

LENGTH, ROWS = 24, 3
TOKENS = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (ROWS, LENGTH)).astype(np.int32)


@jax.jit
def extend(tokens: jax.Array, num_valid: jax.Array, state: models.DecodeState) -> Any:
    params = jax.tree.map(jnp.asarray, make_params())
    return models.extend(params, CONFIG, tokens, num_valid, state, execution=FAST)


@functools.cache
def full_hidden() -> np.ndarray:
    ones = jnp.ones((ROWS, LENGTH), jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(LENGTH), (ROWS, LENGTH))
    return np.asarray(forward(make_params(), jnp.asarray(TOKENS), ones, positions))


def advance(state: models.DecodeState, num_valid: list[int], width: int, filler: int = 0) -> Any:
    """Feed each row its next tokens, right-padded to `width`."""
    chunk = np.full((ROWS, width), filler, np.int32)
    for row, (at, n) in enumerate(zip(np.asarray(state.lengths), num_valid, strict=True)):
        chunk[row, :n] = TOKENS[row, at : at + n]
    return extend(jnp.asarray(chunk), jnp.asarray(num_valid, jnp.int32), state)


def row(state: models.DecodeState, index: int) -> list[np.ndarray]:
    return [np.asarray(x)[index] for x in jax.tree.leaves(state)]


def check(hidden: jax.Array, state: models.DecodeState, rows: list[int]) -> None:
    for index in rows:
        at = int(state.lengths[index]) - 1
        np.testing.assert_allclose(hidden[index], full_hidden()[index, at], atol=2e-5)


def test_mixed_chunks_and_single_steps_equal_the_forward_pass() -> None:
    state = models.init_state(CONFIG, ROWS, LENGTH)
    plan = [([8, 3, 1], 8), ([1, 1, 1], 1), ([5, 8, 2], 8), ([1, 0, 1], 1), ([0, 7, 8], 8), ([1, 1, 1], 1)]
    for num_valid, width in plan:
        hidden, state = advance(state, num_valid, width, filler=33)
        check(hidden, state, [i for i, n in enumerate(num_valid) if n])
    assert state.lengths.tolist() == [16, 20, 14]


@pytest.mark.parametrize("width", [1, 8])
def test_a_row_without_tokens_is_frozen_bit_for_bit(width: int) -> None:
    _, state = advance(models.init_state(CONFIG, ROWS, LENGTH), [8, 5, 3], 8)
    _, after = advance(state, [1, 0, 1], width, filler=9)
    for before, now in zip(row(state, 1), row(after, 1), strict=True):
        assert before.tobytes() == now.tobytes()
    assert after.lengths.tolist() == [9, 5, 4]


def test_a_full_row_can_be_frozen() -> None:
    state = models.init_state(CONFIG, ROWS, 8)
    _, state = extend(jnp.asarray(TOKENS[:, :8]), jnp.full(ROWS, 8, jnp.int32), state)
    _, after = extend(jnp.asarray(TOKENS[:, :8]), jnp.zeros(ROWS, jnp.int32), state)
    jax.tree.map(np.testing.assert_array_equal, after, state)


def test_reset_rows_start_anew_and_leave_the_others() -> None:
    _, state = advance(models.init_state(CONFIG, ROWS, LENGTH), [8, 8, 8], 8)
    again = models.reset_rows(state, jnp.asarray([False, True, False]))
    assert again.lengths.tolist() == [8, 0, 8]
    for before, now in zip(row(state, 0), row(again, 0), strict=True):
        assert before.tobytes() == now.tobytes()
    hidden, again = advance(again, [2, 6, 1], 8)
    check(hidden, again, [0, 1, 2])


def test_rows_go_on_where_they_were_once_there_is_more_room() -> None:
    _, small = advance(models.init_state(CONFIG, ROWS, 8), [8, 5, 3], 8)
    grown = models.grow_state(small, LENGTH)
    assert jax.tree.map(jnp.shape, grown) == jax.tree.map(jnp.shape, models.init_state(CONFIG, ROWS, LENGTH))
    for num_valid, width in (([8, 8, 8], 8), ([1, 1, 1], 1)):
        hidden, grown = advance(grown, num_valid, width)
        check(hidden, grown, [0, 1, 2])
