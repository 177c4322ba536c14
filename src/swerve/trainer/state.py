"""What a trainer needs to go on exactly where it stood."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swerve.trainer.optimizer import Params
from swerve.types import SwerveError


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """A trainer's state as host arrays of its own.

    Attributes:
        params: Nested dict of arrays.
        optimizer: `count` int32 scalar, and `mu` and `nu`, float32 trees like `params`.
        version: Number of the weights: how many updates they have had.
    """

    params: dict[str, Any]
    optimizer: dict[str, Any]
    version: int


def copy_params(params: Params) -> Params:
    """Return a copy of a tree of arrays that no one else can donate or delete."""
    return jax.tree.map(lambda x: jnp.array(x, copy=True), params)


def to_host(tree: Any) -> Any:
    """Return the tree with every array copied to the host."""
    return jax.tree.map(lambda x: np.array(x), tree)


def adopt(current: Any, given: Any, what: str) -> Any:
    """Return device copies of given arrays in the structure of the current ones.

    Args:
        current: Tree of arrays.
        given: Tree of arrays with the same names, in any order.
        what: How to call the tree in an error.

    Returns:
        A tree like the current one.

    Raises:
        SwerveError: A name, a shape or a type differs.
    """
    ours = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(current)}
    theirs = {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(given)}
    if odd := sorted(ours.keys() ^ theirs.keys()):
        raise SwerveError(f"{what} of another model: {odd[0]} is in only one of the two ({len(odd)} names differ)")
    for name, leaf in ours.items():
        other = theirs[name]
        if leaf.shape != other.shape or leaf.dtype != other.dtype:
            raise SwerveError(
                f"{what} of another model: {name} is {other.dtype}{list(other.shape)}, expected "
                f"{leaf.dtype}{list(leaf.shape)}"
            )
    copies = [jax.device_put(jnp.array(theirs[name], copy=True), leaf.sharding) for name, leaf in ours.items()]
    return jax.tree.unflatten(jax.tree.structure(current), copies)
