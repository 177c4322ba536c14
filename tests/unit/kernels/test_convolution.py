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
