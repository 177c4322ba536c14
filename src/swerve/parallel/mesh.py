"""A mesh of devices, and what one of its devices says to the others.

Programs that run on a mesh are written as one device sees them (`jax.shard_map`, all axes manual): every exchange is a
call of a method below, and on an axis of one device that call does nothing, so the same code serves a laptop and a pod.

    fsdp      rows of a batch; parameters at rest
    context   stretches of a row; parameters at rest
    expert    rows of a batch, and experts while they compute; parameters at rest
    tensor    heads and inner units while they compute

Gradients are those of plain JAX: a sum's transpose is a sum, so what is equal on several devices carries a gradient
whose sum over these devices is the true one. Whoever differentiates divides a loss that all of them hold by their
number, and sums the gradient of what they hold alike.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from swerve.types import SwerveError

AXES = ("fsdp", "context", "expert", "tensor")
"""The axes of a mesh, major to minor."""
ROW_AXES = ("fsdp", "expert")
"""The axes over which the rows of a batch are split."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshShape:
    """Devices along each axis.

    Attributes:
        fsdp: Parts of a batch's rows whose devices share parameters.
        context: Parts of a row.
        expert: Parts of the experts, and of the rows.
        tensor: Parts of heads and inner units.
    """

    fsdp: int = 1
    context: int = 1
    expert: int = 1
    tensor: int = 1

    def size(self, *axes: str) -> int:
        """Devices over these axes together; over all where none is named."""
        return math.prod(getattr(self, axis) for axis in axes or AXES)

    def over(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Those of the axes that have more than one device."""
        return tuple(axis for axis in axes if getattr(self, axis) > 1)

    def make(self, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh.

        Args:
            devices: In the order of the mesh, the last axis fastest; the first of JAX's own by default.

        Raises:
            SwerveError: There are too few devices.
        """
        devices = jax.devices() if devices is None else list(devices)
        if len(devices) < self.size():
            shape = " x ".join(f"{axis} {getattr(self, axis)}" for axis in AXES)
            raise SwerveError(f"a mesh of {shape} needs {self.size()} devices; there are {len(devices)}: lower an axis")
        array = np.array(devices[: self.size()]).reshape([getattr(self, axis) for axis in AXES])
        return Mesh(array, AXES)

    # ------------------------------------------------------------------------- calls inside a manual program

    def index(self, *axes: str) -> jax.Array | int:
        """This device's place along these axes together, the first one slowest; 0 where there is one device."""
        over = self.over(axes)
        return lax.axis_index(over) if over else 0

    def gather(self, x: jax.Array, axes: Sequence[str], dim: int) -> jax.Array:
        """The parts of all devices along these axes, joined at `dim` in their order. Transposed: `scatter_sum`."""
        for over in reversed(self.steps(axes)):
            x = lax.all_gather(x, over, axis=dim, tiled=True)
        return x

    def scatter_sum(self, x: jax.Array, axes: Sequence[str], dim: int) -> jax.Array:
        """This device's part, cut at `dim`, of the sum over these axes. Transposed: `gather`."""
        for over in self.steps(axes):
            x = lax.psum_scatter(x, over, scatter_dimension=dim, tiled=True)
        return x

    def steps(self, axes: Sequence[str]) -> list[tuple[str, ...]]:
        """The axes in the groups in which they are gone over; see `exchange_steps`."""
        return exchange_steps(axes, {axis: getattr(self, axis) for axis in AXES})

    def sum(self, tree: Any, axes: Sequence[str] = AXES) -> Any:
        """The sum over these axes of every array."""
        over = self.over(axes)
        return lax.psum(tree, over) if over else tree

    def max(self, tree: Any, axes: Sequence[str] = AXES) -> Any:
        """The maximum over these axes of every array; without gradient."""
        over = self.over(axes)
        return lax.pmax(tree, over) if over else tree

    def from_before(self, tree: Any, axis: str, distance: int = 1) -> Any:
        """What the device `distance` places before this one along `axis` holds; zeros where there is none."""
        return self._shifted(tree, axis, distance)

    def from_after(self, tree: Any, axis: str) -> Any:
        """What the next device along `axis` holds; zeros where there is none."""
        return self._shifted(tree, axis, -1)

    def _shifted(self, tree: Any, axis: str, by: int) -> Any:
        size = getattr(self, axis)
        pairs = [(source, source + by) for source in range(size) if 0 <= source + by < size]
        if not pairs:
            return jax.tree.map(jnp.zeros_like, tree)
        return jax.tree.map(lambda x: lax.ppermute(x, axis, pairs), tree)

    def rotated(self, tree: Any, axis: str) -> Any:
        """What the device before this one along `axis` holds; the first gets the last one's."""
        size = getattr(self, axis)
        pairs = [(source, (source + 1) % size) for source in range(size)]
        return jax.tree.map(lambda x: lax.ppermute(x, axis, pairs), tree)


def exchange_steps(axes: Sequence[str], sizes: Mapping[str, int]) -> list[tuple[str, ...]]:
    """The axes in the groups in which an exchange goes over them, major first; those of one device are left out.

    What goes over a whole mesh at once is compiled as an all-reduce of twice the bytes on TPUs.

    Args:
        axes: To go over, major first.
        sizes: Devices along each axis of the mesh.
    """
    over = tuple(axis for axis in axes if sizes[axis] > 1)
    if len(over) > 1 and math.prod(sizes[axis] for axis in over) == math.prod(sizes.values()):
        return [over[:1], over[1:]]
    return [over] if over else []


ONE_DEVICE = MeshShape()
