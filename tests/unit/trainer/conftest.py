"""Compile fast rather than well: these tests run each program a few times."""

from collections.abc import Iterator

import jax
import pytest

_OPTION = "jax_disable_most_optimizations"


@pytest.fixture(scope="package", autouse=True)
def quick_compiles() -> Iterator[None]:
    before = jax.config.values[_OPTION]
    jax.config.update(_OPTION, True)
    yield
    jax.config.update(_OPTION, before)
