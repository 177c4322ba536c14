"""Safetensors files without the memory: headers, boxes of tensors by byte ranges, and writing as a stream.

    8 bytes: length of the header | JSON: dtype, shape and place of each tensor | their bytes, row-major

What is written is byte for byte what the `safetensors` package writes of the same tensors.
"""

from __future__ import annotations

import itertools
import json
import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from swerve.checkpoint.storage import Directory
from swerve.types import SwerveError

DTYPES: Mapping[str, np.dtype[Any]] = {
    "BOOL": np.dtype(np.bool_),
    **{
        f"{kind}{bits}": np.dtype(f"{name}{bits}")
        for kind, name in (("I", "int"), ("U", "uint"))
        for bits in (8, 16, 32, 64)
    },
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
"""Types by the name that a file gives them."""
DTYPE_NAMES: Mapping[np.dtype[Any], str] = {dtype: name for name, dtype in DTYPES.items()}

Span: TypeAlias = tuple[int, int]
"""First index, and one past the last."""
Array: TypeAlias = NDArray[Any]
Buffer: TypeAlias = "bytes | bytearray | memoryview"

_HEADER_GUESS = 1 << 16
_HEADER_LIMIT = 100_000_000
_RUN_BYTES = 1 << 16
"""Runs shorter than this are read together with what lies between them."""
_BLOCK_BYTES = 1 << 24
"""Most that is read or copied beside the array that is asked for."""
_TILE = 64
_RANKS = ("U64", "I64", "F64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16", "I8", "U8", "BOOL")
_INTEGERS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


class StoredTensor(NamedTuple):
    """Where a tensor lies.

    Attributes:
        file: Name of its file.
        dtype: As the file calls it; not necessarily one of `DTYPES`.
        shape: Its dimensions.
        start: First byte in the file.
        stop: One past its last byte.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return self.stop - self.start


class NewTensor(NamedTuple):
    """A tensor to be written: its name, type (one of `DTYPES`) and dimensions."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


# --------------------------------------------------------------------------------------------------------- reading


def read_header(directory: Directory, file: str) -> dict[str, StoredTensor]:
    """The tensors of a file by name, from its first bytes alone.

    Raises:
        SwerveError: The file is missing, cut short, or no safetensors file.
    """
    size = directory.size(file)
    path = f"{directory.path}/{file}"
    head = bytearray(min(size, _HEADER_GUESS))
    directory.read_into(file, 0, memoryview(head))
    length = struct.unpack_from("<Q", head)[0] if len(head) >= 8 else 0
    if not 2 <= length <= min(size - 8, _HEADER_LIMIT):
        raise SwerveError(f"{path}: damaged: it begins with no safetensors header: copy it again")
    if length + 8 > len(head):
        rest = bytearray(length + 8 - len(head))
        directory.read_into(file, len(head), memoryview(rest))
        head += rest
    base = 8 + length
    try:
        described = json.loads(head[8:base])
        described.pop("__metadata__", None)
        tensors = {
            name: StoredTensor(file, d["dtype"], tuple(d["shape"]), *(base + offset for offset in d["data_offsets"]))
            for name, d in described.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise SwerveError(f"{path}: damaged: the header cannot be read ({error}): copy it again") from error
    end = base
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].stop)):
        wanted = NewTensor(name, tensor.dtype, tensor.shape).num_bytes if tensor.dtype in DTYPES else tensor.num_bytes
        if tensor.start != end or tensor.num_bytes != wanted:
            raise SwerveError(
                f"{path}: damaged: tensor {name} should have bytes {end} to {end + wanted}, and has {tensor.start} to "
                f"{tensor.stop}: copy it again"
            )
        end = tensor.stop
    if end != size:
        raise SwerveError(f"{path}: damaged: it has {size} bytes, its header speaks of {end}: copy it again")
    return tensors


