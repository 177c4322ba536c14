"""Drawing one token per row from logits, with log-probabilities of the distribution that was really drawn from.

Every row carries its own seed, temperature and truncation as array entries, so no setting makes a new program. A
row's randomness is a function of its session's seed and of the position of the token in that session, and of nothing
else: not of the batch, nor of its place in it. Two choices differ from the textbook for the sake of speed on a CPU:
one uniform number per row and inversion of the cumulative distribution take the place of a Gumbel number per
token, and truncation bisects the bit pattern of the probabilities, exact to the last bit, where others sort.

Legend: B rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_ONE_AS_BITS = 0x3F800000
"""The bit pattern of float32 1.0; patterns of non-negative floats order as the floats do."""


class SamplingRows(NamedTuple):
    """Per-row sampling settings.

    Attributes:
        seed: uint32 `[B, 2]`, high and low half of the session's seed.
        temperature: float32 `[B]`; 0 takes the most likely token.
        top_p: float32 `[B]`; 1 keeps all.
        top_k: int32 `[B]`; 0 keeps all.
    """

    seed: jax.Array
    temperature: jax.Array
    top_p: jax.Array
    top_k: jax.Array


def seed_words(seed: int) -> tuple[int, int]:
    """Split a seed into the two 32-bit words of a generator key; seeds are taken modulo 2^64."""
    return (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF


def _uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    """One number in [0, 1) per row, float32 `[B]`, from the session's seed and the token's position in it."""

    def draw(words: jax.Array, index: jax.Array) -> jax.Array:
        key = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.uniform(jax.random.fold_in(key, index), dtype=jnp.float32)

    return jax.vmap(draw)(seed, position)


def _keep_heaviest(probs: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """Mark the fewest most likely tokens whose weights together reach a target; ties go to the smaller token id.

    Args:
        probs: float32 `[B, V]`, what tokens are ordered by.
        weights: float32 `[B, V]`, what is summed; equal where `probs` are.
        target: float32 `[B]`.

    Returns:
        bool `[B, V]`.
    """
    bits = jax.lax.bitcast_convert_type(probs, jnp.int32)

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low + 1) // 2
        reached = jnp.where(bits >= middle[:, None], weights, 0.0).sum(axis=-1) >= target
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle - 1)

    num_rows = probs.shape[0]
    bounds = (jnp.zeros(num_rows, jnp.int32), jnp.full(num_rows, _ONE_AS_BITS, jnp.int32))
    threshold = jax.lax.fori_loop(0, 30, halve, bounds)[0][:, None]
    above, level = bits > threshold, bits == threshold
    mass_above = jnp.where(above, weights, 0.0).sum(axis=-1, keepdims=True)
    mass_before = jnp.cumsum(jnp.where(level, weights, 0.0), axis=-1) - weights
    return above | (level & (mass_above + mass_before < target[:, None]))


def _truncate(scaled: jax.Array, rows: SamplingRows) -> jax.Array:
    """Set the logits of discarded tokens to minus infinity: first top-k, then top-p of what that leaves.

    Args:
        scaled: float32 `[B, V]`, logits over temperature.
        rows: Settings.

    Returns:
        float32 `[B, V]`.
    """
    probs = jax.nn.softmax(scaled, axis=-1)
    keep = _keep_heaviest(probs, jnp.ones_like(probs), rows.top_k.astype(jnp.float32))
    scaled = jnp.where(keep | (rows.top_k <= 0)[:, None], scaled, -jnp.inf)
    probs = jax.nn.softmax(scaled, axis=-1)
    keep = _keep_heaviest(probs, probs, rows.top_p)
    return jnp.where(keep | (rows.top_p >= 1.0)[:, None], scaled, -jnp.inf)


def sample(
    logits: jax.Array, rows: SamplingRows, position: jax.Array, *, truncated: bool
) -> tuple[jax.Array, jax.Array]:
    """Draw one token per row.

    Args:
        logits: float32 `[B, V]`.
        rows: Settings.
        position: int32 `[B]`, index the drawn token will have in its session.
        truncated: Whether any row may use `top_p` or `top_k`; they are ignored otherwise.

    Returns:
        Tokens int32 `[B]`, and their log-probabilities float32 `[B]` after temperature and truncation; 0 for a row of
        temperature 0, whose choice is certain.
    """
    logits = logits.astype(jnp.float32)
    greedy = rows.temperature <= 0.0
    scaled = logits / jnp.where(greedy, 1.0, rows.temperature)[:, None]
    if truncated:
        scaled = _truncate(scaled, rows)
    log_probs = jax.nn.log_softmax(scaled, axis=-1)
    cumulative = jnp.cumsum(jnp.exp(log_probs), axis=-1)
    total = cumulative[:, -1]
    drawn = (cumulative <= (_uniform(rows.seed, position) * total)[:, None]).sum(axis=-1).astype(jnp.int32)
    # Rounding can lift the drawn point to the total itself, past the last token: take the likeliest one then.
    best = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    tokens = jnp.where(greedy | (drawn >= logits.shape[-1]), best, drawn)
    chosen = jnp.take_along_axis(log_probs, tokens[:, None], axis=-1)[:, 0]
    return tokens, jnp.where(greedy, 0.0, chosen)
