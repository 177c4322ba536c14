"""Directories of files, on this machine or behind a URL: read by byte ranges, written whole.

A path without a scheme, or `file://`, is a local directory and never touches `fsspec`; any other URL (`s3://`, `gs://`,
`hf://`, `https://`, `memory://`) is one of its file systems, with the credentials that these find by themselves.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeAlias, cast
from urllib.parse import unquote, urlsplit

from swerve.telemetry import atomic_file, machine_faults
from swerve.types import MachineError, SwerveError

Location: TypeAlias = "str | Path"
"""A local path, or a URL."""

_REQUEST_BYTES = 1 << 26
"""Most that one request asks a remote file for, so that a copy of an answer stays small."""
_DENIED = re.compile(r"credential|unauthori[sz]ed|forbidden|denied|gated|expired|invalid.?token|\b40[13]\b", re.I)
_NO_LISTING = ("http", "https")


class Directory(Protocol):
    """A flat directory. What is absent or cannot be read is a `SwerveError` that names the file."""

    path: str
    """As errors name it."""

    def sizes(self) -> dict[str, int]:
        """Bytes of each file by name; empty where there is no such directory, or a server that lists none."""
        ...

    def size(self, name: str) -> int:
        """Bytes of a file."""
        ...

    def stamp(self, name: str) -> str:
        """Something that changes when the file does."""
        ...

    def read(self, name: str) -> bytes:
        """A whole small file."""
        ...

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes from `start` on."""
        ...

    def create(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        """A file to write from its beginning to its end; a block that raises leaves none. Folders are made."""
        ...

    def remove(self, name: str) -> None:
        """Delete a file; nothing if there is none."""
        ...


def open_directory(location: Location) -> Directory:
    """The directory at a path or URL, which need not exist.

    Raises:
        SwerveError: The URL's scheme is unknown, or needs a package that is not installed.
    """
    text = str(location)
    scheme = text.partition("://")[0] if "://" in text else ""
    if isinstance(location, Path) or scheme in ("", "file", "local"):
        return _LocalDirectory(Path(unquote(urlsplit(text).path)) if scheme else Path(location))
    return _RemoteDirectory(text, scheme)


def write_file(directory: Directory, name: str, data: bytes | str) -> None:
    """Write a small file, whole or not at all."""
    with directory.create(name) as file:
        file.write(data.encode() if isinstance(data, str) else data)


class _LocalDirectory:
    def __init__(self, path: Path) -> None:
        self.path = str(path)
        self._path = path

    def sizes(self) -> dict[str, int]:
        try:
            return {p.name: p.stat().st_size for p in self._path.iterdir() if p.is_file()}
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except OSError as error:
            raise SwerveError(f"{self._path}: cannot be read: {error.strerror}") from error

    def size(self, name: str) -> int:
        with self._readable(name) as path:
            return path.stat().st_size

    def stamp(self, name: str) -> str:
        with self._readable(name) as path:
            return str(path.stat().st_mtime_ns)

    def read(self, name: str) -> bytes:
        with self._readable(name) as path:
            return path.read_bytes()

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        with self._readable(name) as path, path.open("rb", buffering=0) as file:
            file.seek(start)
            while len(out):
                if not (count := file.readinto(out)):
                    raise SwerveError(f"{path}: damaged: it ends at byte {file.tell()}: copy it again")
                out = out[count:]

    def create(self, name: str) -> contextlib.AbstractContextManager[BinaryIO]:
        return atomic_file(self._path / name)

    def remove(self, name: str) -> None:
        with machine_faults(self._path / name):
            (self._path / name).unlink(missing_ok=True)

    @contextlib.contextmanager
    def _readable(self, name: str) -> Iterator[Path]:
        path = self._path / name
        try:
            yield path
        except OSError as error:
            raise SwerveError(f"{path}: cannot be read: {error.strerror}") from error


class _RemoteDirectory:
    def __init__(self, url: str, scheme: str) -> None:
        import fsspec.core  # here, for local paths do without it
        from fsspec.registry import known_implementations

        self.path = url.rstrip("/")
        self._lists = scheme not in _NO_LISTING
        try:
            self._files, self._root = fsspec.core.url_to_fs(self.path)
        except ImportError as error:
            hint = known_implementations.get(scheme, {}).get("err") or str(error)
            raise SwerveError(f"{url}: {scheme}:// needs a package that is not installed: {hint}") from error
        except ValueError as error:
            raise SwerveError(f"{url}: {_line(error)}: name a local path, or s3://, gs://, hf://, https://") from error
        self._sizes: dict[str, int] = {}

    def sizes(self) -> dict[str, int]:
        with self._faults(self.path):
            self._files.invalidate_cache()
            try:
                entries: list[dict[str, Any]] = self._files.ls(self._root, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            except Exception:
                if self._lists:
                    raise
                return {}
        files = {e["name"].rstrip("/").rsplit("/", 1)[-1]: e for e in entries if e["type"] == "file"}
        self._sizes = {name: int(e["size"]) for name, e in files.items() if e.get("size") is not None}
        return {name: self.size(name) for name in files}

    def size(self, name: str) -> int:
        if name not in self._sizes:
            with self._faults(self._url(name)):
                size = self._files.info(self._at(name)).get("size")
            if size is None:
                raise SwerveError(f"{self._url(name)}: the server does not say how long it is: download it first")
            self._sizes[name] = int(size)
        return self._sizes[name]

    def stamp(self, name: str) -> str:
        with self._faults(self._url(name)):
            return str(self._files.ukey(self._at(name)))

    def read(self, name: str) -> bytes:
        with self._faults(self._url(name)):
            return bytes(self._files.cat_file(self._at(name)))

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        while len(out):
            part, out = out[:_REQUEST_BYTES], out[_REQUEST_BYTES:]
            with self._faults(self._url(name)):
                data = self._files.cat_file(self._at(name), start=start, end=start + len(part))
            if len(data) != len(part):
                raise SwerveError(
                    f"{self._url(name)}: asked for {len(part)} bytes from {start} on, got {len(data)}: the file is "
                    "torn, or its server does not serve byte ranges: download it first"
                )
            part[:] = data
            start += len(part)

    @contextlib.contextmanager
    def create(self, name: str) -> Iterator[BinaryIO]:
        url = self._url(name)
        self._sizes.pop(name, None)
        with self._faults(url, "written"):
            self._files.makedirs(self._root, exist_ok=True)
            file = self._files.open(self._at(name), "wb")
        try:
            yield cast("BinaryIO", _Guarded(file, lambda: self._faults(url, "written")))
            with self._faults(url, "written"):
                file.close()
        except BaseException:
            # Closing completes the file, there is no other way for all of them; then it is taken away.
            with contextlib.suppress(Exception):
                file.close()
            with contextlib.suppress(Exception):
                self._files.rm_file(self._at(name))
            raise

    def remove(self, name: str) -> None:
        self._sizes.pop(name, None)
        with self._faults(self._url(name), "removed"), contextlib.suppress(FileNotFoundError):
            self._files.rm_file(self._at(name))

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _url(self, name: str) -> str:
        return f"{self.path}/{name}"

    @contextlib.contextmanager
    def _faults(self, url: str, done: str = "read") -> Iterator[None]:
        """Turns what a foreign library raises into one line."""
        try:
            yield
        except SwerveError:
            raise
        except FileNotFoundError as error:
            raise SwerveError(f"{url}: cannot be {done}: no such file, or none that you may see") from error
        except Exception as error:
            fault = f"{type(error).__name__}: {_line(error)}"
            if isinstance(error, PermissionError) or _DENIED.search(fault):
                raise SwerveError(
                    f"{url}: access denied ({fault}): log in, or set the credentials that its file system reads"
                ) from error
            raise MachineError(f"{url}: cannot be {done}: {fault}: check the address and the network") from error


class _Guarded:
    """A file whose faults are one line, while those of the block that writes it stay what they are."""

    def __init__(self, file: Any, guard: Callable[[], contextlib.AbstractContextManager[None]]) -> None:
        self._file = file
        self._guard = guard

    def write(self, data: bytes) -> int:
        with self._guard():
            return self._file.write(data)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
