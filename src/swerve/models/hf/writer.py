"""Writing a model as files: which tensor goes into which file, and each file as one stream.

    files of tensors | index, where there are several | config.json

in this order, so that a directory with a `config.json` is whole.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from swerve import parallel
from swerve.checkpoint import Array, Buffer, Directory, Location, NewTensor, open_directory, write_file, write_tensors
from swerve.checkpoint.tensor_files import DTYPE_NAMES, DTYPES, copy_into
from swerve.models.config import Qwen35MoeConfig
from swerve.models.hf.layout import PREFIX, Experts, Layout, Link, TensorLayout, hf_layout, native_layout, renamed
from swerve.models.hf.source import ArrayTensors, Source
from swerve.models.parameters import Params
from swerve.types import SwerveError

CONFIG_FILE = "config.json"
STEM = "model"
MAX_SHARD_BYTES = 5_000_000_000
"""Data of one file, as the published checkpoints have it."""
_FLOATS: Mapping[str, np.dtype[Any]] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
}
_FLOAT32_IN_FILES = "A_log"
_CHUNK_BYTES = 1 << 24
_OUR_FILE = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors")


class PlannedFile(NamedTuple):
    """A file to be written: the tensors it will hold, and what each is, by its name in the file."""

    name: str
    tensors: tuple[NewTensor, ...]
    layout: Layout

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors."""
        return sum(tensor.num_bytes for tensor in self.tensors)


