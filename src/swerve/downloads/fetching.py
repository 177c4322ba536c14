"""One file from a server to its place, through a part that outlives whatever interrupts it.

<path>.part        the bytes so far, only ever appended to
<path>.part.etag   what the server called the version they are of
<path>             the whole file, once its size and digest are right and it is on the disk
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from swerve.downloads.listing import ETAG, PART, RemoteFile, mismatch
from swerve.downloads.web import PassingFault, Patience, RangeRefused, Stopped, Web
from swerve.telemetry import force_to_disk, machine_faults, write_atomic
from swerve.types import SwerveError

_CHUNK_BYTES = 1 << 20


def fetch(web: Web, url: str, file: RemoteFile, target: Path, count: Callable[[int], None]) -> int:
    """Bring a file to its place.

    Args:
        web: Makes the requests.
        url: Where it is.
        file: What it must be.
        target: Its place; what an earlier try left beside it is gone on with.
        count: Told of bytes as they are reckoned in, those of an earlier try too; of fewer where it starts over.

    Returns:
        Bytes that came over the network.

    Raises:
        SwerveError: It is another file than the list says; the part is removed. Or the server refuses.
        MachineError: The network or the disk does not let it.
        Stopped: Another file failed.
    """
    with _Part(target, file, count) as part:
        for last in (False, True):
            in_pieces = part.size > 0
            _complete(web, url, part)
            found = part.hexdigest()
            if found == file.digest:
                part.put_in_place()
                break
            in_pieces = in_pieces or part.joined
            part.start_over()
            if last or not in_pieces:
                part.remove()
                raise SwerveError(
                    f"{mismatch(file.path, file, found)}: removed: fetch it again, or from elsewhere ({url})"
                )
            web.say(f"{file.path}: what several tries brought is not the file: starts over")
        return part.received


def _complete(web: Web, url: str, part: _Part) -> None:
    """Ask for what is missing until nothing is."""
    patience = Patience(web, part.file.path)
    while part.size < part.file.size:
        try:
            _receive(web, url, part)
        except PassingFault as fault:
            reached = part.size
            if isinstance(fault, RangeRefused):
                part.give_up()
            patience.wait(fault, reached)


def _receive(web: Web, url: str, part: _Part) -> None:
    """One request and as much of its answer as comes."""
    asked = part.ranges and part.size > 0
    with web.open(url, part.range_headers() if asked else {}) as answer:
        if asked and answer.status == 206:
            _check_range(answer, part)
            part.joined = True
        else:
            _check_whole(answer, part, url)
        part.etag = answer.headers.get("ETag", "")
        while part.size < part.file.size:
            if web.stop.is_set():
                raise Stopped
            data = answer.read1(min(_CHUNK_BYTES, part.file.size - part.size))
            if not data:
                raise PassingFault(f"the connection was dropped after {part.size} of {part.file.size} bytes")
            part.append(data)


def _check_range(answer: Any, part: _Part) -> None:
    """Whether it goes on exactly where the part ends, in the same version."""
    told = answer.headers.get("Content-Range", "")
    match = re.fullmatch(r"bytes (\d+)-\d+/(\d+|\*)", told)
    same_place = match is not None and int(match[1]) == part.size and match[2] in ("*", str(part.file.size))
    if not same_place or (part.etag and answer.headers.get("ETag", part.etag) != part.etag):
        raise RangeRefused(f"asked for bytes from {part.size} on, the server sends others: {told or 'unnamed ones'}")


def _check_whole(answer: Any, part: _Part, url: str) -> None:
    """Whether it is the file from its beginning, of the right length; the part is given up for it."""
    if answer.status != 200:
        raise PassingFault(f"the server answers {answer.status} to a request for the whole file")
    part.start_over()
    length = answer.headers.get("Content-Length")
    if length is not None and length != str(part.file.size):
        part.remove()
        raise SwerveError(
            f"{part.file.path}: the server has {length} bytes, expected {part.file.size}: it is another file: "
            f"fetch it from elsewhere ({url})"
        )


class _Part:
    """The bytes of a file so far, and their running digest."""

    def __init__(self, target: Path, file: RemoteFile, count: Callable[[int], None]) -> None:
        self.file = file
        self.size = self.received = 0
        self.ranges = True
        """Whether the server may be asked for what is missing alone."""
        self.joined = False
        """Whether its bytes came in several answers."""
        self._target, self._count = target, count
        self._path, self._etag_path = target.with_name(target.name + PART), target.with_name(target.name + ETAG)
        self._etag = ""
        self._hasher = file.hasher()

    def __enter__(self) -> Self:
        with machine_faults(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._stream = self._path.open("a+b", buffering=0)
            self._stream.seek(0)
            while data := self._stream.read(_CHUNK_BYTES):
                self._reckon(data)
            if self.size > self.file.size:
                self.start_over()
            with contextlib.suppress(FileNotFoundError):
                self._etag = self._etag_path.read_text("utf-8", errors="replace")
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()

    @property
    def etag(self) -> str:
        """What the server called the version; empty if it did not."""
        return self._etag

    @etag.setter
    def etag(self, etag: str) -> None:
        if etag != self._etag:
            write_atomic(self._etag_path, etag)
            self._etag = etag

    def range_headers(self) -> dict[str, str]:
        """Asks for what is missing, if the version is still the same; a weak tag cannot be asked by."""
        same = {"If-Range": self._etag} if self._etag.startswith('"') else {}
        return {"Range": f"bytes={self.size}-", **same}

    def append(self, data: bytes) -> None:
        with machine_faults(self._path):
            view = memoryview(data)
            while view:
                view = view[self._stream.write(view) :]
        self.received += len(data)
        self._reckon(data)

    def hexdigest(self) -> str:
        return self._hasher.hexdigest()

    def start_over(self) -> None:
        """Drops all bytes."""
        with machine_faults(self._path):
            self._stream.truncate(0)
        self._count(-self.size)
        self.size, self.joined, self._hasher = 0, False, self.file.hasher()

    def give_up(self) -> None:
        """Drops all bytes, and asks for the whole file from now on."""
        self.start_over()
        self.ranges = False

    def remove(self) -> None:
        with machine_faults(self._path):
            self._path.unlink(missing_ok=True)
            self._etag_path.unlink(missing_ok=True)

    def put_in_place(self) -> None:
        """Gives the file its name, once it is on the disk."""
        with machine_faults(self._target):
            force_to_disk(self._path)
            self._path.rename(self._target)
            self._etag_path.unlink(missing_ok=True)
            force_to_disk(self._target.parent)

    def _reckon(self, data: bytes) -> None:
        self._hasher.update(data)
        self.size += len(data)
        self._count(len(data))
