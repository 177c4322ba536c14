"""One declaration per parameter, and what derives from it.

A declared tree is a nested mapping whose leaves are `Parameter`. The tree of arrays, the abstract tree, the shardings
and the checkpoint's names all have its structure, so a parameter is written down exactly once.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import jax
import jax.numpy as jnp

Initialiser: TypeAlias = Callable[[jax.Array, tuple[int, ...]], jax.Array]
"""Takes a random key and a shape, gives float32 values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One array of a model, before it exists.

    Attributes:
        shape: Its dimensions.
        axes: The logical axis of each dimension, or `None` for one that is never split.
        initialiser: What its first values are.
        dtype: Name of the type it is stored in.
        outputs: Trailing dimensions that one product gives together; devices exchange them as one.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    initialiser: Initialiser
    dtype: str = "float32"
    outputs: int = 1

    def __post_init__(self) -> None:
        """Refuse a declaration whose axes do not match its shape."""
        if len(self.shape) != len(self.axes):
            raise ValueError(f"a parameter of shape {self.shape} cannot have axes {self.axes}")


ParameterTree: TypeAlias = Mapping[str, "Parameter | ParameterTree"]
Leaf = TypeVar("Leaf")


# ------------------------------------------------------------------------------------------------ initialisers


def constant(value: float) -> Initialiser:
    """All entries equal `value`."""
    return lambda key, shape: jnp.full(shape, value, jnp.float32)


zeros: Initialiser = constant(0.0)
ones: Initialiser = constant(1.0)


def normal(std: float) -> Initialiser:
    """Normal values of standard deviation `std`."""
    return lambda key, shape: std * jax.random.normal(key, shape, jnp.float32)


def scaled_normal(fan_in: int, gain: float = 1.0) -> Initialiser:
    """Normal values of standard deviation `gain / sqrt(fan_in)`: a unit input gives an output of size `gain`."""
    return normal(gain / math.sqrt(fan_in))


def uniform(low: float, high: float) -> Initialiser:
    """Uniform values in `[low, high)`."""
    return lambda key, shape: jax.random.uniform(key, shape, jnp.float32, low, high)


def uniform_log(low: float, high: float) -> Initialiser:
    """The logarithm of uniform values in `[low, high)`."""
    return lambda key, shape: jnp.log(jax.random.uniform(key, shape, jnp.float32, low, high))


def log_uniform_step(low: float, high: float) -> Initialiser:
    """Values whose softplus is log-uniform in `[low, high)`: the usual first step sizes of a decaying state."""

    def values(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, math.log(low), math.log(high)))
        return jnp.log(jnp.expm1(step))

    return values


# ------------------------------------------------------------------------------------------------ derived trees


def stack(tree: ParameterTree, size: int, axis: str) -> dict[str, Any]:
    """The declaration of `size` equal trees stacked along a new leading axis, each slice initialised on its own."""

    def stacked(parameter: Parameter) -> Parameter:
        def values(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
            return jnp.stack([parameter.initialiser(k, shape[1:]) for k in jax.random.split(key, size)])

        return replace(parameter, shape=(size, *parameter.shape), axes=(axis, *parameter.axes), initialiser=values)

    return jax.tree.map(stacked, dict(tree), is_leaf=_is_parameter)


def abstract(tree: ParameterTree) -> dict[str, Any]:
    """The tree of `jax.ShapeDtypeStruct`: shapes and types without values."""
    return jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), dict(tree), is_leaf=_is_parameter)


def initialise(tree: ParameterTree, key: jax.Array) -> dict[str, Any]:
    """The tree of first values.

    Each parameter's key is derived from its name, so adding one changes no other.

    Args:
        tree: The declarations.
        key: A random key.

    Returns:
        Arrays in the declared shapes and types.
    """
    named = {
        name: p.initialiser(jax.random.fold_in(key, zlib.crc32(name.encode())), p.shape).astype(p.dtype)
        for name, p in flatten_names(tree).items()
    }
    return unflatten_names(named)


def num_parameters(tree: ParameterTree) -> int:
    """Number of scalars in the tree."""
    return sum(math.prod(p.shape) for p in flatten_names(tree).values())


def flatten_names(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Leaves of a nested mapping by dotted name, in the mapping's order."""
    named: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            named.update(flatten_names(value, f"{prefix}{key}."))
        else:
            named[prefix + key] = value
    return named


def unflatten_names(named: Mapping[str, Leaf]) -> dict[str, Any]:
    """The nested mapping whose leaves have these dotted names."""
    tree: dict[str, Any] = {}
    for name, value in named.items():
        *path, last = name.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = value
    return tree


def _is_parameter(node: object) -> bool:
    return isinstance(node, Parameter)
