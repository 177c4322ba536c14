"""Sorted-block experts against the dense form; routing, replay, padding."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swerve import kernels
from swerve.kernels.experts import num_blocks, plan_blocks

TOKENS, WIDTH, EXPERTS, TOP_K, INNER = 29, 8, 5, 2, 6


def inputs() -> tuple[dict[str, jax.Array], jax.Array]:
    rng = np.random.default_rng(0)
    shapes = {
        "x": (TOKENS, WIDTH),
        "router": (WIDTH, EXPERTS),
        "gate_up": (EXPERTS, WIDTH, 2, INNER),
        "down": (EXPERTS, INNER, WIDTH),
    }
    arrays = {name: jnp.asarray(0.5 * rng.standard_normal(shape), jnp.float32) for name, shape in shapes.items()}
    return arrays, jnp.asarray(rng.random(TOKENS) < 0.8)


@functools.partial(jax.jit, static_argnums=0)
def outcome(block: int, arrays: dict[str, jax.Array], valid: jax.Array, replay: jax.Array | None = None) -> Any:
    def loss(arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, gate_up, down = arrays["x"], arrays["gate_up"], arrays["down"]
        routing = kernels.route(x, arrays["router"], valid, TOP_K, replay)
        if block:
            out, _ = kernels.experts_sorted(x, routing, gate_up, down, valid, block=block)
        else:
            out = kernels.experts_dense(x, routing, gate_up, down)
        return (out * jnp.cos(out)).sum() + routing.load.balance(TOP_K), out

    return jax.value_and_grad(loss, has_aux=True)(arrays)


@pytest.mark.parametrize("block", [1, 4, 64])
def test_sorted_blocks_equal_all_experts_on_all_tokens(block: int) -> None:
    arrays, valid = inputs()
    found, expected = outcome(block, arrays, valid), outcome(0, arrays, valid)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5), found, expected)
    assert not np.asarray(found[0][1])[~np.asarray(valid)].any()


@pytest.mark.parametrize("skewed", [False, True])
def test_every_valid_pair_has_a_place_of_its_own_and_padding_none(skewed: bool) -> None:
    rng = np.random.default_rng(1)
    experts = np.argsort(rng.random((TOKENS, EXPERTS)), axis=1)[:, :TOP_K]
    if skewed:
        experts[:, 0], experts[:, 1] = 3, 4
    valid = np.arange(TOKENS) % 4 != 1
    plan = plan_blocks(jnp.asarray(experts), jnp.asarray(valid), EXPERTS, 4)
    source, place, owner = (np.asarray(x) for x in plan[:3])
    assert plan.dropped == 0
    assert plan.sizes.tolist() == np.bincount(experts[valid].ravel(), minlength=EXPERTS).tolist()
    slots = num_blocks(TOKENS * TOP_K, EXPERTS, 4) * 4
    assert source.shape == (slots,)
    assert (place[~valid] == slots).all()
    taken = place[valid].ravel()
    assert len(set(taken)) == valid.sum() * TOP_K == (source < TOKENS * TOP_K).sum()
    assert (owner[taken // 4] == experts[valid].ravel()).all()
    assert (source[taken] == np.flatnonzero(np.repeat(valid, TOP_K))).all()


def test_padding_changes_neither_the_balance_nor_the_others() -> None:
    arrays, valid = inputs()
    changed = arrays | {"x": jnp.where(valid[:, None], arrays["x"], 7.0)}
    found, expected = outcome(4, changed, valid), outcome(4, arrays, valid)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def test_a_balanced_router_has_a_balance_term_of_one() -> None:
    x, valid = jnp.eye(EXPERTS), jnp.ones(EXPERTS, bool)
    routing = kernels.route(x, jnp.eye(EXPERTS), valid, 1)
    assert routing.load.balance(1) == pytest.approx(1, abs=1e-6)
    assert kernels.route(x * 0 + 1, jnp.eye(EXPERTS) * 30, valid, 1).load.balance(1) >= 1


def test_replayed_experts_are_used_and_send_their_gradient_to_the_router() -> None:
    arrays, valid = inputs()
    live = kernels.route(arrays["x"], arrays["router"], valid, TOP_K).experts
    probabilities = jax.nn.softmax(arrays["x"] @ arrays["router"])
    worst = jnp.argsort(probabilities, axis=1)[:, :TOP_K]
    replay = jnp.where(jnp.arange(TOKENS)[:, None] == 3, worst, -1).astype(jnp.int16)
    routing = kernels.route(arrays["x"], arrays["router"], valid | True, TOP_K, replay)
    assert np.array_equal(routing.experts[3], worst[3])
    assert np.array_equal(np.delete(routing.experts, 3, 0), np.delete(live, 3, 0))
    assert routing.weights[3, 0] == pytest.approx(
        float(probabilities[3, worst[3, 0]] / probabilities[3, worst[3]].sum()), rel=1e-5
    )
    only = jnp.arange(TOKENS) == 3
    gradient = outcome(4, arrays, only, replay)[1]["router"]
    assert np.abs(np.asarray(gradient)[:, np.asarray(worst[3])]).min(1).max() > 1e-3
