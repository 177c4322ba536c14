"""A folder of downloaded files: held by one process, filled by several threads, and checked by its own record."""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swerve.downloads.fetching import fetch
from swerve.downloads.listing import PART, RECORD, Listing, RemoteFile, fault_of, file_to_json, files_from_json
from swerve.downloads.sources import Source
from swerve.downloads.web import Stopped, Web
from swerve.telemetry import hold_folder, machine_faults, write_json
from swerve.types import MachineError, SwerveError

_FORMAT = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A whole folder.

    Attributes:
        source: What it holds, `models/ORG/NAME` for example.
        revision: Full hash of the commit, or SHA-256 of the manifest.
        files: The files, as listed.
        fetched: How many of them were not there before.
        fetched_bytes: Bytes that came over the network.
    """

    source: str
    revision: str
    files: tuple[RemoteFile, ...]
    fetched: int
    fetched_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class _Record:
    """What `download.json` says."""

    listing: Listing
    include: tuple[str, ...]
    complete: bool


def download(
    source: Source,
    folder: Path,
    *,
    web: Web,
    include: Sequence[str] = (),
    workers: int = 4,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Outcome:
    """Fill a folder with a source's files; what is there already is checked and kept.

    Args:
        source: What to fetch.
        folder: Empty, absent, or what an earlier call with the same source left.
        web: Makes the requests.
        include: Globs of paths to fetch; all of them if empty.
        workers: Files fetched at once.
        progress: Told of bytes done and bytes in all.

    Raises:
        SwerveError: The folder holds something else, or a file is not what it should be.
        MachineError: The network or the disk does not let it; the same call goes on where it was.
    """
    made = not folder.exists()
    with machine_faults(folder):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        with hold_folder(folder):
            record = _read(folder) if (folder / RECORD).exists() else None
            _refuse_foreign(folder, record, source, tuple(include))
            if record is not None and record.complete and source.pin and _all_there(folder, record.listing):
                listing = record.listing
            else:
                listing = source.listing(web).only(include)
                _refuse_other(folder, record, listing, source)
                _write(folder, listing, source, include, complete=False)
            outcome = _fill(folder, listing, web, workers, progress)
            if record is None or not record.complete or outcome.fetched:
                _write(folder, listing, source, include, complete=True)
            return outcome
    finally:
        if made:
            with contextlib.suppress(OSError):  # it is not empty, for something came of it
                folder.rmdir()


def verify(folder: Path, progress: Callable[[int, int], None] = lambda done, total: None) -> tuple[Outcome, list[str]]:
    """Hold a folder against its `download.json`; asks no server.

    Args:
        folder: What `download` filled.
        progress: Told of bytes read and bytes in all.

    Returns:
        What it should hold, and a sentence for each file that is missing or another.

    Raises:
        SwerveError: It has no readable `download.json`.
    """
    listing = _read(folder).listing
    count = _Counter(listing.num_bytes, progress)
    faults = [fault for file in listing.files if (fault := fault_of(folder / file.path, file, count.add))]
    return _outcome(listing, [], 0), faults


def _fill(folder: Path, listing: Listing, web: Web, workers: int, progress: Callable[[int, int], None]) -> Outcome:
    """Check what is there, fetch what is not."""
    missing = [file for file in listing.files if not (folder / file.path).exists()]
    _check_space(folder, missing)
    count = _Counter(listing.num_bytes, progress)
    received = [0] * len(listing.files)

    def one(index: int) -> None:
        file = listing.files[index]
        target = folder / file.path
        if target.exists():
            if fault := fault_of(target, file, count.add):
                raise SwerveError(f"{fault}: delete it to fetch it again")
        else:
            received[index] = fetch(web, listing.url(file), file, target, count.add)

    largest_first = sorted(range(len(listing.files)), key=lambda index: -listing.files[index].size)
    _in_parallel(largest_first, one, workers, web.stop)
    return _outcome(listing, missing, sum(received))


def _outcome(listing: Listing, fetched: Sequence[RemoteFile], fetched_bytes: int) -> Outcome:
    return Outcome(
        source=listing.source,
        revision=listing.revision,
        files=listing.files,
        fetched=len(fetched),
        fetched_bytes=fetched_bytes,
    )


class _Counter:
    """Bytes done, by several threads."""

    def __init__(self, total: int, progress: Callable[[int, int], None]) -> None:
        self._done, self._total, self._progress = 0, total, progress
        self._lock = threading.Lock()

    def add(self, num_bytes: int) -> None:
        with self._lock:
            self._done += num_bytes
            self._progress(self._done, self._total)


def _in_parallel(indices: Sequence[int], one: Callable[[int], None], workers: int, stop: threading.Event) -> None:
    """Call it for each index, several at once; the first fault stops the others and is raised.

    The threads die with the process, so that Ctrl-C does not wait for a server that says nothing.
    """
    jobs, lock = iter(indices), threading.Lock()
    faults: list[BaseException] = []

    def work() -> None:
        while not stop.is_set():
            with lock:
                index = next(jobs, None)
            if index is None:
                return
            try:
                one(index)
            except Stopped:
                return
            except BaseException as fault:
                faults.append(fault)
                stop.set()

    threads = [threading.Thread(target=work, daemon=True) for _ in range(min(workers, len(indices)))]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.1)
    except BaseException:
        stop.set()
        for thread in threads:
            thread.join(1.0)
        raise
    if faults:
        raise faults[0]


def _check_space(folder: Path, missing: Sequence[RemoteFile]) -> None:
    needed = sum(file.size - _size(folder / (file.path + PART)) for file in missing)
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise MachineError(
            f"{folder}: {needed} more bytes are needed, {free} are free: free some, or choose another --out"
        )


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _all_there(folder: Path, listing: Listing) -> bool:
    return all((folder / file.path).exists() for file in listing.files)


def _refuse_foreign(folder: Path, record: _Record | None, source: Source, include: tuple[str, ...]) -> None:
    """Whether the folder is empty, or was begun with the same source."""
    if record is None:
        if any(folder.iterdir()):
            raise SwerveError(f"{folder}: is not empty and has no {RECORD}: choose another --out")
        return
    if record.listing.source != source.name:
        raise SwerveError(f"{folder}: holds {record.listing.source}, not {source.name}: choose another --out")
    if source.pin and record.listing.revision != source.pin:
        raise _other_revision(folder, record, source.pin)
    if record.include != include:
        given = " ".join(f"--include '{glob}'" for glob in record.include) or "all files"
        raise SwerveError(f"{folder}: was begun with {given}: say the same again, or choose another --out")


def _refuse_other(folder: Path, record: _Record | None, listing: Listing, source: Source) -> None:
    """Whether the list is still the one that the folder was begun with."""
    if record is None:
        return
    if record.listing.revision != listing.revision:
        raise _other_revision(folder, record, f"{source.revision or 'the manifest'}, now {listing.revision},")
    if record.listing.files != listing.files:
        raise SwerveError(
            f"{folder}: {source.name} lists other files at {listing.revision} than before: "
            f"compare its list with {RECORD}, or choose another --out"
        )


def _other_revision(folder: Path, record: _Record, wanted: str) -> SwerveError:
    own = record.listing.revision
    return SwerveError(f"{folder}: holds revision {own}, not {wanted}: choose another --out, or --revision {own}")


def _write(folder: Path, listing: Listing, source: Source, include: Sequence[str], complete: bool) -> None:
    write_json(
        folder / RECORD,
        {
            "format": _FORMAT,
            "source": listing.source,
            "requested": source.revision,
            "revision": listing.revision,
            "base_url": listing.base_url,
            "include": list(include),
            "complete": complete,
            "files": [file_to_json(file) for file in listing.files],
        },
    )


def _read(folder: Path) -> _Record:
    path = folder / RECORD
    try:
        value: Any = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise SwerveError(f"{path}: no such file: the folder is not one that was downloaded") from None
    except (OSError, ValueError) as error:
        raise SwerveError(f"{path}: no JSON that can be read: {error}") from None
    if not isinstance(value, dict) or value.get("format") != _FORMAT:
        raise SwerveError(f"{path}: not a record of format {_FORMAT}: use the Swerve that wrote it")
    for key in ("source", "revision", "base_url"):
        if not isinstance(value.get(key), str):
            raise SwerveError(f"{path}: key {key}: expected a string")
    listing = Listing(
        source=value["source"],
        revision=value["revision"],
        base_url=value["base_url"],
        files=files_from_json(value.get("files"), str(path)),
    )
    include = value.get("include")
    if not isinstance(include, list) or type(value.get("complete")) is not bool:
        raise SwerveError(f"{path}: keys include and complete: expected a list and a boolean")
    return _Record(listing=listing, include=tuple(map(str, include)), complete=value["complete"])