def save_hf(
    path: Location,
    config: Qwen35MoeConfig,
    params: Params,
    dtype: str = "bfloat16",
    *,
    dtypes: Mapping[str, str] | None = None,
    experts: Experts = "fused",
    prefix: str = PREFIX,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write a model as `config.json` and safetensors, with `transformers`' names.

    What fits one file is `model.safetensors`; more is `model-00001-of-00002.safetensors` and so on, with an index.

    Args:
        path: Directory or URL; made if it is not there. A model in it is replaced.
        config: The model's shape.
        params: Parameters, blocks stacked or not.
        dtype: Type of the tensors: `bfloat16`, `float16` or `float32`. Decay rates (`A_log`) stay float32.
        dtypes: Types of single tensors by their name with the prefix `model.`, going before `dtype`.
        experts: `fused`, a layer's experts in one tensor, or `each`, one tensor for each.
        prefix: Before the names of all tensors but the head.
        max_shard_bytes: Most data that a file holds, unless a single tensor has more.

    Raises:
        MachineError: The files cannot be written.
    """

    def wanted(name: str) -> np.dtype[Any]:
        kept = "float32" if name.endswith(_FLOAT32_IN_FILES) else dtype
        return _FLOATS[(dtypes or {}).get(name, kept)]

    layout = renamed(hf_layout(config, experts), prefix)
    types = {new: DTYPE_NAMES[wanted(name)] for name, new in zip(hf_layout(config, experts), layout, strict=True)}
    files = plan_files(STEM, layout, types, max_shard_bytes)
    source = params_source(config, params)
    directory = open_directory(path)
    replaced = _withdraw(directory)
    for file in files:
        write_planned(directory, file, source)
    if len(files) > 1:
        write_file(directory, index_name(STEM), index_json(files))
    for name in replaced - {file.name for file in files}:
        directory.remove(name)
    write_file(directory, CONFIG_FILE, config_json(config, dtype))


def to_hf_tensors(config: Qwen35MoeConfig, params: Params) -> dict[str, Array]:
    """Parameters as `transformers` names and lays them out, experts fused."""
    source = params_source(config, params)
    tensors: dict[str, Array] = {}
    for name, tensor in hf_layout(config).items():
        dtype = source.dtype([link.leaf for link in tensor.links])
        tensors[name] = _assembled(source, tensor, dtype)
    return tensors


def config_json(config: Qwen35MoeConfig, dtype: str) -> str:
    """The text of `config.json`."""
    return json.dumps({**config.to_hf(), "dtype": dtype}, indent=2) + "\n"


def params_source(config: Qwen35MoeConfig, params: Params, path: str = "parameters") -> Source:
    """The leaves of parameters in memory, blocks stacked or not."""
    scanned = not isinstance(params["blocks"], tuple)
    arrays = parallel.flatten_names(_by_index(params))
    return Source(config, native_layout(config, scanned=scanned), ArrayTensors(arrays), path)


def _by_index(tree: Any) -> Any:
    """The tree with tuples as mappings from their indices."""
    if isinstance(tree, tuple):
        return {str(index): _by_index(value) for index, value in enumerate(tree)}
    return {key: _by_index(value) for key, value in tree.items()} if isinstance(tree, Mapping) else tree


# ----------------------------------------------------------------------------------------------------------- files


def plan_files(stem: str, layout: Layout, dtypes: Mapping[str, str], max_bytes: int) -> list[PlannedFile]:
    """Divide tensors over files, in their order, as many into each as it may hold.

    Args:
        stem: How the files' names begin.
        layout: The tensors by the names they will have.
        dtypes: Their types, named as files do.
        max_bytes: Most data that a file holds, unless a single tensor has more.

    Returns:
        The files.

    Raises:
        SwerveError: A file could hold nothing.
    """
    if max_bytes <= 0:
        raise SwerveError(f"files of at most {max_bytes} bytes hold nothing: allow more")
    groups: list[list[NewTensor]] = [[]]
    used = 0
    for name, tensor in layout.items():
        new = NewTensor(name, dtypes[name], tensor.shape)
        if groups[-1] and used + new.num_bytes > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(new)
        used += new.num_bytes
    names = [f"{stem}-{part:05}-of-{len(groups):05}.safetensors" for part in range(1, len(groups) + 1)]
    names = names if len(groups) > 1 else [f"{stem}.safetensors"]
    return [
        PlannedFile(name, tuple(group), {tensor.name: layout[tensor.name] for tensor in group})
        for name, group in zip(names, groups, strict=True)
    ]


def write_planned(
    directory: Directory, file: PlannedFile, source: Source, wrote: Callable[[Buffer], None] = lambda data: None
) -> None:
    """Write one file from the leaves of a model, whole or not at all.

    Args:
        directory: Where it goes.
        file: What it holds.
        source: The leaves.
        wrote: Is given all that is written, in order.
    """
    dtypes = {tensor.name: DTYPES[tensor.dtype] for tensor in file.tensors}

    with directory.create(file.name) as out:
        write_tensors(out, file.tensors, lambda name: tensor_chunks(source, file.layout[name], dtypes[name]), wrote)


def index_name(stem: str) -> str:
    """Name of the file that says which file holds which tensor."""
    return f"{stem}.safetensors.index.json"


def index_json(files: list[PlannedFile]) -> str:
    """Its text."""
    where = {tensor.name: file.name for file in files for tensor in file.tensors}
    total = sum(file.num_bytes for file in files)
    return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}, indent=2) + "\n"


def _withdraw(directory: Directory) -> set[str]:
    """Make the model that is in a directory unreadable before parts of it are replaced; what files it has."""
    for name in (CONFIG_FILE, index_name(STEM)):
        directory.remove(name)
    return {name for name in directory.sizes() if _OUR_FILE.fullmatch(name)}


# --------------------------------------------------------------------------------------------------------- tensors


def tensor_chunks(source: Source, tensor: TensorLayout, dtype: np.dtype[Any]) -> Iterator[Array]:
    """The elements of a tensor in row-major order, a part of it at a time wherever files and leaf allow.

    Args:
        source: Where its leaves are.
        tensor: What it is made of.
        dtype: Its type.

    Yields:
        Arrays, not necessarily contiguous.
    """
    if not _streams(tensor):
        yield _assembled(source, tensor, dtype)
        return
    for link in tensor.links:
        shape, index = source.shapes[link.leaf], link.place[0]
        first, last = (0, shape[0]) if index is None else (index, index + 1)
        rows = last - first
        if link.leads and source.leads(link.leaf):
            rows = max(1, _CHUNK_BYTES // (math.prod(shape[1:]) * dtype.itemsize))
        for begin in range(first, last, rows):
            yield _box(source, link, (begin, min(begin + rows, last))).astype(dtype, copy=False)


def _streams(tensor: TensorLayout) -> bool:
    """Whether the tensor's links are stretches of it that follow each other."""
    end = 0
    for link in tensor.links:
        if not link.contiguous or link.first_element != end:
            return False
        end += math.prod(size for size, index in zip(link.view, link.pick, strict=True) if index is None)
    return True


def _assembled(source: Source, tensor: TensorLayout, dtype: np.dtype[Any]) -> Array:
    out = np.empty(tensor.shape, dtype)
    for link in tensor.links:
        view = out.reshape(-1)[link.offset : link.offset + math.prod(link.view)].reshape(link.view)
        copy_into(view[tuple(slice(None) if index is None else index for index in link.pick)], _box(source, link))
    return out


def _box(source: Source, link: Link, first: tuple[int, int] | None = None) -> Array:
    """What a link says of a leaf, in the order of the tensor; with `first`, only that span of its first dimension."""
    spans = [
        (0, size) if index is None else (index, index + 1)
        for index, size in zip(link.place, source.shapes[link.leaf], strict=True)
    ]
    found = source.read(link.leaf, [first or spans[0], *spans[1:]])
    found = found[tuple(slice(None) if index is None else 0 for index in link.place)]
    return found.transpose(np.argsort(link.order))
