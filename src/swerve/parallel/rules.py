"""Logical axes mapped to mesh axes.

A parameter says what its dimensions mean (`embed`, `heads`, `expert`); a mesh says what it is split over (`fsdp`,
`tensor`). The rules join the two, and refuse what cannot be: an axis nobody declared, one mesh axis asked to split two
dimensions of the same array, a dimension that does not divide.

A dimension is split for one of two reasons. Over `compute` axes it stays split while a layer works, each device on its
own heads or experts; over `storage` axes it is split at rest only, and gathered just before.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from swerve.parallel.declared import Parameter, ParameterTree, flatten_names, unflatten_names
from swerve.parallel.mesh import AXES, MeshShape
from swerve.types import SwerveError


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """What one logical axis is split over, major to minor: first the `compute` axes, then the `storage` ones.

    Attributes:
        compute: Mesh axes over which it stays split while a layer works.
        storage: Mesh axes over which it is split at rest, and gathered for use.
    """

    compute: tuple[str, ...] = ()
    storage: tuple[str, ...] = ()

    @property
    def axes(self) -> tuple[str, ...]:
        """All mesh axes, major to minor."""
        return self.compute + self.storage


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingRules:
    """Which mesh axes each logical axis is split over.

    Attributes:
        axes: By logical axis; an empty `Split` keeps the dimension whole.
    """

    axes: Mapping[str, Split] = field(default_factory=dict)

    def splits(self, parameter: Parameter, name: str = "parameter") -> tuple[Split, ...]:
        """The split of each dimension of a parameter.

        Raises:
            SwerveError: A logical axis is unknown.
        """
        for axis in parameter.axes:
            if axis is not None and axis not in self.axes:
                raise SwerveError(f"{name}: no sharding rule for logical axis {axis!r}; add one, or map it to Split()")
        return tuple(Split() if axis is None else self.axes[axis] for axis in parameter.axes)

    def spec(self, parameter: Parameter, mesh: Mesh | AbstractMesh, name: str = "parameter") -> PartitionSpec:
        """Where one parameter lives.

        Args:
            parameter: The declaration.
            mesh: The mesh; axes that it lacks or that have size 1 split nothing.
            name: How to call the parameter in an error.

        Returns:
            One entry per dimension.

        Raises:
            SwerveError: The logical axis is unknown, a mesh axis is used twice, or a dimension does not divide.
        """
        sizes = dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True))
        used: set[str] = set()
        entries: list[tuple[str, ...] | None] = []
        for size, axis, split in zip(parameter.shape, parameter.axes, self.splits(parameter, name), strict=True):
            over = tuple(a for a in split.axes if sizes.get(a, 1) > 1)
            if clash := used.intersection(over):
                raise SwerveError(f"{name}: mesh axis {min(clash)!r} would split two dimensions of {parameter.axes}")
            shards = math.prod(sizes[a] for a in over)
            if size % shards:
                raise SwerveError(f"{name}: dimension {axis!r} of size {size} does not divide over {shards} devices")
            used.update(over)
            entries.append(over or None)
        return PartitionSpec(*entries)

    def gathered(
        self, tree: Any, declared: ParameterTree, mesh: MeshShape, *, sum_in_float32: bool = False
    ) -> dict[str, Any]:
        """Arrays as a layer computes with them, from this device's parts at rest; called inside a manual program.

        Args:
            tree: This device's parts.
            declared: Their declarations, of the same structure.
            mesh: The mesh.
            sum_in_float32: Add gradients up in float32 over the devices; each is then rounded to its array's type.

        Returns:
            The tree with every dimension whole but for its `compute` axes.
        """
        parts = flatten_names(tree)
        return unflatten_names(
            {
                name: self.gather(parts[name], parameter, mesh, sum_in_float32=sum_in_float32)
                for name, parameter in flatten_names(declared).items()
            }
        )

    def gather(
        self, part: jax.Array, parameter: Parameter, mesh: MeshShape, *, sum_in_float32: bool = False
    ) -> jax.Array:
        """One array as a layer computes with it; see `gathered`."""

        def gather(part: jax.Array) -> jax.Array:
            return self._gather(part, parameter, mesh)

        return transposed_in_float32(gather)(part) if sum_in_float32 and part.dtype != jnp.float32 else gather(part)

    def _gather(self, part: jax.Array, parameter: Parameter, mesh: MeshShape) -> jax.Array:
        kept, outputs = part.ndim - parameter.outputs, part.shape[part.ndim - parameter.outputs :]
        flat = part.reshape(*part.shape[:kept], -1)  # as the product takes it: the other way needs a copy afterwards
        for dim, split in reversed(list(enumerate(self.splits(parameter)))):  # the leading one last: it is cheapest
            flat = mesh.gather(flat, split.storage, min(dim, kept))
        return flat.reshape(*flat.shape[:kept], *outputs) if parameter.outputs > 1 else flat

    def scatter_sum(self, whole: jax.Array, parameter: Parameter, mesh: MeshShape) -> jax.Array:
        """The transpose of `gather`: this device's part of the sum over the axes that were gathered."""
        for dim, split in enumerate(self.splits(parameter)):
            whole = mesh.scatter_sum(whole, split.storage, dim)
        return whole

    def held_alike(self, parameter: Parameter, mesh: MeshShape) -> tuple[str, ...]:
        """Mesh axes along which all devices hold the same part: the gradient is to be summed over them."""
        used = {axis for split in self.splits(parameter) for axis in split.axes}
        return mesh.over([axis for axis in AXES if axis not in used])


def transposed_in_float32(linear: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """A linear function of an array, whose gradient goes through its transpose in float32 and is rounded afterwards.

    Args:
        linear: Takes any type, and gives the same.
    """

    def backward(part: jax.Array, whole: jax.Array) -> tuple[jax.Array]:
        wide = jax.ShapeDtypeStruct(part.shape, jnp.float32)
        return (jax.linear_transpose(linear, wide)(whole.astype(jnp.float32))[0].astype(part.dtype),)

    function = jax.custom_vjp(linear)
    function.defvjp(lambda part: (linear(part), part), backward)
    return function


def specs(tree: ParameterTree, mesh: Mesh | AbstractMesh, rules: ShardingRules) -> dict[str, Any]:
    """The tree of `PartitionSpec` for a declared tree."""
    return unflatten_names({name: rules.spec(p, mesh, name) for name, p in flatten_names(tree).items()})


def shardings(tree: ParameterTree, mesh: Mesh, rules: ShardingRules) -> dict[str, Any]:
    """The tree of `NamedSharding` for a declared tree."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs(tree, mesh, rules))
