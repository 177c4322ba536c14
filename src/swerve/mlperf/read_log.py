"""The reader of MLPerf logs: `:::MLLOG` lines become records, and whatever else a killed writer leaves is named.

The checkers find the token anywhere in a line and read what follows the last one; so does this reader. Where they stop
with a traceback, or lose a record without a word, it reports the line and goes on.
"""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from swerve.types import MachineError, SwerveError

TOKEN = ":::MLLOG "
_FIELDS = ("time_ms", "event_type", "key", "value", "metadata")


@dataclass(frozen=True, kw_only=True, slots=True)
class LogRecord:
    """One event of a log.

    Attributes:
        key: What is logged, such as `eval_accuracy`.
        value: Its value, as JSON has it.
        time_ms: When it happened, Unix time in milliseconds; the order of the file may be another.
        event_type: `POINT_IN_TIME`, `INTERVAL_START` or `INTERVAL_END`.
        metadata: What is said about it, such as `samples_count`.
        line: Line of the file, from 1.
    """

    key: str
    value: Any
    time_ms: float
    event_type: str
    metadata: Mapping[str, Any]
    line: int

    @property
    def samples_count(self) -> int | None:
        """Training samples seen, where the metadata says so."""
        count = self.metadata.get("samples_count")
        if isinstance(count, bool) or not isinstance(count, int | float) or not math.isfinite(count):
            return None
        return int(count)


@dataclass(frozen=True, kw_only=True, slots=True)
class LineFault:
    """A line that is no record though it should be.

    Attributes:
        line: Line of the file, from 1.
        text: The line.
        reason: What is wrong with it.
        kind: `torn`: the last line, cut off in the middle; `glued`: two records on one line, of which the checkers see
            the last one; `broken`: no JSON; `incomplete`: a field is missing or is of another type, on which the
            checkers stop with a traceback.
    """

    line: int
    text: str
    reason: str
    kind: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """A log, read.

    Attributes:
        path: The file.
        records: Its records, in the order of the file, which is what counts for the checkers.
        faults: Lines that could not be read, in the order of the file.
        token_lines: Lines of the file that hold the token; the checkers number lines by their place herein, from 0.
        num_whole_bytes: Length of the file without a torn last line: whoever appends cuts the file here first.
        ends_with_newline: Whether the whole lines end with a newline; else whoever appends writes one first.
    """

    path: Path
    records: tuple[LogRecord, ...]
    faults: tuple[LineFault, ...]
    token_lines: tuple[int, ...]
    num_whole_bytes: int
    ends_with_newline: bool

    @property
    def torn(self) -> LineFault | None:
        """The last line, where its writer was killed in the middle of it."""
        return next((fault for fault in self.faults if fault.kind == "torn"), None)

    def all(self, key: str) -> tuple[LogRecord, ...]:
        """Records of a key, in the order of the file."""
        return tuple(record for record in self.records if record.key == key)

    def first(self, key: str) -> LogRecord | None:
        """First record of a key, or `None`."""
        return next((record for record in self.records if record.key == key), None)

    def last(self, key: str) -> LogRecord | None:
        """Last record of a key, or `None`."""
        return next((record for record in reversed(self.records) if record.key == key), None)

    def value(self, key: str, default: Any = None) -> Any:
        """Value of a key's first record, or `default`."""
        record = self.first(key)
        return default if record is None else record.value


def read_log(path: Path) -> Log:
    """Reads a log.

    Args:
        path: The file; text around the records, such as a program's other output, is left out.

    Returns:
        Its records and its faults.

    Raises:
        SwerveError: There is no such file.
        MachineError: It cannot be read.
    """
    try:
        data = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError) as error:
        raise SwerveError(f"{path}: no such log: name a file with {TOKEN.strip()} lines") from error
    except OSError as error:
        raise MachineError(f"{path}: cannot be read: {error.strerror}: check its permissions") from error
    records: list[LogRecord] = []
    faults: list[LineFault] = []
    token_lines: list[int] = []
    unfinished = not data.endswith(b"\n") and bool(data)
    # Line ends as the checkers know them: \n, \r\n and \r.
    lines = list(io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors="replace", newline=None))
    for number, line in enumerate(lines, start=1):
        text, last = line.rstrip("\n"), number == len(lines)
        if TOKEN in text:
            token_lines.append(number)
            found = list(_read_line(text, number, torn=last and unfinished))
            records += [item for item in found if isinstance(item, LogRecord)]
            faults += [item for item in found if isinstance(item, LineFault)]
        elif last and unfinished and TOKEN.startswith(text):
            faults.append(LineFault(line=number, text=text, reason="the line is cut off", kind="torn"))
    torn = bool(faults) and faults[-1].kind == "torn"
    end = data.rfind(b"\n") + 1 if torn else len(data)
    return Log(
        path=path,
        records=tuple(records),
        faults=tuple(faults),
        token_lines=tuple(token_lines),
        num_whole_bytes=end,
        ends_with_newline=torn or not unfinished,
    )


def _read_line(text: str, number: int, torn: bool) -> Iterator[LogRecord | LineFault]:
    """Reads one line with the token; `torn` where it is the last and has no end."""
    parts = text.split(TOKEN)
    if len(parts) > 2:
        reason = f"{len(parts) - 1} records on one line, of which the checkers read the last one alone"
        yield LineFault(line=number, text=text, reason=reason, kind="glued")
    try:
        fields = json.loads(parts[-1].strip())
    except ValueError as error:
        what, kind = ("the line is cut off", "torn") if torn else (f"no JSON: {error}", "broken")
        yield LineFault(line=number, text=text, reason=what, kind=kind)
        return
    reason = _fault_of(fields)
    if reason:
        yield LineFault(line=number, text=text, reason=reason, kind="incomplete")
        return
    yield LogRecord(
        key=fields["key"],
        value=fields["value"],
        time_ms=float(fields["time_ms"]),
        event_type=fields["event_type"],
        metadata=fields["metadata"],
        line=number,
    )


def _fault_of(fields: object) -> str:
    if not isinstance(fields, dict):
        return "not a JSON object"
    known = cast("dict[str, object]", fields)
    missing = [name for name in _FIELDS if name not in known]
    if missing:
        return f"has no {', '.join(missing)}"
    if not re.fullmatch(r"-?\d+(\.\d*)?([eE][-+]?\d+)?", str(known["time_ms"])):
        return f"time_ms is no number: {known['time_ms']}"
    if not isinstance(known["key"], str) or not isinstance(known["event_type"], str):
        return "key and event_type must be texts"
    if not isinstance(known["metadata"], dict):
        return "metadata is not an object"
    return ""
