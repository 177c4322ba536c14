"""What the factory has found out so far, so that a minting that was stopped goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from swerve.telemetry import machine_faults
from swerve.types import SwerveError


class Journal:
    """Verdicts by package and candidate, in a file of JSON lines. Use as a context manager."""

    def __init__(self, path: Path, identity: str) -> None:
        """Read what there is.

        Args:
            path: The file; made at the first verdict.
            identity: Of whatever decides on verdicts; a journal of another identity is of no use.

        Raises:
            SwerveError: The file belongs to another minting.
        """
        self._path = path
        self._identity = identity
        self._known: dict[tuple[str, str], Any] = {}
        size = 0
        if path.exists():
            first, *lines = path.read_bytes().split(b"\n")
            if _loads(first) != {"identity": identity}:
                raise SwerveError(f"{path}: belongs to a minting of something else: remove it, or give another --out")
            size = len(first) + 1
            for line in lines:
                entry = _loads(line)
                if entry is None:
                    break  # the line that was being written when the process was stopped
                self._known[entry["package"], entry["key"]] = entry["verdict"]
                size += len(line) + 1
        with machine_faults(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("r+b" if size else "wb")
            self._file.truncate(size)
            self._file.seek(size)
        if not size:
            self._write({"identity": identity})

    def __enter__(self) -> Journal:
        """Return the journal."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()

    def get(self, package: str, key: str) -> Any:
        """A verdict, or `None` if there is none yet."""
        return self._known.get((package, key))

    def put(self, package: str, key: str, verdict: Any) -> None:
        """Note a verdict."""
        self._known[package, key] = verdict
        self._write({"package": package, "key": key, "verdict": verdict})

    def remove(self) -> None:
        """Delete the file: the minting is complete."""
        self._path.unlink(missing_ok=True)

    def _write(self, entry: Any) -> None:
        with machine_faults(self._path):
            self._file.write(json.dumps(entry).encode() + b"\n")
            self._file.flush()


def _loads(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None
