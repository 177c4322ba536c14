"""What the factory has found out so far, so that a minting that was stopped goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

from swerve.telemetry import machine_faults


class Journal:
    """Verdicts by what decides on them and by candidate, in a file of JSON lines. Use as a context manager."""

    def __init__(self, path: Path) -> None:
        """Read what there is.

        Args:
            path: The file; made if there is none.
        """
        self._path = path
        self._known: dict[tuple[str, str], Any] = {}
        size = 0
        with machine_faults(path):
            for line in path.read_bytes().split(b"\n") if path.exists() else []:
                try:
                    entry = json.loads(line)
                    self._known[entry["identity"], entry["key"]] = entry["verdict"]
                except (ValueError, KeyError, TypeError):
                    break  # the line that was being written when the process was stopped
                size += len(line) + 1
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("r+b" if size else "wb")
            self._file.truncate(size)
            self._file.seek(size)

    def __enter__(self) -> Journal:
        """Return the journal."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()

    def get(self, identity: str, key: str) -> Any:
        """A verdict, or `None` if there is none yet."""
        return self._known.get((identity, key))

    def put(self, identity: str, key: str, verdict: Any) -> None:
        """Note a verdict."""
        self._known[identity, key] = verdict
        with machine_faults(self._path):
            entry = {"identity": identity, "key": key, "verdict": verdict}
            self._file.write(json.dumps(entry).encode() + b"\n")
            self._file.flush()

    def remove(self) -> None:
        """Delete the file: the minting is complete."""
        self._path.unlink(missing_ok=True)
