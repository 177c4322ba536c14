"""Experts by grouped products equal sorted blocks; shares of the experts add up; what has no place is counted."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swerve import kernels

TOKENS, WIDTH, EXPERTS, TOP_K, INNER = 40, 128, 4, 2, 128


@functools.cache
def inputs() -> tuple[dict[str, np.ndarray], np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {
        "x": (TOKENS, WIDTH),
        "router": (WIDTH, EXPERTS),
        "gate_up": (EXPERTS, WIDTH, 2, INNER),
        "down": (EXPERTS, INNER, WIDTH),
    }
    arrays = {name: (0.1 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    return arrays, rng.random(TOKENS) < 0.8


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def outcome(kind: str, shards: int, capacity: int | None) -> Any:
    """Outputs of all shards together and pairs dropped by each; gradients of a function of the outputs."""
    arrays, valid = jax.tree.map(jnp.asarray, inputs())

    def loss(arrays: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        x, size = arrays["x"], EXPERTS // shards
        routing = kernels.route(x, arrays["router"], valid, TOP_K)
        outs, drops = [], []
        for first in range(0, EXPERTS, size):
            own = slice(first, first + size)
            parts = (x, routing, arrays["gate_up"][own], arrays["down"][own], valid)
            if kind == "grouped":
                rows = capacity or kernels.capacity_of(TOKENS, TOP_K, shards, None, kernels.row_tile(TOKENS * TOP_K))
                out, dropped = kernels.experts_grouped(*parts, first=first, capacity=rows, interpret=True)
            else:
                out, dropped = kernels.experts_sorted(*parts, first=first, capacity=capacity, block=8)
            outs.append(out)
            drops.append(dropped)
        out = sum(outs[1:], outs[0])
        return (out * jnp.cos(3 * out)).sum(), (out, jnp.stack(drops))

    return jax.value_and_grad(loss, has_aux=True)(arrays)


def assert_close(found: Any, expected: Any) -> None:
    def close(a: jax.Array, b: jax.Array) -> None:
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-3 * float(jnp.abs(b).max()) + 1e-6)

    jax.tree.map(close, found, expected)


@pytest.mark.parametrize(("kind", "shards"), [("sorted", 2), ("sorted", 4), ("grouped", 1), ("grouped", 2)])
def test_shares_of_the_experts_add_up(kind: str, shards: int) -> None:
    (value, (out, dropped)), gradients = outcome(kind, shards, None)
    (expected, (all_out, _)), all_gradients = outcome("sorted", 1, None)
    assert not dropped.any()
    assert_close((value, out, gradients), (expected, all_out, all_gradients))
    assert not np.asarray(out)[~np.asarray(inputs()[1])].any()


@pytest.mark.parametrize("kind", ["sorted", "grouped"])
def test_pairs_without_a_place_are_counted_and_padding_takes_none(kind: str) -> None:
    arrays, valid = jax.tree.map(jnp.asarray, inputs())
    experts = np.asarray(kernels.route(arrays["x"], arrays["router"], valid, TOP_K).experts)[np.asarray(valid)]
    wanted = np.bincount(experts.ravel() // 2, minlength=2)
    (_, (_, dropped)), _ = outcome(kind, 2, 16)
    assert dropped.tolist() == (wanted - 16).tolist()
    (_, (_, none)), _ = outcome(kind, 2, 64)  # room for the valid pairs, and not for those of padding
    assert none.tolist() == [0, 0]
    assert wanted.max() <= 64 < TOKENS * TOP_K


def test_a_capacity_is_a_multiple_of_the_balanced_load() -> None:
    assert kernels.capacity_of(1000, 10, 2, 1.25) == 6250
    assert kernels.capacity_of(1000, 10, 2, 1.25, 512) == 6656
    assert kernels.capacity_of(1000, 10, 2, 2.0) == kernels.capacity_of(1000, 10, 2, None) == 10_000
    assert kernels.capacity_of(1000, 10, 2, 9.0) == 10_000
