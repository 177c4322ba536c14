"""Segments are exact wherever they lie: whatever is before, between or behind them, values and gradients are their own.

All examples are of one shape, so that they share their programs.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from swerve import kernels
from swerve.models.layers import segment_borders

from .samples import CONFIG, FAST, forward, gradients, make_params, scores

ROWS, TIME = 2, 24
Batch = tuple[jax.Array, jax.Array, jax.Array]


class Layout(NamedTuple):
    """Where the segments of a row lie: spans in order, padding wherever there is none."""

    spans: tuple[slice, ...]

    @property
    def owner(self) -> np.ndarray:
        """Index of the segment of each place, -1 for padding."""
        owner = np.full(TIME, -1)
        for index, span in enumerate(self.spans):
            owner[span] = index
        return owner


def lay(parts: Sequence[tuple[int, int]]) -> Layout:
    """Segments of these (padding before, length), as far as a row holds them."""
    spans, at = [], 0
    for gap, length in parts:
        start, at = at + gap, at + gap + length
        if at <= TIME:
            spans.append(slice(start, at))
    return Layout(tuple(spans))


layouts = st.lists(st.tuples(st.integers(0, 3), st.integers(1, 11)), min_size=2, max_size=7).map(lay)
tokens_of_rows = np.random.default_rng(0).integers(1, CONFIG.vocab_size, (ROWS, TIME)).astype(np.int32)


def batch(layout: Layout, tokens: np.ndarray = tokens_of_rows[0], filler: int = 0) -> Batch:
    """A row of this layout, and beside it a row of one segment."""
    owner = layout.owner
    rows = np.stack([np.where(owner >= 0, tokens, filler), tokens_of_rows[1]])
    positions = np.stack([np.zeros(TIME, np.int64), np.arange(TIME)])
    for span in layout.spans:
        positions[0, span] = np.arange(span.stop - span.start)
    segments = np.stack([owner + 1, np.ones(TIME, np.int64)])
    return jnp.asarray(rows, jnp.int32), jnp.asarray(segments, jnp.int32), jnp.asarray(positions, jnp.int32)


def alone(span: slice) -> tuple[Batch, slice]:
    """The tokens of one segment as the only one of a row, from its start."""
    length = span.stop - span.start
    tokens = np.zeros(TIME, np.int32)
    tokens[:length] = tokens_of_rows[0, span]
    return batch(lay([(0, length)]), tokens), slice(0, length)


def weights_at(spans: Sequence[slice], values: Sequence[np.ndarray]) -> jax.Array:
    """Weights `[ROWS, TIME]` of these values at these places of the first row, 0 elsewhere."""
    weights = np.zeros((ROWS, TIME), np.float32)
    for span, own in zip(spans, values, strict=True):
        weights[0, span] = own
    return jnp.asarray(weights)


def check_equal_alone(layout: Layout, filler: int = 0) -> None:
    """Log-probabilities, entropies and gradients of each segment are those of the segment alone."""
    rng = np.random.default_rng(1)
    values = [rng.standard_normal(span.stop - span.start).astype(np.float32) for span in layout.spans]
    together, total = batch(layout, filler=filler), None
    lp, entropy = scores(make_params(), *together)
    for span, own in zip(layout.spans, values, strict=True):
        single, here = alone(span)
        found = scores(make_params(), *single)
        np.testing.assert_allclose(lp[0, span], found[0][0, here], rtol=0, atol=1e-4)
        np.testing.assert_allclose(entropy[0, span], found[1][0, here], rtol=0, atol=1e-4)
        gradient = gradients(make_params(), *single, weights_at([here], [own]))
        total = gradient if total is None else jax.tree.map(jnp.add, total, gradient)
    assert not np.asarray(lp)[0, layout.owner < 0].any()
    gradient = gradients(make_params(), *together, weights_at(layout.spans, values))
    for a, b in zip(jax.tree.leaves(gradient), jax.tree.leaves(total), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=5e-4 * float(np.abs(b).max()) + 1e-6)


@given(layout=layouts, filler=st.integers(0, CONFIG.vocab_size - 1))
@example(layout=lay([(0, 7), (0, 1), (0, 11), (0, 5)]), filler=0)
@settings(max_examples=10, derandomize=True)
def test_packed_equals_unpacked_wherever_segments_and_padding_lie(layout: Layout, filler: int) -> None:
    check_equal_alone(layout, filler)


@pytest.mark.parametrize("padded", [False, True])
def test_a_segment_may_start_at_every_place_of_a_block_and_of_a_chunk(padded: bool) -> None:
    for start in range(1, FAST.attention_block + 1):  # a chunk of the DeltaNet divides it
        check_equal_alone(lay([(start, 13)] if padded else [(0, start), (0, 13)]))


@given(layout=layouts, at=st.integers(0, TIME - 1), change=st.integers(1, CONFIG.vocab_size - 1))
@example(layout=lay([(0, 6), (0, 9), (0, 5)]), at=14, change=1)  # the last token of the second segment
@settings(max_examples=25)
def test_a_token_changes_no_bit_of_other_segments_and_earlier_places(layout: Layout, at: int, change: int) -> None:
    tokens = tokens_of_rows[0].copy()
    before = [forward(make_params(), *batch(layout)), *scores(make_params(), *batch(layout))]
    tokens[at] = (tokens[at] + change) % CONFIG.vocab_size
    filler = int(tokens[at]) if layout.owner[at] < 0 else 0
    after = [
        forward(make_params(), *batch(layout, tokens, filler)),
        *scores(make_params(), *batch(layout, tokens, filler)),
    ]
    own = layout.owner[at]
    reached = (layout.owner == own) & (np.arange(TIME) >= at) & (own >= 0)
    for a, b in zip(before, after, strict=True):
        differs = (np.asarray(a) != np.asarray(b)).reshape(ROWS, TIME, -1).any(-1)
        assert not differs[1].any()
        padding = layout.owner < 0  # hidden states there mean nothing
        assert not (differs[0] & ~reached & ~padding).any()
    if own >= 0:
        assert (np.asarray(before[0][0, at]) != np.asarray(after[0][0, at])).any()


@given(layout=layouts)
@settings(max_examples=10, derandomize=True)
def test_no_gradient_reaches_tokens_of_other_segments(layout: Layout) -> None:
    # each segment has token ids of its own, so that the embedding's gradient tells them apart
    tokens = np.where(layout.owner == 0, 1 + tokens_of_rows[0] % 9, 20 + tokens_of_rows[0] % 9).astype(np.int32)
    first = layout.spans[0]
    weights = weights_at([first], [np.ones(first.stop - first.start, np.float32)])
    gradient = gradients(make_params(), *batch(layout, tokens), weights)["embedding"]
    reached = np.flatnonzero(np.asarray(gradient).any(-1))
    assert set(reached) <= set(tokens[first])
    assert first.stop - first.start == 1 or set(reached) == set(tokens[first][:-1])


@functools.partial(jax.jit, static_argnums=2)
def convolve(x: jax.Array, segments: jax.Array, width: int, taps: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where segments start, and the convolution within them."""
    starts, reach = segment_borders(segments, jnp.full((1, width - 1), -1, jnp.int32))
    return starts, kernels.causal_convolution(x, taps, jnp.zeros((1, width - 1, x.shape[-1])), reach)


@given(layout=layouts, width=st.sampled_from([2, 3, 4]))
@settings(max_examples=15, derandomize=True)
def test_the_convolution_looks_back_to_the_start_of_its_segment(layout: Layout, width: int) -> None:
    rng = np.random.default_rng(width)
    x, taps = rng.standard_normal((1, TIME, 3)).astype(np.float32), rng.standard_normal((width, 3)).astype(np.float32)
    segments = jnp.asarray(layout.owner[None] + 1, jnp.int32)
    starts, found = convolve(jnp.asarray(x), segments, width, jnp.asarray(taps))
    assert np.flatnonzero(starts[0]).tolist() == [span.start for span in layout.spans]
    for span in layout.spans:
        own = x[0, span]
        expected = np.stack([np.convolve(own[:, c], taps[::-1, c])[: len(own)] for c in range(3)], axis=1)
        np.testing.assert_allclose(found[0, span], expected / (1 + np.exp(-expected)), rtol=1e-5, atol=1e-6)
