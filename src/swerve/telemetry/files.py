"""Files that are whole or absent: atomic writes, and JSON lines that survive a killed writer."""

import contextlib
import errno
import fcntl
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from swerve.types import MachineError, SwerveError

_REMEDIES = {
    errno.ENOSPC: "free some space, or choose another place",
    errno.EDQUOT: "free some space, or choose another place",
    errno.EFBIG: "raise the limit of file sizes (ulimit -f)",
    errno.EROFS: "choose a place that can be written",
    errno.EACCES: "choose a place that can be written",
    errno.EPERM: "choose a place that can be written",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.EIO: "check the disk",
}


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal; read in pieces."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def machine_faults(path: Path | str) -> Iterator[None]:
    """Turns a fault of the disk into one line that names the file and the remedy.

    Args:
        path: What is being written.

    Raises:
        MachineError: The operating system refused.
    """
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        remedy = _REMEDIES.get(error.errno or 0, "check the disk and the path")
        raise MachineError(f"{path}: cannot be written: {reason}: {remedy}") from error


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """Opens a file for writing that appears under its name, whole and on the disk, when the block ends well.

    Every file that others rely on is written here, with the permissions that the user's umask grants.

    Args:
        path: The file; folders that are missing are made.

    Raises:
        MachineError: It cannot be written; nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with machine_faults(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        force_to_disk(path.parent)


def write_atomic(path: Path, data: bytes | str) -> None:
    """Writes a file so that a reader, or a later run after a crash, sees the old content or the new, never a part.

    Args:
        path: The file; folders that are missing are made.
        data: Content; text is encoded as UTF-8.

    Raises:
        MachineError: It cannot be written; nothing is left behind.
    """
    with atomic_file(path) as file:
        file.write(data.encode() if isinstance(data, str) else data)


def force_to_disk(path: Path) -> None:
    """Forces a file's content, or a folder's entries, to the disk, so that they survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def hold_folder(path: Path) -> Iterator[None]:
    """Keeps a folder for this process alone while the block runs.

    Args:
        path: The folder; it exists.

    Raises:
        SwerveError: Another process holds it.
    """
    with machine_faults(path):
        lock = lock_folder(path)
    try:
        yield
    finally:
        os.close(lock)


def lock_folder(path: Path) -> int:
    """Keeps a folder for this process alone until the descriptor is closed, at the latest when the process ends.

    Args:
        path: The folder; it exists.

    Returns:
        The descriptor.

    Raises:
        SwerveError: Another process holds it.
        OSError: It cannot be opened.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return descriptor
    os.close(descriptor)
    raise SwerveError(f"{path}: another process runs in it: wait for it, or stop it")


def write_json(path: Path, value: Mapping[str, object]) -> None:
    """Writes one JSON document atomically, indented, keys in the order given."""
    write_atomic(path, json.dumps(strict_json(value), indent=2, ensure_ascii=False) + "\n")


def strict_json(value: object) -> object:
    """The value with every non-finite number as text (`nan`, `inf`, `-inf`), for JSON has none."""
    match value:
        case float():
            return value if math.isfinite(value) else str(value)
        case dict():
            return {str(key): strict_json(inner) for key, inner in value.items()}
        case list() | tuple():
            return [strict_json(inner) for inner in value]
        case _:
            return value


def append_whole(descriptor: int, data: bytes) -> None:
    """Adds to a file by one system call; where it takes only a part, the file is left as it was.

    Raises:
        OSError: The disk is full or failed.
    """
    size = os.fstat(descriptor).st_size
    try:
        if os.write(descriptor, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size)
        raise


class LineFile:
    """A file of lines that only grows.

    A line is written by one system call, so a killed process leaves whole lines or, at worst, a torn last one. Opening
    the file again cuts a torn line off. A write that fails leaves the file as it was.
    """

    def __init__(self, path: Path, durable: bool = False) -> None:
        """Opens the file, making it where it is missing.

        Args:
            path: The file; its folder exists.
            durable: Force every line to the disk before it counts as written.

        Raises:
            MachineError: It cannot be opened.
        """
        self.path = path
        self._durable = durable
        with machine_faults(path):
            _cut_torn_line(path)
            self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def append_line(self, line: str) -> None:
        """Adds one line.

        Args:
            line: Text without a line break.

        Raises:
            MachineError: The disk is full or failed; the file holds what it held before.
        """
        with machine_faults(self.path):
            append_whole(self._descriptor, line.encode() + b"\n")
            if self._durable:
                os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Closes the file; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        """The file itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the file."""
        self.close()


class JsonLines(LineFile):
    """A file of JSON objects, one a line."""

    def append(self, record: Mapping[str, object]) -> None:
        """Adds one line.

        Args:
            record: JSON values; non-finite numbers become text.

        Raises:
            MachineError: The disk is full or failed; the file holds what it held before.
        """
        self.append_line(
            json.dumps(strict_json(dict(record)), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        )


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Reads the records of a JSON-lines file; a torn last line is left out.

    Args:
        path: The file; a missing one has no records.

    Yields:
        One object a line, in order.

    Raises:
        SwerveError: A line other than a torn last one is no JSON object.
    """
    if not path.exists():
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            try:
                record = json.loads(line)
            except ValueError:
                record = None
            if not isinstance(record, dict):
                raise SwerveError(f"{path}: line {number} is not a JSON object: restore the file, or remove the line")
            yield record


def keep_json_lines(path: Path, keep: Callable[[dict[str, Any]], bool]) -> int:
    """Drops records from a JSON-lines file, atomically.

    Args:
        path: The file; a missing one is left missing.
        keep: Which records stay.

    Returns:
        How many records were dropped.
    """
    if not path.exists():
        return 0
    lines: list[bytes] = []
    dropped = 0
    with path.open("rb") as file:
        for line, record in zip(file, read_json_lines(path), strict=False):
            if keep(record):
                lines.append(line)
            else:
                dropped += 1
    if dropped:
        write_atomic(path, b"".join(lines))
    return dropped


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("rb+") as file:
        end = file.seek(0, os.SEEK_END)
        position = end
        while position > 0:
            start = max(0, position - 65_536)
            file.seek(start)
            newline = file.read(position - start).rfind(b"\n")
            if newline >= 0:
                position = start + newline + 1
                break
            position = start
        if position < end:
            file.truncate(position)
