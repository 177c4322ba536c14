"""Reading a model: what files hold is found and checked from their headers, before any of their data."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from swerve import parallel
from swerve.checkpoint import Array, Directory, Location, StoredTensor, open_directory, read_header
from swerve.checkpoint.files import FORMAT, MANIFEST
from swerve.checkpoint.tensor_files import DTYPES, copy_into
from swerve.models.config import Qwen35MoeConfig
from swerve.models.hf.layout import (
    HEAD,
    PREFIX,
    Experts,
    Layout,
    experts_of,
    hf_layout,
    native_layout,
    normalised,
    prefix_of,
)
from swerve.models.hf.source import ArrayTensors, FileTensors, Source
from swerve.models.hf.writer import CONFIG_FILE, STEM, index_name
from swerve.models.parameters import dtype_of
from swerve.types import SwerveError

_log = logging.getLogger(__name__)

Form: TypeAlias = Literal["hf", "scanned", "unscanned"]
NATIVE_FORMS: tuple[Form, ...] = ("scanned", "unscanned")
NATIVE_STEM = "params"
READ_DTYPES = ("BF16", "F16", "F32")
"""Types that a model's tensors may have in files."""
_DTYPE_OF: Mapping[str, Any] = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(jnp.bfloat16)}
_HEADERS_AT_ONCE = 8


@dataclass(frozen=True, kw_only=True)
class ModelFiles:
    """What a directory holds, from its configuration and the headers of its files.

    Attributes:
        directory: Where.
        raw_config: The content of `config.json`.
        config: The text model in it.
        form: Layout of the tensors: `hf`, or our `scanned` or `unscanned`.
        experts: How files of the form `hf` hold the experts; for ours, how those did that they were made from.
        prefix: What stands before the names, likewise.
        stored: The text model's tensors by name, with the prefix `model.` in the form `hf`.
        skipped: Tensors of other parts, by their name in the files.
        sizes: Bytes of each file of tensors.
    """

    directory: Directory
    raw_config: bytes
    config: Qwen35MoeConfig
    form: Form
    experts: Experts
    prefix: str
    stored: dict[str, StoredTensor]
    skipped: dict[str, StoredTensor]
    sizes: dict[str, int]

    def layout(self) -> Layout:
        """What the tensors must be."""
        if self.form == "hf":
            return hf_layout(self.config, self.experts)
        return native_layout(self.config, scanned=self.form == "scanned")

    def check(self) -> Layout:
        """Refuse what does not fit the configuration; the layout, if all does.

        Raises:
            SwerveError: A tensor is missing, unknown, misshapen, or of a type that is not read.
        """
        for name, tensor in self.stored.items():
            if tensor.dtype not in READ_DTYPES:
                raise SwerveError(
                    f"{self.directory.path}: tensor {name} is {tensor.dtype}, and only {', '.join(READ_DTYPES)} are "
                    "read: convert the checkpoint to one of them first"
                )
        layout = self.layout()
        check_tensors(layout, {name: tensor.shape for name, tensor in self.stored.items()}, self.directory.path)
        return layout

    def source(self) -> Source:
        """The leaves, to be read from the files when they are asked for; see `check`."""
        return Source(self.config, self.check(), FileTensors(self.directory, self.stored), self.directory.path)


# --------------------------------------------------------------------------------------------------------- loading


def load_hf(
    path: Location,
    *,
    dtype: Literal["float32", "bfloat16", "checkpoint"] = "float32",
    shardings: Mapping[str, Any] | None = None,
) -> tuple[Qwen35MoeConfig, dict[str, Any]]:
    """Read a model.

    Args:
        path: Directory or URL with `config.json` and one or several `*.safetensors`, in `transformers`' layout or ours.
        dtype: Type of the parameters; with `bfloat16`, decay rates and router are float32 all the same. `checkpoint`
            keeps the type that the files have.
        shardings: A tree like `parameters(config)` of where on a mesh each parameter goes, as `parallel.shardings`
            makes it. Of each parameter, only what the devices of this process hold is read.

    Returns:
        The configuration, and the parameters with blocks stacked.

    Raises:
        SwerveError: A file is missing or damaged, or a tensor is missing, unknown, misshapen or of a type not read.
    """
    files = open_model(path)
    source = files.source()
    note_skipped(files)
    return files.config, _load(source, dtype, shardings)


def from_hf_tensors(
    config: Qwen35MoeConfig, tensors: Mapping[str, Array], source: str = "checkpoint"
) -> dict[str, Any]:
    """Parameters from tensors by their normalised names (`model.layers...`); float32, blocks stacked.

    Raises:
        SwerveError: A tensor is missing, unknown or misshapen.
    """
    present = {name: value for name, value in tensors.items() if not (config.tie_word_embeddings and name == HEAD)}
    layout = hf_layout(config, experts_of(present))
    check_tensors(layout, {name: value.shape for name, value in present.items()}, source)
    return _load(Source(config, layout, ArrayTensors(present), source), "float32", None)


