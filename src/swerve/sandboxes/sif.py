"""SIF, the image files of Apptainer and Singularity: found, read, written and unpacked without either of them.

    0      128-byte header: magic, versions, and where the descriptors are
    4096   descriptors of 585 bytes; the one of type 0x4004 is the system partition
    ...    data; that of the system partition is a squashfs

A SIF is unpacked once, into the user's cache, under a name made of its path, size and time.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import struct
import subprocess
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swerve.config import cache_directory
from swerve.sandboxes.plan import UNPRIVILEGED_ID, gives_root_away
from swerve.sandboxes.protocol import SandboxImage
from swerve.types import MachineError, SwerveError

_HEADER = struct.Struct("<32s10s3s3s16s8q")
_DESCRIPTOR = struct.Struct("<i?IIIqqqqqqq128s384s")
_DESCRIPTORS_AT, _NUM_DESCRIPTORS = 4096, 48
_SYSTEM_PARTITION = 0x4004
_SQUASHFS, _PRIMARY = 1, 2
_ARCHITECTURES = {"x86_64": b"02", "aarch64": b"04", "ppc64le": b"07", "riscv64": b"12"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemPartition:
    """Where a SIF file keeps its root file system.

    Attributes:
        offset: First byte of the squashfs.
        size: Its bytes.
    """

    offset: int
    size: int


def find_sif(directory: Path, name: str) -> Path | None:
    """The SIF file of an image, `<directory>/r2egym/<name>.sif` or `<directory>/<name>.sif`, if there is one."""
    candidates = (directory / "r2egym" / f"{name}.sif", directory / f"{name}.sif")
    return next((path for path in candidates if path.is_file()), None)


def find_directory(directory: Path, name: str) -> Path | None:
    """The unpacked root of an image, `<directory>/r2egym/<name>` or `<directory>/<name>`, if there is one."""
    candidates = (directory / "r2egym" / name, directory / name)
    return next((path for path in candidates if path.is_dir()), None)


def read_sif(path: Path) -> SystemPartition:
    """Find the system partition of a SIF file.

    Raises:
        SwerveError: It is no SIF file, is cut short, or has no squashfs to run.
    """
    try:
        with path.open("rb") as file:
            header = _HEADER.unpack(file.read(_HEADER.size))
            total, offset, length = header[8], header[9], header[10]
            if not header[1].startswith(b"SIF_MAGIC") or length != total * _DESCRIPTOR.size:
                raise SwerveError(f"{path}: is no SIF file of a known version")
            file.seek(offset)
            table = file.read(length)
            size = path.stat().st_size
    except OSError as error:
        raise SwerveError(f"{path}: cannot be read: {error.strerror}") from None
    except struct.error:
        raise SwerveError(f"{path}: is no SIF file") from None
    for position in range(0, len(table) - _DESCRIPTOR.size + 1, _DESCRIPTOR.size):
        fields = _DESCRIPTOR.unpack_from(table, position)
        kind, used, start, extent, extra = fields[0], fields[1], fields[5], fields[6], fields[13]
        if used and kind == _SYSTEM_PARTITION and struct.unpack_from("<ii", extra) == (_SQUASHFS, _PRIMARY):
            if start + extent > size:
                raise SwerveError(f"{path}: is cut short: fetch or build it again")
            return SystemPartition(offset=start, size=extent)
    raise SwerveError(f"{path}: holds no squashfs to run")


def write_sif(path: Path, squashfs: Path) -> None:
    """Wrap a squashfs as a SIF file that Apptainer runs; whole or absent.

    Raises:
        MachineError: It cannot be written.
    """
    now, size = int(time.time()), squashfs.stat().st_size
    table_end = _DESCRIPTORS_AT + _NUM_DESCRIPTORS * _DESCRIPTOR.size
    offset = -(-table_end // 4096) * 4096
    architecture = _ARCHITECTURES.get(os.uname().machine, b"00")
    extra = struct.pack("<ii", _SQUASHFS, _PRIMARY) + architecture + b"\0"
    descriptor = _DESCRIPTOR.pack(
        _SYSTEM_PARTITION, True, 1, 0xF0000001, 0, offset, size, offset - table_end + size, now, now, 0, 0, b"", extra
    )
    header = _HEADER.pack(
        b"#!/usr/bin/env run-singularity\n",
        b"SIF_MAGIC",
        b"01",
        architecture,
        uuid.uuid4().bytes,
        *(now, now, _NUM_DESCRIPTORS - 1, _NUM_DESCRIPTORS, _DESCRIPTORS_AT, table_end - _DESCRIPTORS_AT),
        *(table_end, offset - table_end + size),
    )
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file, squashfs.open("rb") as source:
            file.write(header.ljust(_DESCRIPTORS_AT, b"\0") + descriptor)
            file.seek(offset)
            shutil.copyfileobj(source, file, 1 << 20)
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise MachineError(f"{path}: cannot be written: {error.strerror}") from None


def unpacked_sif(path: Path) -> Path:
    """The root file system of a SIF file as a directory that belongs to whoever sandboxes run as.

    Raises:
        SwerveError: It is no SIF file.
        MachineError: It cannot be unpacked here.
    """
    part = read_sif(path)
    information = path.stat()
    identity = f"{path.resolve()} {information.st_size} {information.st_mtime_ns}"
    base = _roots_directory()
    target = base / hashlib.sha256(identity.encode()).hexdigest()[:32]
    if target.is_dir():
        return target
    program = shutil.which("unsquashfs")
    if program is None:
        raise MachineError(f"{path}: needs `unsquashfs` to be unpacked: install your system's package squashfs-tools")
    temporary = base / f".{target.name}.{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    with path.open("rb") as file:
        command = [
            program,
            "-no-xattrs",
            "-quiet",
            "-no-progress",
            "-offset",
            str(part.offset),
            "-dest",
            temporary.name,
        ]
        done = subprocess.run(
            [*command, "-excludes", f"/proc/self/fd/{file.fileno()}", "dev/*"],  # an ordinary user makes no devices
            pass_fds=(file.fileno(),),
            capture_output=True,
            text=True,
            check=False,
            cwd=base,
            **_identity(),
        )
    if done.returncode != 0:
        shutil.rmtree(temporary, ignore_errors=True)
        raise MachineError(f"{path}: cannot be unpacked into {base}: {' '.join(done.stderr.split())[:300]}")
    for name in ("proc", "dev", "run", "tmp"):
        (temporary / name).mkdir(exist_ok=True)
    temporary.chmod(0o755)
    temporary.rename(target)
    return target


def _identity() -> dict[str, Any]:
    return {"user": UNPRIVILEGED_ID, "group": UNPRIVILEGED_ID, "extra_groups": []} if gives_root_away() else {}


def _roots_directory() -> Path:
    """Where unpacked roots are; sandboxes reach them by their descriptors, so it may lie in a private folder."""
    base = cache_directory() / "roots"
    try:
        base.mkdir(parents=True, exist_ok=True)
        if gives_root_away():
            os.chown(base, UNPRIVILEGED_ID, UNPRIVILEGED_ID)
    except OSError as error:
        raise MachineError(f"{base}: cannot be made: {error.strerror}") from None
    return base


def root_of(image: SandboxImage, images: str, *, needs_one: bool = False, mounted: bool = False) -> Path | None:
    """The root file system of an image.

    Args:
        image: Its `root` may name a SIF file or a directory.
        images: Directory of SIF files or of directories; searched for the image's name, then for `default`, where
            `root` is empty.
        needs_one: Finding none is a fault.
        mounted: A SIF file is returned as it is, for someone who mounts it; else it is unpacked.

    Returns:
        A directory or a SIF file; `None` for the machine's own system.

    Raises:
        SwerveError: There is none, or it is no SIF file.
        MachineError: It cannot be unpacked here.
    """
    path = Path(image.root) if image.root else None
    if path is None and images:
        for name in (image.name, "default"):
            path = path or find_sif(Path(images), name) or find_directory(Path(images), name)
    if path is None:
        if not needs_one and not images:
            return None
        where = f"{images}: holds no {image.name}.sif" if images else "sandbox.images names no directory of SIF files"
        raise SwerveError(f"sandbox image {image.name}: {where}: build or copy it there")
    if path.is_dir():
        return path
    if mounted:
        read_sif(path)
        return path
    return unpacked_sif(path)
