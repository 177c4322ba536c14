"""The convolution with its hand-written gradient against the plain one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swerve import kernels


def test_values_and_gradients_equal_the_naive_form() -> None:
    rng = np.random.default_rng(0)
    x, weight, history = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((2, 9, 5), (4, 5), (2, 3, 5)))
    reach = jnp.asarray([[0, 1, 2, 3, 0, 1, 0, 1, 2], [4, 4, 4, 4, 4, 4, 4, 4, 4]], jnp.int32)

    def outcome(f: Any) -> Any:
        def loss(*arrays: jax.Array) -> jax.Array:
            out = f(*arrays, reach)
            return (out * jnp.cos(out)).sum()

        return jax.value_and_grad(loss, argnums=(0, 1, 2))(x, weight, history)

    found, expected = outcome(kernels.causal_convolution), outcome(kernels.causal_convolution_naive)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), found, expected)


def test_bfloat16_is_rounded_once() -> None:
    rng = np.random.default_rng(1)
    x, weight, history = (jnp.asarray(rng.standard_normal(s), jnp.bfloat16) for s in ((2, 9, 64), (4, 64), (2, 3, 64)))
    reach = jnp.full((2, 9), 4, jnp.int32)
    wide = tuple(a.astype(jnp.float32) for a in (x, weight, history))
    exact = kernels.causal_convolution_naive(wide[0], wide[1], wide[2], reach)
    found = kernels.causal_convolution(x, weight, history, reach)
    assert (found == exact.astype(jnp.bfloat16)).mean() > 0.999
