"""Adam by hand, and what surrounds it."""

import jax.numpy as jnp
import numpy as np
import pytest

from swerve.config.schema import Optimizer
from swerve.trainer import Adam, learning_rate_at

PARAMS = {"w": jnp.array([1.0, -2.0], jnp.float32), "b": jnp.array(0.5, jnp.float32)}


def test_two_updates_by_hand() -> None:
    adam = Adam(settings=Optimizer(max_grad_norm=float("inf"), weight_decay=0.1))
    params, state = PARAMS, adam.init(PARAMS)
    w, m, v = np.array([1.0, -2.0]), np.zeros(2), np.zeros(2)
    for step, g in enumerate((np.array([0.3, -0.4]), np.array([-0.1, 0.2])), start=1):
        gradients = {"w": jnp.asarray(g, jnp.float32), "b": jnp.zeros((), jnp.float32)}
        params, state, numbers = adam.apply(params, state, gradients, jnp.float32(0.01))
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        w = w - 0.01 * (m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.999**step)) + 1e-8) + 0.1 * w)
        np.testing.assert_allclose(params["w"], w, rtol=1e-5)
        assert float(numbers.grad_norm) == pytest.approx(np.linalg.norm(g), rel=1e-6)
        assert float(numbers.clip_scale) == 1.0
    assert int(state.count) == 2
    assert state.mu["w"].dtype == np.float32


def test_the_global_norm_is_clipped() -> None:
    adam = Adam(settings=Optimizer(max_grad_norm=1.0))
    gradients = {"w": jnp.array([0.0, 3.0]), "b": jnp.array(4.0)}
    _, state, numbers = adam.apply(PARAMS, adam.init(PARAMS), gradients, jnp.float32(0.01))
    assert float(numbers.grad_norm) == 5.0
    assert float(numbers.clip_scale) == pytest.approx(0.2)
    np.testing.assert_allclose(state.mu["w"], [0, 0.06], rtol=1e-5)
    np.testing.assert_allclose(state.mu["b"], 0.08, rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_changes_nothing(bad: float) -> None:
    adam = Adam(settings=Optimizer())
    start = adam.init(PARAMS)
    gradients = {"w": jnp.array([0.0, bad]), "b": jnp.array(4.0)}
    params, state, numbers = adam.apply(PARAMS, start, gradients, jnp.float32(0.01))
    assert not numbers.finite
    for name in PARAMS:
        np.testing.assert_array_equal(params[name], PARAMS[name])
        np.testing.assert_array_equal(state.nu[name], start.nu[name])
    assert int(state.count) == 0


def test_a_gradient_of_zero_is_no_division_by_zero() -> None:
    adam = Adam(settings=Optimizer())
    zeros = {"w": jnp.zeros(2), "b": jnp.zeros(())}
    params, _, numbers = adam.apply(PARAMS, adam.init(PARAMS), zeros, jnp.float32(0.01))
    assert numbers.finite
    np.testing.assert_array_equal(params["w"], PARAMS["w"])


def test_warm_up_is_linear_and_ends() -> None:
    settings = Optimizer(learning_rate=0.4, warmup_steps=4)
    assert [learning_rate_at(settings, step) for step in (1, 2, 4, 9)] == pytest.approx([0.1, 0.2, 0.4, 0.4])
    assert learning_rate_at(Optimizer(learning_rate=0.4), 1) == 0.4
