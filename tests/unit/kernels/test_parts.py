"""Attention to parts of the keys merges into attention to all of them; the splash kernel is the same function."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swerve import kernels

ROWS, TIME, HEADS, KEYS, WIDTH = 2, 24, 4, 2, 8


def inputs(time: int = TIME, width: int = WIDTH) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Queries, keys, values, and segments that start at 0, 5, 6 and 15 in one row, padding at the end of the other."""
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((ROWS, time, heads, width)), jnp.float32) for heads in (HEADS, KEYS, KEYS)
    )
    starts = np.zeros((ROWS, time), np.int32)
    starts[0, [0, 5, 6, 15]] = 1
    starts[1, [0, 13]] = 1
    segments = np.cumsum(starts, axis=1)
    segments[1, time - 4 :] = 0
    return (q, k, v), jnp.asarray(segments, jnp.int32)


@functools.partial(jax.jit, static_argnums=0)
def outcome(kind: str, arrays: tuple[jax.Array, ...], segments: jax.Array) -> Any:
    """Outputs of all queries, and the gradients of a function of them."""

    def loss(arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        out = globals()[kind](*arrays, segments)
        return (out * jnp.cos(out)).sum(), out

    return jax.value_and_grad(loss, has_aux=True)(arrays)


def naive(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    return kernels.packed_attention_naive(q, k, v, segments)


def stretches(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    """Three stretches of eight queries, each to all keys at once."""
    cuts = [slice(start, start + 8) for start in range(0, TIME, 8)]
    parts = [kernels.attend_part(q[:, c], k, v, segments[:, c], segments, c.start, block=5) for c in cuts]
    return jnp.concatenate([part.out for part in parts], axis=1)


def visits(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    """Three stretches of eight queries, which every stretch of keys visits, later ones included."""
    cuts = [slice(start, start + 8) for start in range(0, TIME, 8)]
    outs = []
    for here in cuts:
        order = [here, *(c for c in reversed(cuts) if c != here)]
        parts = [
            kernels.attend_part(q[:, here], k[:, c], v[:, c], segments[:, here], segments[:, c], here.start - c.start)
            for c in order
        ]
        outs.append(functools.reduce(kernels.Part.merge, parts).out)
    return jnp.concatenate(outs, axis=1)


def splash(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array) -> jax.Array:
    """Two stretches, as two devices compute them."""
    half = q.shape[1] // 2
    cuts = [slice(0, half), slice(half, 2 * half)]
    outs = [
        kernels.splash_attention(
            q[:, c], k, v, segments[:, c], segments, stretch=jnp.int32(i), block=128, interpret=True
        )
        for i, c in enumerate(cuts)
    ]
    return jnp.concatenate(outs, axis=1)


@pytest.mark.parametrize("kind", ["stretches", "visits"])
def test_parts_merge_into_the_whole(kind: str) -> None:
    arrays, segments = inputs()
    found, expected = outcome(kind, arrays, segments), outcome("naive", arrays, segments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), found, expected)


def test_the_splash_kernel_gives_the_same_outputs_and_gradients() -> None:
    arrays, segments = inputs(time=512, width=128)
    with jax.numpy_rank_promotion("allow"):  # inside the kernel
        found = outcome("splash", arrays, segments)
    expected = outcome("naive", arrays, segments)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4), found, expected)
