"""From one layout to another, every bit kept, in the memory of one tensor.

    DST/conversion.json   what is being made of what; removed at the end
        files of tensors  each whole or absent; those already there are kept when the same conversion is run again
        index, tokenizer, config.json, and for our own layouts manifest.json

An interrupted conversion has no `config.json`, so nothing takes it for a model.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swerve.checkpoint import Buffer, Directory, Location, open_directory, write_file
from swerve.checkpoint.files import FORMAT, MANIFEST
from swerve.checkpoint.tensor_files import DTYPE_NAMES, file_order, header_bytes
from swerve.models.hf.layout import Experts, Layout, hf_layout, native_layout, renamed
from swerve.models.hf.reader import NATIVE_STEM, Form, ModelFiles
from swerve.models.hf.source import Source
from swerve.models.hf.writer import (
    CONFIG_FILE,
    MAX_SHARD_BYTES,
    STEM,
    PlannedFile,
    config_json,
    index_json,
    index_name,
    plan_files,
    write_planned,
)
from swerve.types import MachineError, SwerveError

_PLAN = "conversion.json"
_COMPANIONS = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "special_tokens_map.json"),
    *("added_tokens.json", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
"""Small files beside the tensors that go along."""
_TORN = re.compile(r"\..*\.\d+\.tmp")
_BLOCK_BYTES = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What a conversion has made.

    Attributes:
        files: Files of tensors.
        tensors: Tensors in them.
        num_bytes: Bytes of the tensors.
        kept: Files that an earlier, interrupted conversion had made.
    """

    files: int
    tensors: int
    num_bytes: int
    kept: int


