"""Lists of files with sizes and digests: what is to be fetched, and what `download.json` says is there."""

from __future__ import annotations

import fnmatch
import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from swerve.types import SwerveError

ALGORITHMS = {"sha256": 64, "git_sha1": 40, "md5": 32}
"""Hexadecimal digits of each digest; `git_sha1` is that of a git blob."""
PART = ".part"
"""Ends the name of a file that is not whole yet."""
ETAG = ".part.etag"
"""Ends the name of what the server calls the version that a part is of."""
RECORD = "download.json"
"""Name of a folder's list of its files."""
_READ_BYTES = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class RemoteFile:
    """A file of a list.

    Attributes:
        path: Where it lies, relative to the folder and to the list's base URL.
        size: Bytes.
        algorithm: One of `ALGORITHMS`.
        digest: Lower-case hexadecimal.
    """

    path: str
    size: int
    algorithm: str
    digest: str

    def hasher(self) -> Any:
        """What the file's bytes are fed to; its `hexdigest()` must end as `digest`."""
        if self.algorithm == "git_sha1":
            return hashlib.sha1(b"blob %d\0" % self.size, usedforsecurity=False)
        return hashlib.new(self.algorithm, usedforsecurity=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Listing:
    """What a source holds at one revision.

    Attributes:
        source: `models/ORG/NAME`, `datasets/ORG/NAME`, or `manifest`.
        revision: Full hash of the commit, or SHA-256 of the manifest.
        base_url: What stands before each file's quoted path; ends with a slash.
        files: All of them, sorted by path.
    """

    source: str
    revision: str
    base_url: str
    files: tuple[RemoteFile, ...]

    @property
    def num_bytes(self) -> int:
        """Of all files together."""
        return sum(file.size for file in self.files)

    def url(self, file: RemoteFile) -> str:
        """Where a file is fetched from."""
        return self.base_url + quote(file.path)

    def only(self, globs: Sequence[str]) -> Listing:
        """The files whose path one of the globs matches; all where there is none.

        Raises:
            SwerveError: A glob matches nothing.
        """
        for glob in globs:
            if not any(fnmatch.fnmatchcase(file.path, glob) for file in self.files):
                some = ", ".join(file.path for file in self.files[:5])
                raise SwerveError(
                    f"--include {glob}: matches none of the {len(self.files)} files of {self.source}: {some}"
                )
        if not globs:
            return self
        return replace(
            self, files=tuple(f for f in self.files if any(fnmatch.fnmatchcase(f.path, glob) for glob in globs))
        )


def file_to_json(file: RemoteFile) -> dict[str, object]:
    """As `download.json` and manifests have it."""
    return {"path": file.path, "size": file.size, file.algorithm: file.digest}


def files_from_json(entries: object, where: str) -> tuple[RemoteFile, ...]:
    """The files of a manifest or a `download.json`, sorted by path.

    Args:
        entries: JSON: objects with `path`, `size`, and one of `ALGORITHMS` or more, of which the first counts.
        where: Names the list in errors.

    Raises:
        SwerveError: They are of another form, or unsafe.
    """
    if not isinstance(entries, list):
        raise SwerveError(f"{where}: key files: expected a list of objects with path, size and sha256")
    files: list[RemoteFile] = []
    for number, entry in enumerate(entries):
        at = f"{where}: files[{number}]"
        if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
            raise SwerveError(f"{at}: expected an object with path, size and sha256")
        algorithm = next((name for name in ALGORITHMS if name in entry), None)
        if algorithm is None:
            raise SwerveError(f"{at}: {entry['path']}: no digest: one of {', '.join(ALGORITHMS)} is needed")
        if type(entry.get("size")) is not int or entry["size"] < 0:
            raise SwerveError(f"{at}: {entry['path']}: key size: expected a number of bytes")
        digest = str(entry[algorithm]).lower()
        files.append(RemoteFile(path=entry["path"], size=entry["size"], algorithm=algorithm, digest=digest))
    return checked(files, where)


def checked(files: Sequence[RemoteFile], where: str) -> tuple[RemoteFile, ...]:
    """The files, sorted by path, if every one may be written into a folder and can be checked.

    Raises:
        SwerveError: A path leads out of the folder, is one of ours or comes twice, or a digest is none.
    """
    seen: set[str] = set()
    for file in files:
        if fault := _path_fault(file.path):
            raise SwerveError(f"{where}: path {file.path!r}: {fault}: nothing was fetched")
        if file.path in seen:
            raise SwerveError(f"{where}: path {file.path!r}: comes twice: nothing was fetched")
        if not re.fullmatch(rf"[0-9a-f]{{{ALGORITHMS[file.algorithm]}}}", file.digest):
            raise SwerveError(f"{where}: {file.path}: {file.digest!r} is no {file.algorithm}: nothing was fetched")
        seen.add(file.path)
    if not seen:
        raise SwerveError(f"{where}: lists no file")
    return tuple(sorted(files, key=lambda file: file.path))


def _path_fault(path: str) -> str:
    parts = path.split("/")
    if path.startswith("/"):
        return "is absolute"
    if {"", ".", ".."} & set(parts):
        return "leads out of the folder, or is not in its shortest form"
    if "\\" in path or not path.isprintable():
        return "holds a backslash or characters that cannot be printed"
    if path == RECORD or parts[-1].endswith((PART, ETAG)):
        return "is a name that downloads use themselves"
    return ""


def fault_of(path: Path, file: RemoteFile, count: Callable[[int], None] = lambda _: None) -> str:
    """What is wrong with a local file: empty if its size and digest are right.

    Args:
        path: The file.
        file: What it should be.
        count: Told of bytes as they are read.
    """
    try:
        size = path.stat().st_size
        if size != file.size:
            return f"{path}: has {size} bytes, expected {file.size}"
        hasher = file.hasher()
        with path.open("rb", buffering=0) as stream:
            while data := stream.read(_READ_BYTES):
                hasher.update(data)
                count(len(data))
    except FileNotFoundError:
        return f"{path}: missing"
    except OSError as error:
        return f"{path}: cannot be read: {error.strerror}"
    return mismatch(str(path), file, hasher.hexdigest())


def mismatch(name: str, file: RemoteFile, found: str) -> str:
    """The sentence about two digests that differ; empty if they do not."""
    return "" if found == file.digest else f"{name}: {file.algorithm} is {found}, expected {file.digest}"