def read_box(
    directory: Directory, tensor: StoredTensor, *, offset: int, view: Sequence[int], box: Sequence[Span]
) -> Array:
    """Part of a tensor, by reading little more than its bytes.

    Args:
        directory: Where the tensor's file is.
        tensor: Which one.
        offset: Elements that lie before the part.
        view: Dimensions, at least one, to see the elements from `offset` on with.
        box: What to read of each of them.

    Returns:
        A contiguous array of the box's shape.
    """
    dtype = DTYPES[tensor.dtype]
    out = np.empty([hi - lo for lo, hi in box], dtype)
    if not out.size:
        return out
    strides = [math.prod(view[axis + 1 :]) for axis in range(len(view))]
    split = max((axis for axis, (span, size) in enumerate(zip(box, view, strict=True)) if span != (0, size)), default=0)
    while split and (box[split][1] - box[split][0]) * strides[split] * dtype.itemsize < _RUN_BYTES:
        split -= 1
    # Below `split`, whole rows are read, several at a time; where they hold more than the box, it is cut out of them.
    inner = tuple(slice(lo, hi) for lo, hi in box[split + 1 :])
    whole = all(span == (0, size) for span, size in zip(box[split + 1 :], view[split + 1 :], strict=True))
    (low, high), row = box[split], strides[split]
    rows = high - low if whole else max(1, _BLOCK_BYTES // (row * dtype.itemsize))
    for outer in itertools.product(*(range(lo, hi) for lo, hi in box[:split])):
        first = offset + sum(index * strides[axis] for axis, index in enumerate(outer))
        into = out[tuple(index - box[axis][0] for axis, index in enumerate(outer))]
        for begin in range(low, high, rows):
            count = min(rows, high - begin)
            start = tensor.start + (first + begin * row) * dtype.itemsize
            if whole:
                directory.read_into(tensor.file, start, _raw(into[begin - low : begin - low + count]))
                continue
            scratch = np.empty((count, *view[split + 1 :]), dtype)
            directory.read_into(tensor.file, start, _raw(scratch))
            into[begin - low : begin - low + count] = scratch[(slice(None), *inner)]
    return out


def bits(array: Array) -> Array:
    """The same elements as unsigned integers: copies of them are exact, whatever they mean, and fast."""
    return array.view(_INTEGERS[array.dtype.itemsize])


def copy_into(out: Array, array: Array) -> None:
    """`out[...] = array`, in tiles that stay in the cache where one is the other's transpose.

    Args:
        out: Where to.
        array: What, of the same shape and of any type.
    """
    if not array.size:
        return
    last = array.ndim - 1
    near = min(range(array.ndim), key=lambda axis: array.strides[axis] if array.shape[axis] > 1 else np.inf)
    if near == last or array.shape[last] == 1:
        out[...] = array
        return
    where = [slice(None)] * array.ndim
    for i in range(0, array.shape[near], _TILE):
        for j in range(0, array.shape[last], _TILE):
            where[near], where[last] = slice(i, i + _TILE), slice(j, j + _TILE)
            out[tuple(where)] = array[tuple(where)]


def _raw(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


# --------------------------------------------------------------------------------------------------------- writing


def file_order(tensors: Iterable[NewTensor]) -> list[NewTensor]:
    """Tensors in the order in which a file holds them: wide types first, so that all are aligned, then by name."""
    return sorted(tensors, key=lambda tensor: (_RANKS.index(tensor.dtype), tensor.name))


def header_bytes(tensors: Sequence[NewTensor]) -> bytes:
    """What comes before the data of a file with these tensors, in this order."""
    described: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.num_bytes
        described[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(described, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_tensors(
    out: BinaryIO,
    tensors: Iterable[NewTensor],
    chunks: Callable[[str], Iterable[Array]],
    wrote: Callable[[Buffer], None] = lambda data: None,
) -> None:
    """Write a safetensors file from its beginning to its end.

    Args:
        out: The open file.
        tensors: What it is to hold.
        chunks: Gives a tensor's elements in row-major order, in arrays of its type and any shape.
        wrote: Is given all that is written, in order.
    """
    ordered = file_order(tensors)
    header = header_bytes(ordered)
    out.write(header)
    wrote(header)
    for tensor in ordered:
        count = 0
        for chunk in chunks(tensor.name):
            if DTYPE_NAMES[chunk.dtype] != tensor.dtype:
                raise ValueError(f"{tensor.name}: declared {tensor.dtype}, given {chunk.dtype}")
            for piece in _pieces(bits(chunk)):
                out.write(_raw(piece))
                wrote(_raw(piece))
                count += piece.nbytes
        if count != tensor.num_bytes:
            raise ValueError(f"{tensor.name}: declared {tensor.num_bytes} bytes, given {count}")


def _pieces(array: Array) -> Iterable[Array]:
    """The array in contiguous pieces, copied where it is not so, a few megabytes at a time."""
    if array.flags.c_contiguous:
        yield array
        return
    rows = max(1, _BLOCK_BYTES * len(array) // max(1, array.nbytes))
    for first in range(0, len(array), rows):
        part = array[first : first + rows]
        piece = np.empty(part.shape, part.dtype)
        copy_into(piece, part)
        yield piece