def read_dtypes(path: Location) -> dict[str, str]:
    """Type of every tensor of a directory by its name with the prefix `model.`, for `save_hf(dtypes=...)`."""
    return {name: str(DTYPES[tensor.dtype]) for name, tensor in open_model(path).stored.items()}


def read_config(directory: Location) -> Qwen35MoeConfig:
    """Read `config.json` of a directory or URL."""
    return _parse_config(open_directory(directory))[1]


def _load(source: Source, dtype: str, shardings: Mapping[str, Any] | None) -> dict[str, Any]:
    flat = None if shardings is None else parallel.flatten_names(shardings)
    parameters: dict[str, _Parameter] = {}
    for name, tensor in native_layout(source.config, scanned=True).items():
        leaves = [link.leaf for link in tensor.links]
        wanted = source.dtype(leaves) if dtype == "checkpoint" else _DTYPE_OF[dtype_of(name, dtype)]
        parameters[name] = _Parameter(source, leaves, tensor.shape, wanted)
    named: dict[str, Any] = {}
    while parameters:  # each goes when it is on the device, and what was read for it
        name = next(iter(parameters))
        parameter = parameters.pop(name)
        if flat is None:
            named[name] = jnp.asarray(parameter.read())
        else:
            named[name] = jax.make_array_from_callback(parameter.shape, flat[name], parameter.read)
    return parallel.unflatten_names(named)


