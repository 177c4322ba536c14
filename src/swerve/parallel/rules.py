"""Logical axes mapped to mesh axes.

A parameter says what its dimensions mean (`embed`, `heads`, `expert`); a mesh says what it is split over (`fsdp`,
`tensor`). The rules join the two, and refuse what cannot be: an axis nobody declared, one mesh axis asked to split two
dimensions of the same array, a dimension that does not divide.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from swerve.parallel.declared import Parameter, ParameterTree, flatten_names, unflatten_names
from swerve.types import SwerveError


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardingRules:
    """Which mesh axes each logical axis is split over.

    Attributes:
        axes: Logical axis to mesh axes, in major to minor order; an empty tuple keeps the dimension whole.
    """

    axes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

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
        for size, axis in zip(parameter.shape, parameter.axes, strict=True):
            if axis is not None and axis not in self.axes:
                raise SwerveError(f"{name}: no sharding rule for logical axis {axis!r}; add one, or map it to ()")
            over = tuple(a for a in (self.axes[axis] if axis is not None else ()) if sizes.get(a, 1) > 1)
            if clash := used.intersection(over):
                raise SwerveError(f"{name}: mesh axis {min(clash)!r} would split two dimensions of {parameter.axes}")
            shards = math.prod(sizes[a] for a in over)
            if size % shards:
                raise SwerveError(f"{name}: dimension {axis!r} of size {size} does not divide over {shards} devices")
            used.update(over)
            entries.append(over or None)
        return PartitionSpec(*entries)


def shardings(tree: ParameterTree, mesh: Mesh, rules: ShardingRules) -> dict[str, Any]:
    """The tree of `NamedSharding` for a declared tree."""
    named: dict[str, jax.sharding.Sharding] = {
        name: NamedSharding(mesh, rules.spec(parameter, mesh, name)) for name, parameter in flatten_names(tree).items()
    }
    return unflatten_names(named)
