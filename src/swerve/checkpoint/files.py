"""Directories that appear whole or not at all, and the manifest that says what whole is.

    <name>.tmp-<pid>/  files are written and forced to disk, the manifest last
        rename         -> <name>/

A crash leaves either the old state or a temporary directory, which the next writer removes.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from swerve.telemetry import file_digest, force_to_disk, machine_faults, write_atomic
from swerve.types import SwerveError

MANIFEST = "manifest.json"
FORMAT = 1
"""Version of the layout."""
_TEMPORARY = ".tmp-"


class CheckpointError(SwerveError):
    """A checkpoint cannot be used; the message says why and what to do."""


class TornCheckpointError(CheckpointError):
    """A checkpoint is not what its writer meant: a file is missing, short or altered."""


def write_directory(target: Path, write: Callable[[Path], None], facts: Mapping[str, Any]) -> None:
    """Make a directory with a manifest appear at once.

    Args:
        target: Its path; what was there before is replaced.
        write: Writes the files into the directory it is given.
        facts: JSON values for the manifest.

    Raises:
        MachineError: The disk is full or cannot be written; nothing half-written is left.
    """
    temporary = target.with_name(f"{target.name}{_TEMPORARY}{os.getpid()}")
    try:
        with machine_faults(target):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            write(temporary)
            files = {path.relative_to(temporary).as_posix(): path for path in temporary.rglob("*") if path.is_file()}
            described = {
                name: {"bytes": path.stat().st_size, "sha256": file_digest(path)} for name, path in files.items()
            }
            for path in files.values():
                force_to_disk(path)
            manifest = {"format": FORMAT, **facts, "files": dict(sorted(described.items()))}
            write_atomic(temporary / MANIFEST, json.dumps(manifest, indent=1, allow_nan=False).encode())
            _replace(temporary, target)
            force_to_disk(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_manifest(directory: Path) -> dict[str, Any]:
    """Return a directory's manifest.

    Raises:
        TornCheckpointError: There is none, or it cannot be read.
    """
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise TornCheckpointError(f"{path}: not readable ({error}): {_REMEDY}") from error
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), dict):
        raise TornCheckpointError(f"{path}: not the manifest of a checkpoint: {_REMEDY}")
    if manifest.get("format") != FORMAT:
        raise CheckpointError(f"{path}: layout {manifest.get('format')} is not {FORMAT}: use the Swerve that wrote it")
    return manifest


def read_verified(directory: Path, name: str, manifest: Mapping[str, Any]) -> bytes:
    """Return a file's content if it is what the manifest says.

    Raises:
        TornCheckpointError: The file is missing, short or altered.
    """
    path = directory / name
    described = manifest["files"].get(name)
    if described is None:
        raise TornCheckpointError(f"{path}: the manifest does not list it: {_REMEDY}")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TornCheckpointError(f"{path}: {error.strerror}: {_REMEDY}") from error
    if len(content) != described["bytes"]:
        raise TornCheckpointError(f"{path}: {len(content)} of {described['bytes']} bytes: {_REMEDY}")
    if hashlib.sha256(content).hexdigest() != described["sha256"]:
        raise TornCheckpointError(f"{path}: the content has another SHA-256 than when it was written: {_REMEDY}")
    return content


def remove_leftovers(directory: Path) -> None:
    """Remove what writers that were killed have left."""
    for path in directory.glob(f"*{_TEMPORARY}*"):
        shutil.rmtree(path, ignore_errors=True)


_REMEDY = "resume from an earlier checkpoint of the run, or delete this one"


def _replace(temporary: Path, target: Path) -> None:
    if not target.exists():
        temporary.rename(target)
        return
    old = target.with_name(f"{target.name}{_TEMPORARY}old-{os.getpid()}")
    target.rename(old)
    temporary.rename(target)
    shutil.rmtree(old, ignore_errors=True)
