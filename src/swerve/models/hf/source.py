"""Leaves read from wherever their tensors lie: files of any layout, here or remote, or arrays in memory."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from swerve.checkpoint import Array, Directory, Span, StoredTensor, read_box
from swerve.checkpoint.tensor_files import DTYPES, copy_into
from swerve.models.config import Qwen35MoeConfig
from swerve.models.hf.layout import Layout, Link, Shape, leaf_shapes
from swerve.types import SwerveError


class Tensors(Protocol):
    """Tensors by name."""

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type of one."""
        ...

    def read(self, name: str, offset: int, view: Shape, box: Sequence[Span]) -> Array:
        """A box of one, its elements from `offset` on seen with the dimensions `view`."""
        ...


class FileTensors:
    """Tensors in safetensors files, read by byte ranges.

    Args:
        directory: Where the files are.
        stored: Where in them each tensor is.
    """

    def __init__(self, directory: Directory, stored: Mapping[str, StoredTensor]) -> None:
        self._directory = directory
        self._stored = stored

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type of one."""
        return DTYPES[self._stored[name].dtype]

    def read(self, name: str, offset: int, view: Shape, box: Sequence[Span]) -> Array:
        """A box of one."""
        return read_box(self._directory, self._stored[name], offset=offset, view=view, box=box)


class ArrayTensors:
    """Tensors in memory."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = {name: np.asarray(array) for name, array in arrays.items()}

    def dtype(self, name: str) -> np.dtype[Any]:
        """The type of one."""
        return self._arrays[name].dtype

    def read(self, name: str, offset: int, view: Shape, box: Sequence[Span]) -> Array:
        """A box of one; no copy where the array is contiguous."""
        flat = self._arrays[name].reshape(-1)[offset : offset + math.prod(view)]
        return flat.reshape(view)[tuple(slice(lo, hi) for lo, hi in box)]


class Source:
    """The leaves of a model.

    Args:
        config: The model's shape.
        layout: What each tensor is.
        tensors: The tensors, all of the layout's and of its shapes.
        path: How to call them in an error.
    """

    def __init__(self, config: Qwen35MoeConfig, layout: Layout, tensors: Tensors, path: str) -> None:
        self.config = config
        self.path = path
        self.shapes = leaf_shapes(config)
        self._tensors = tensors
        self._links: dict[str, list[tuple[str, Link]]] = {}
        for name, tensor in layout.items():
            for link in tensor.links:
                self._links.setdefault(link.leaf, []).append((name, link))

    def dtype(self, leaves: Sequence[str]) -> np.dtype[Any]:
        """The one type of these leaves.

        Raises:
            SwerveError: They are of several.
        """
        found = {self._tensors.dtype(name): name for leaf in leaves for name, _ in self._links[leaf]}
        if len(found) > 1:
            parts = " and ".join(f"{name} ({dtype})" for dtype, name in sorted(found.items(), key=str)[:2])
            raise SwerveError(
                f"{self.path}: {parts} have different types, and would become one tensor: convert them to one type"
            )
        return next(iter(found))

    def leads(self, leaf: str) -> bool:
        """Whether a part of the leaf's first dimension can be read without the rest."""
        return all(link.leads for _, link in self._links[leaf])

    def read(self, leaf: str, box: Sequence[Span] | None = None) -> Array:
        """A box of a leaf, the whole leaf by default, in its own type.

        Args:
            leaf: Its name.
            box: What of each dimension; `None` is all.

        Returns:
            An array of the box's shape, not necessarily contiguous.
        """
        shape = self.shapes[leaf]
        spans = [(0, size) for size in shape] if box is None else list(box)
        parts = list(self._parts(leaf, spans))
        if len(parts) == 1 and all(index is None for index in parts[0][1].place):
            return self._read_part(*parts[0], spans)
        out = np.empty([hi - lo for lo, hi in spans], self.dtype([leaf]))
        for name, link in parts:
            places = zip(link.place, spans, strict=True)
            where = tuple(slice(None) if index is None else index - lo for index, (lo, _) in places)
            copy_into(out[where], self._read_part(name, link, spans))
        return out

    def _parts(self, leaf: str, spans: Sequence[Span]) -> Iterator[tuple[str, Link]]:
        links = self._links[leaf]
        if links[0][1].place[0] is not None:  # one for each index: skip to the first that counts
            each = len(links) // self.shapes[leaf][0]
            links = links[spans[0][0] * each : spans[0][1] * each]
        for name, link in links:
            if all(p is None or lo <= p < hi for p, (lo, hi) in zip(link.place, spans, strict=True)):
                yield name, link

    def _read_part(self, name: str, link: Link, spans: Sequence[Span]) -> Array:
        """The part of the box that a link gives, as the dimensions of the leaf that are not placed."""
        own = [span for index, span in zip(link.place, spans, strict=True) if index is None]
        free: list[Span] = [(0, 0)] * len(own)
        for span, axis in zip(own, link.order, strict=True):
            free[axis] = span
        rest = iter(free)
        box = [next(rest) if index is None else (index, index + 1) for index in link.pick]
        found = self._tensors.read(name, link.offset, link.view, box)
        return found.reshape([hi - lo for lo, hi in free]).transpose(link.order)