def convert(
    source: ModelFiles,
    target: Location,
    *,
    to: Form = "hf",
    experts: Experts | None = None,
    prefix: str | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Conversion:
    """Write a model's files anew in another layout, tensors in the types they have.

    Args:
        source: What to convert, from `open_model`.
        target: Directory or URL; empty, not there, or what the same conversion left when it was interrupted.
        to: `hf`, `transformers`' layout; `scanned` or `unscanned`, ours.
        experts: For `hf`: `fused` or `each`; as the published files had it by default.
        prefix: For `hf`: what stands before the names; as the published files had it by default.
        max_shard_bytes: Most data that a file holds, unless a single tensor has more.
        progress: Is told the bytes done, and of how many, as they are written.

    Returns:
        What was made.

    Raises:
        SwerveError: The source does not fit its configuration, or the target holds something else.
        MachineError: The files cannot be written.
    """
    experts, prefix = experts or source.experts, source.prefix if prefix is None else prefix
    leaves = source.source()
    layout = _target_layout(source, to, experts, prefix)
    dtypes = {name: DTYPE_NAMES[leaves.dtype([link.leaf for link in tensor.links])] for name, tensor in layout.items()}
    stem = STEM if to == "hf" else NATIVE_STEM
    files = plan_files(stem, layout, dtypes, max_shard_bytes)
    directory = open_directory(target)
    kept = _begin(directory, source, files)
    _check_space(target, sum(file.num_bytes for file in files if file.name not in kept))
    described = _write_files(directory, files, leaves, kept, hashed=to != "hf", progress=progress)
    if len(files) > 1:
        write_file(directory, index_name(stem), index_json(files))
    _finish(directory, source, to, experts, prefix, described)
    return Conversion(
        files=len(files),
        tensors=len(layout),
        num_bytes=sum(file.num_bytes for file in files),
        kept=len(kept),
    )


def _target_layout(source: ModelFiles, to: Form, experts: Experts, prefix: str) -> Layout:
    if to != "hf":
        return native_layout(source.config, scanned=to == "scanned")
    return renamed(hf_layout(source.config, experts), prefix)


def _write_files(
    directory: Directory,
    files: list[PlannedFile],
    leaves: Source,
    kept: set[str],
    *,
    hashed: bool,
    progress: Callable[[int, int], None],
) -> dict[str, dict[str, Any]]:
    """Write those that are not there yet; the size and digest of each, as a manifest has them, if they are `hashed`."""
    total = sum(map(_num_bytes, files))
    done = 0
    described: dict[str, dict[str, Any]] = {}
    for file in files:
        content = hashlib.sha256()

        def wrote(data: Buffer, content: Any = content) -> None:
            nonlocal done
            done += len(data)
            progress(done, total)
            if hashed:
                content.update(data)

        if file.name not in kept:
            write_planned(directory, file, leaves, wrote)
        elif hashed:
            for block in _blocks(directory, file.name, _num_bytes(file)):
                wrote(block)
        else:
            done += _num_bytes(file)
        described[file.name] = {"bytes": _num_bytes(file), "sha256": content.hexdigest()}
    return described


def _num_bytes(file: PlannedFile) -> int:
    """Bytes of the whole file."""
    return len(header_bytes(file_order(file.tensors))) + file.num_bytes


def _blocks(directory: Directory, name: str, size: int) -> Iterable[bytearray]:
    for start in range(0, size, _BLOCK_BYTES):
        block = bytearray(min(_BLOCK_BYTES, size - start))
        directory.read_into(name, start, memoryview(block))
        yield block


# -------------------------------------------------------------------------------------------------- begin and finish


def _begin(directory: Directory, source: ModelFiles, files: list[PlannedFile]) -> set[str]:
    """Claim the target; which files of an earlier try of the same conversion are whole and may stay."""
    plan = {"source": source.directory.path, "digest": _digest(source, files)}
    present = directory.sizes()
    if not present:
        write_file(directory, _PLAN, json.dumps(plan, indent=2) + "\n")
        return set()
    if _PLAN not in present:
        raise SwerveError(f"{directory.path}: not empty (it holds {min(present)}): name a place that is")
    try:
        found = json.loads(directory.read(_PLAN))
    except ValueError:
        found = None
    if found != plan:
        raise SwerveError(
            f"{directory.path}: holds an unfinished conversion of something else (see its {_PLAN}): remove it, or "
            "name another place"
        )
    for name in filter(_TORN.fullmatch, present):  # what a writer that was killed has left
        directory.remove(name)
    return {file.name for file in files if present.get(file.name) == _num_bytes(file)}


def _digest(source: ModelFiles, files: list[PlannedFile]) -> str:
    """Identity of what is read and of what is to be written."""
    content = hashlib.sha256(source.raw_config)
    for name, size in source.sizes.items():
        content.update(f"{name} {size} {source.directory.stamp(name)}\n".encode())
    for file in files:
        content.update(file.name.encode() + header_bytes(file_order(file.tensors)))
    return content.hexdigest()


def _finish(
    directory: Directory,
    source: ModelFiles,
    to: Form,
    experts: Experts,
    prefix: str,
    described: dict[str, dict[str, Any]],
) -> None:
    """Write what makes the files a model."""
    beside = source.directory.sizes()
    for name in (name for name in _COMPANIONS if name in beside):
        write_file(directory, name, source.directory.read(name))
    config = source.raw_config
    if to == "hf" and prefix != source.prefix:  # another class of `transformers`, which wants another configuration
        config = config_json(source.config, str(json.loads(config).get("dtype", "bfloat16"))).encode()
    if to != "hf":
        manifest = {"format": FORMAT, "layout": to, "experts": experts, "prefix": prefix, "files": described}
        write_file(directory, MANIFEST, json.dumps(manifest, indent=1) + "\n")
    write_file(directory, CONFIG_FILE, config)
    directory.remove(_PLAN)


def _check_space(target: Location, wanted: int) -> None:
    """Refuse what a local disk cannot take, before hours are spent on it."""
    path = Path(target)
    while not path.exists() and path != path.parent:
        path = path.parent
    if "://" in str(target) or not path.exists():
        return
    free = shutil.disk_usage(path).free
    if free < wanted:
        raise MachineError(
            f"{target}: {wanted / 1e9:,.1f} GB are to be written, {free / 1e9:,.1f} GB are free: free some space, "
            "or choose another place"
        )
