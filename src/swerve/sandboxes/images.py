"""Builds SIF files of Docker archives and directories, one after the other, and remembers what each was made of.

    DIR/images.json          name -> source, Docker's digest of it, SIF file, bytes, SHA-256
    DIR/<name>.sif           whole or absent
    DIR/.build-<pid>-*       of the image being built; those of killed builders are swept

An image that is finished, and whose file is still what it was, is skipped.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from swerve.sandboxes.docker_archive import read_archive, unpack_archive
from swerve.sandboxes.sif import write_sif
from swerve.telemetry import file_digest, machine_faults, write_atomic
from swerve.types import MachineError, SwerveError

MANIFEST = "images.json"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")
_ARCHIVE_SUFFIX = re.compile(r"\.(tar|tar\.gz|tgz|docker\.tar|oci\.tar)$")
_COMPRESSION = ("-comp", "zstd", "-Xcompression-level", "3")
_OF_THE_KERNEL = ("dev/*", "proc/*", "sys/*")
"""What a running system fills, device nodes above all, which an ordinary user cannot unpack."""
_OPTIONS = ("-noappend", "-all-root", "-no-xattrs", "-quiet", "-no-progress")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """What an image is to be built of.

    Attributes:
        name: Of the image; its file is `<name>.sif`.
        path: A Docker archive, or a directory.
        image_id: Docker's digest that the archive must have; empty for any.
    """

    name: str
    path: Path
    image_id: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class BuiltImage:
    """What a manifest knows of an image.

    Attributes:
        source: Path that it was built of.
        image_id: Docker's digest of that; empty for a directory.
        sif: Its file, relative to the manifest.
        bytes: Size of that file.
        sha256: Digest of that file.
    """

    source: str
    image_id: str
    sif: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How it went with one image.

    Attributes:
        name: Of the image.
        status: `built`, `skipped` (it was there) or `failed`; when verifying, `ok`, `missing` or `differs`.
        detail: What is wrong, or empty.
    """

    name: str
    status: str
    detail: str = ""


def sources_of(paths: list[Path], names: list[str]) -> list[Source]:
    """What the words of a command line mean.

    Args:
        paths: Archives, directories and manifests (`.json`), in any mixture.
        names: One for each path, none of which is then a manifest; or empty, to name images after their files.

    Raises:
        SwerveError: A name cannot be a file's, occurs twice, or there are too few.
    """
    if names and (len(names) != len(paths) or any(path.suffix == ".json" for path in paths)):
        raise SwerveError(f"--name: {len(names)} for {len(paths)} sources: give one for each archive or directory")
    sources: list[Source] = []
    for index, path in enumerate(paths):
        if path.suffix == ".json":
            for name, entry in _entries(path).items():
                source = path.parent / entry.get("source", "")
                sources.append(Source(name=name, path=source, image_id=entry.get("image_id", "")))
        else:
            name = names[index] if names else _ARCHIVE_SUFFIX.sub("", path.resolve().name)
            sources.append(Source(name=name, path=path))
    seen: set[str] = set()
    for source in sources:
        if not _NAME.fullmatch(source.name):
            raise SwerveError(f"{source.path}: '{source.name}' cannot name an image: use --name")
        if source.name in seen:
            raise SwerveError(f"{source.path}: the image name {source.name} occurs twice: use --name")
        seen.add(source.name)
    return sources


def build_images(sources: list[Source], directory: Path, tell: Callable[[str], None]) -> list[Outcome]:
    """Build what is missing; a source at fault is reported, and the rest goes on.

    Args:
        sources: What to build.
        directory: Where the SIF files and their manifest go.
        tell: Told of progress, line by line.

    Returns:
        How it went, in the order of the sources.

    Raises:
        SwerveError: The manifest is malformed.
        MachineError: There is no mksquashfs, or the directory cannot be written.
    """
    program = shutil.which("mksquashfs")
    if program is None:
        raise MachineError("building SIF files needs `mksquashfs`: install your system's package squashfs-tools")
    with machine_faults(directory):
        directory.mkdir(parents=True, exist_ok=True)
    _sweep(directory)
    outcomes = []
    for number, source in enumerate(sources, 1):
        progress = f"{number}/{len(sources)} {source.name}"
        try:
            outcome = _build_one(source, directory, program, lambda step, at=progress: tell(f"{at}: {step}"))
        except (SwerveError, OSError) as fault:
            outcome = Outcome(name=source.name, status="failed", detail=str(fault))
        tell(f"{progress}: {outcome.status}{': ' if outcome.detail else ''}{outcome.detail}")
        outcomes.append(outcome)
    return outcomes


