"""Safetensors files: byte for byte those of the `safetensors` package, boxes read by their bytes alone."""

import contextlib
import json
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from swerve.checkpoint import (
    NewTensor,
    StoredTensor,
    open_directory,
    read_box,
    read_header,
    tensor_files,
    write_tensors,
)
from swerve.types import SwerveError

TENSORS = {
    "b.wide": np.arange(12, dtype=np.float32).reshape(3, 4),
    "a.half": np.linspace(-1, 1, 10).astype(ml_dtypes.bfloat16).reshape(5, 2),
    "a.other half": np.linspace(-1, 1, 6).astype(np.float16),
    "c.\u00e9": np.array([1, 2, 3], np.int64),
    "empty": np.zeros((0, 4), np.float32),
}


def write(path: Path, tensors: dict[str, np.ndarray]) -> None:
    new = [NewTensor(name, tensor_files.DTYPE_NAMES[x.dtype], x.shape) for name, x in tensors.items()]
    with open_directory(path.parent).create(path.name) as out:
        write_tensors(out, new, lambda name: np.array_split(tensors[name], 2))


def test_files_are_those_that_the_package_writes(tmp_path: Path) -> None:
    write(tmp_path / "ours.safetensors", TENSORS)
    assert (tmp_path / "ours.safetensors").read_bytes() == safetensors.numpy.save(TENSORS, metadata={"format": "pt"})
    found = read_header(open_directory(tmp_path), "ours.safetensors")
    assert {name: (tensor.dtype, tensor.shape) for name, tensor in found.items()} == {
        name: (tensor_files.DTYPE_NAMES[x.dtype], x.shape) for name, x in TENSORS.items()
    }


def test_transposed_arrays_are_written_in_their_own_order(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    new = [NewTensor("x", "F32", (4, 3, 2))]
    with pytest.MonkeyPatch.context() as patch, open_directory(tmp_path).create("x.safetensors") as out:
        patch.setattr(tensor_files, "_BLOCK_BYTES", 30)
        write_tensors(out, new, lambda _: [values.T])
    assert np.array_equal(safetensors.numpy.load_file(tmp_path / "x.safetensors")["x"], values.T)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0), (0, 2, 1)])
def test_copies_in_tiles_are_copies(order: tuple[int, ...]) -> None:
    values = np.arange(70 * 3 * 130, dtype=np.uint32).reshape(70, 3, 130).transpose(order)
    out = np.zeros(values.shape, np.float64)
    tensor_files.copy_into(out, values)
    assert np.array_equal(out, values)


class Bytes:
    """A directory of one file in memory that counts what is read of it."""

    path = "memory"

    def __init__(self, content: bytes) -> None:
        self.content, self.count = content, 0

    def sizes(self) -> dict[str, int]:
        return {"x": len(self.content)}

    def size(self, name: str) -> int:
        return len(self.content)

    def stamp(self, name: str) -> str:
        return ""

    def read(self, name: str) -> bytes:
        return self.content

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.count += len(out)
        out[:] = self.content[start : start + len(out)]

    def create(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        raise NotImplementedError

    def remove(self, name: str) -> None:
        raise NotImplementedError


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], list[tuple[int, int]]]:
    view = tuple(draw(st.lists(st.integers(1, 5), min_size=1, max_size=4)))
    ends = [sorted((draw(st.integers(0, size)), draw(st.integers(0, size)))) for size in view]
    return view, [(low, high) for low, high in ends]


@settings(max_examples=200)
@given(boxes(), st.integers(0, 3), st.sampled_from([1, 8, 1 << 16]), st.sampled_from([1, 1 << 16]))
def test_any_box_of_any_view_is_read(case: tuple, offset: int, run_bytes: int, block_bytes: int) -> None:
    view, box = case
    values = np.arange(offset + np.prod(view), dtype=np.int16)
    directory = Bytes(b"header--" + values.tobytes())
    stored = StoredTensor("x", "I16", values.shape, 8, len(directory.content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_files, "_RUN_BYTES", run_bytes)
        patch.setattr(tensor_files, "_BLOCK_BYTES", block_bytes)
        found = read_box(directory, stored, offset=offset, view=view, box=box)
    expected = values[offset:].reshape(view)[tuple(slice(*span) for span in box)]
    assert np.array_equal(found, expected)
    assert found.flags.c_contiguous
    if run_bytes == 1:
        assert directory.count == expected.nbytes


def test_leading_dimensions_are_read_without_the_rest() -> None:
    directory = Bytes(bytes(8 * 256 * 256 * 2))
    stored = StoredTensor("x", "BF16", (8, 256, 256), 0, len(directory.content))
    read_box(directory, stored, offset=0, view=(8, 256, 256), box=[(2, 4), (128, 256), (0, 256)])
    assert directory.count == 2 * 128 * 256 * 2


def header(described: object, data: bytes = b"") -> bytes:
    text = json.dumps(described).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "no safetensors header"),
        (b"torn", "no safetensors header"),
        (struct.pack("<Q", 100) + b"{}", "no safetensors header"),
        (struct.pack("<Q", 2) + b"[]", "header cannot be read"),
        (header({"x": {"dtype": "F32", "shape": [2]}}), "header cannot be read"),
        (
            header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4)),
            r"x should have bytes \d+ to",
        ),
        (header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(4)), "its header speaks of"),
        (header({"x": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}), "x should have bytes"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(SwerveError, match=f"x.safetensors: damaged: .*{message}"):
        read_header(open_directory(tmp_path), "x.safetensors")


def test_what_is_not_as_declared_is_not_written(tmp_path: Path) -> None:
    def chunks(_: str) -> Iterator[np.ndarray]:
        yield np.zeros(3, np.float32)

    for new in (NewTensor("x", "F32", (4,)), NewTensor("x", "F16", (3,))):
        with pytest.raises(ValueError, match="declared"), open_directory(tmp_path).create("x") as out:
            write_tensors(out, [new], chunks)
    assert list(tmp_path.iterdir()) == []