class _Parameter:
    """One array of `parameters(config)`, made of the leaves of its layers. What was read is not read twice."""

    def __init__(self, source: Source, leaves: list[str], shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        self._source = source
        self._stack = shape[: len(shape) - len(source.shapes[leaves[0]])]
        self._leaves = np.asarray(leaves, object).reshape(self._stack)
        self.shape = shape
        self._dtype = dtype
        self._had: dict[tuple[tuple[int, int], ...], Array] = {}

    def read(self, index: tuple[slice, ...] | None = None) -> Array:
        """The part of the array that an index of slices takes; all of it by default."""
        pieces = index or (slice(None),) * len(self.shape)
        spans = tuple(piece.indices(size)[:2] for piece, size in zip(pieces, self.shape, strict=True))
        if spans not in self._had:
            out = np.empty([hi - lo for lo, hi in spans], self._dtype)
            stack = len(self._stack)
            leaves = self._leaves[tuple(slice(lo, hi) for lo, hi in spans[:stack])]
            for where, leaf in np.ndenumerate(leaves):
                copy_into(out[where], self._source.read(leaf, spans[stack:]))
            self._had[spans] = out
        return self._had[spans]


# ---------------------------------------------------------------------------------------------------------- finding


def open_model(path: Location) -> ModelFiles:
    """Find out what a directory or URL holds, from its configuration and headers alone.

    Raises:
        SwerveError: A file is missing or damaged, the configuration is of another model, or files and index disagree.
    """
    directory = open_directory(path)
    raw, config = _parse_config(directory)
    manifest = _native_manifest(directory)
    stem = STEM if manifest is None else NATIVE_STEM
    found = _stored(directory, stem)
    sizes = {file: directory.size(file) for file in sorted({tensor.file for tensor in found.values()})}
    if manifest is not None:
        return ModelFiles(
            directory=directory,
            raw_config=raw,
            config=config,
            form=manifest["layout"],
            experts=manifest.get("experts", "fused"),
            prefix=manifest.get("prefix", PREFIX),
            stored=found,
            skipped={},
            sizes=sizes,
        )
    stored: dict[str, StoredTensor] = {}
    skipped: dict[str, StoredTensor] = {}
    for name, tensor in found.items():
        own = normalised(name)
        if own is None or (own == HEAD and config.tie_word_embeddings):
            skipped[name] = tensor
        elif own in stored:
            raise SwerveError(f"{directory.path}: tensor {name} is there twice, with different prefixes: remove one")
        else:
            stored[own] = tensor
    prefixes = (prefix_of(name) for name in found if name not in skipped)
    return ModelFiles(
        directory=directory,
        raw_config=raw,
        config=config,
        form="hf",
        experts=experts_of(stored),
        prefix=next((prefix for prefix in prefixes if prefix), PREFIX),
        stored=stored,
        skipped=skipped,
        sizes=sizes,
    )


def note_skipped(files: ModelFiles) -> None:
    """Say in one line which tensors are left aside, if any are."""
    if files.skipped:
        _log.warning("%s", skipped_line(files))


def skipped_line(files: ModelFiles) -> str:
    """What is left aside, with an example."""
    count = len(files.skipped)
    return (
        f"{files.directory.path}: skipped {count} tensor{'s' if count > 1 else ''} that the text model does not use, "
        f"for example {min(files.skipped)}"
    )


def check_tensors(layout: Layout, shapes: Mapping[str, tuple[int, ...]], source: str) -> None:
    """Refuse tensors that are not those of a layout.

    Raises:
        SwerveError: One is missing, unknown or misshapen; the line names it.
    """
    if missing := sorted(layout.keys() - shapes.keys()):
        raise SwerveError(f"{source}: missing tensor {missing[0]}" + _and_more(missing))
    if extra := sorted(shapes.keys() - layout.keys()):
        raise SwerveError(f"{source}: unknown tensor {extra[0]}" + _and_more(extra))
    for name, tensor in layout.items():
        if shapes[name] != tensor.shape:
            raise SwerveError(f"{source}: tensor {name} has shape {shapes[name]}, the config asks for {tensor.shape}")


def _and_more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""


def _parse_config(directory: Directory) -> tuple[bytes, Qwen35MoeConfig]:
    file = f"{directory.path}/{CONFIG_FILE}"
    content = directory.read(CONFIG_FILE)
    raw = _json_object(content, file)
    return content, Qwen35MoeConfig.from_hf(raw, source=file)


def _json_object(content: bytes, file: str) -> dict[str, Any]:
    try:
        raw = json.loads(content)
    except ValueError as error:
        raise SwerveError(f"{file}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise SwerveError(f"{file}: expected a JSON object")
    return raw


def _native_manifest(directory: Directory) -> dict[str, Any] | None:
    """The manifest of a directory in one of our own layouts, or `None` if it is in another."""
    content = _optional(directory, MANIFEST, directory.sizes())
    if content is None:
        return None
    file = f"{directory.path}/{MANIFEST}"
    manifest = _json_object(content, file)
    if manifest.get("layout") not in NATIVE_FORMS:
        return None  # of weights that a run has saved in `transformers`' layout
    if manifest.get("format") != FORMAT:
        raise SwerveError(f"{file}: layout {manifest.get('format')} is not {FORMAT}: use the Swerve that wrote it")
    return manifest


def _stored(directory: Directory, stem: str) -> dict[str, StoredTensor]:
    """Every tensor of a directory by its name in the files, the index honoured where there is one."""
    sizes = directory.sizes()
    present = sorted(name for name in sizes if name.endswith(".safetensors"))
    index = _index(directory, stem, sizes)
    if index is None:
        files = present or ([] if sizes else [f"{stem}.safetensors"])
        if not files:
            raise SwerveError(f"{directory.path}: no *.safetensors file")
    else:
        files = sorted(set(index.values()))
        if missing := [file for file in files if sizes and file not in sizes]:
            names = sorted(name for name, file in index.items() if file == missing[0])
            raise SwerveError(
                f"{directory.path}: missing file {missing[0]}{_and_more(missing)}, in which the index has tensor "
                f"{names[0]}: copy it again"
            )
        files += [file for file in present if file not in files]
    with ThreadPoolExecutor(_HEADERS_AT_ONCE) as pool:
        headers = list(pool.map(lambda file: read_header(directory, file), files))
    found: dict[str, StoredTensor] = {}
    for header in headers:
        for name, tensor in header.items():
            if index is not None and index.get(name) != tensor.file:
                raise SwerveError(
                    f"{directory.path}: {tensor.file} holds tensor {name}, which the index does not have there: remove "
                    "the file, or correct the index"
                )
            if name in found:
                raise SwerveError(
                    f"{directory.path}: tensor {name} is in {found[name].file} and in {tensor.file}: remove one"
                )
            found[name] = tensor
    if index is not None and (missing := sorted(index.keys() - found.keys())):
        raise SwerveError(
            f"{directory.path}: missing tensor {missing[0]}{_and_more(missing)}, which the index has in "
            f"{index[missing[0]]}"
        )
    return found


def _index(directory: Directory, stem: str, sizes: Mapping[str, int]) -> dict[str, str] | None:
    """File of each tensor, if there is an index."""
    content = _optional(directory, index_name(stem), sizes)
    if content is None:
        return None
    file = f"{directory.path}/{index_name(stem)}"
    where = _json_object(content, file).get("weight_map")
    if not isinstance(where, dict) or not where:
        raise SwerveError(f"{file}: it has no weight_map: copy it again")
    for tensor, own in where.items():
        if not isinstance(own, str) or PurePosixPath(own).name != own:
            raise SwerveError(f"{file}: weight_map has {own!r} for tensor {tensor}, which is no file's name")
    return where


def _optional(directory: Directory, name: str, sizes: Mapping[str, int]) -> bytes | None:
    """A small file, or `None` if there is none; where a server lists nothing, that is found by asking for it."""
    if sizes:
        return directory.read(name) if name in sizes else None
    try:
        return directory.read(name)
    except SwerveError:
        return None