def verify_images(directory: Path) -> list[Outcome]:
    """Hold every image of a directory's manifest against its digest.

    Raises:
        SwerveError: There is no manifest, or it is malformed.
    """
    outcomes = []
    for name, image in read_manifest(directory).items():
        fault = _fault(directory, image)
        path = directory / image.sif
        status = "ok" if not fault else "differs" if path.is_file() else "missing"
        outcomes.append(Outcome(name=name, status=status, detail=fault))
    return outcomes


def read_manifest(directory: Path) -> dict[str, BuiltImage]:
    """The images of a directory by name.

    Raises:
        SwerveError: There is no manifest, or a key of it is at fault.
    """
    path = directory / MANIFEST
    images = {}
    for name, entry in _entries(path).items():
        for field in fields(BuiltImage):
            if type(entry.get(field.name)).__name__ != field.type:
                raise SwerveError(f"{path}: key images.{name}.{field.name}: missing or not of type {field.type}")
        images[name] = BuiltImage(**entry)
    return images


def _entries(path: Path) -> dict[str, dict[str, Any]]:
    """The images of a manifest file, their keys known ones."""
    try:
        images = json.loads(path.read_text("utf-8"))["images"]
    except FileNotFoundError:
        raise SwerveError(f"{path}: no such manifest of images") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SwerveError(f"{path}: no manifest with a key images: {error}") from None
    known = {field.name for field in fields(BuiltImage)}
    for name, entry in images.items() if isinstance(images, dict) else [("", images)]:
        if not isinstance(entry, dict) or not isinstance(entry.get("source"), str):
            raise SwerveError(f"{path}: key images.{name}: expected an object with a source")
        if unknown := sorted(set(entry) - known):
            raise SwerveError(f"{path}: key images.{name}.{unknown[0]}: unknown; known are {', '.join(sorted(known))}")
    return images


def _build_one(source: Source, directory: Path, program: str, tell: Callable[[str], None]) -> Outcome:
    if not source.path.exists():
        raise SwerveError(f"{source.path}: no such archive or directory")
    image_id = "" if source.path.is_dir() else read_archive(source.path).image_id
    if source.image_id and source.image_id != image_id:
        raise SwerveError(f"{source.path}: is image {image_id or 'of a directory'}, expected {source.image_id}")
    known = read_manifest(directory) if (directory / MANIFEST).exists() else {}
    found, path = known.get(source.name), str(source.path.resolve())
    if found is not None and (found.source, found.image_id) == (path, image_id) and not _fault(directory, found):
        return Outcome(name=source.name, status="skipped")
    target = directory / f"{source.name}.sif"
    with _scratch(directory) as scratch:
        root = source.path
        if image_id:
            tell("unpacking layers")
            root = scratch / "root"
            root.mkdir()
            unpack_archive(source.path, root)
        tell("compressing")
        squashfs = scratch / "squashfs"
        command = [program, str(root), str(squashfs), *_OPTIONS, *_COMPRESSION, "-wildcards", "-e", *_OF_THE_KERNEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise MachineError(f"{source.path}: mksquashfs: {' '.join((done.stderr or done.stdout).split())[:300]}")
        shutil.rmtree(scratch / "root", ignore_errors=True)
        write_sif(scratch / "sif", squashfs)
        image = BuiltImage(
            source=path,
            image_id=image_id,
            sif=target.name,
            bytes=(scratch / "sif").stat().st_size,
            sha256=file_digest(scratch / "sif"),
        )
        (scratch / "sif").replace(target)
    _write_manifest(directory, known | {source.name: image})
    return Outcome(name=source.name, status="built")


def _fault(directory: Path, image: BuiltImage) -> str:
    """What is wrong with an image's file; empty if nothing."""
    path = directory / image.sif
    try:
        size = path.stat().st_size
        if size != image.bytes:
            return f"{path}: bytes is {size}, expected {image.bytes}"
        digest = file_digest(path)
    except OSError as error:
        return f"{path}: {error.strerror}"
    return f"{path}: sha256 is {digest}, expected {image.sha256}" if digest != image.sha256 else ""


def _write_manifest(directory: Path, images: Mapping[str, BuiltImage]) -> None:
    record = {"images": {name: asdict(image) for name, image in sorted(images.items())}}
    write_atomic(directory / MANIFEST, json.dumps(record, indent=2, sort_keys=True) + "\n")


@contextlib.contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    """A directory beside what is built, gone in the end."""
    path = Path(tempfile.mkdtemp(prefix=f".build-{os.getpid()}-", dir=directory))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def _sweep(directory: Path) -> None:
    """Remove what killed builders have left."""
    for path in directory.glob(".build-*-*"):
        pid = path.name.split("-")[1]
        if not Path("/proc", pid).exists():
            shutil.rmtree(path, ignore_errors=True)
