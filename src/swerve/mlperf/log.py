"""The MLPerf log of a run: events as `mlperf-logging` writes them, in a file that survives whoever writes it.

    :::MLLOG {"namespace": "", "time_ms": ..., "event_type": ..., "key": ..., "value": ..., "metadata": {...}}

Training and the offline evaluator write to the same file, one after the other. A line is on disk before the call
returns, and a torn last line of a killed writer is cut off by the next one.
"""

from __future__ import annotations

import importlib
import logging
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import swerve
from swerve.telemetry import LineFile
from swerve.types import MachineError

_STACK_OFFSET = 2
"""Frames between the caller of `MLPerfLog` and `mlperf-logging`: the file and line it notes are the caller's."""


def require_package() -> None:
    """Refuse to go on without `mlperf-logging`.

    Raises:
        MachineError: It is not installed.
    """
    _package("mllog")


def _package(module: str) -> Any:
    try:
        return importlib.import_module(f"mlperf_logging.{module}")
    except ImportError as error:
        raise MachineError(
            "mlperf-logging is missing, and a scored run logs through it: pip install 'swerve[mlperf]'"
        ) from error


class MLPerfLog:
    """A log file, open for more events."""

    def __init__(self, path: Path) -> None:
        """Opens the file, making it where it is missing.

        Args:
            path: The file; its folder exists.

        Raises:
            MachineError: It cannot be opened, or `mlperf-logging` is missing.
        """
        package = _package("mllog.mllog")
        self.path = path
        self._file = LineFile(path, durable=True)
        logger = logging.Logger(f"swerve.mlperf {path}", logging.INFO)  # one of its own, known to nobody else
        logger.addHandler(_Lines(self._file))
        root = str(Path(swerve.__file__).parents[1])
        self._log = package.MLLogger(logger=logger, root_dir=root, default_stack_offset=_STACK_OFFSET)

    def event(self, key: str, value: object = None, *, time_ms: int | None = None, **metadata: object) -> None:
        """Logs a point in time.

        Args:
            key: What.
            value: A JSON value.
            time_ms: Unix time in milliseconds; now by default.
            **metadata: JSON values.

        Raises:
            MachineError: The disk is full or failed.
        """
        self._log.event(key, value, metadata=metadata, time_ms=time_ms)

    def start(self, key: str, *, time_ms: int | None = None, **metadata: object) -> None:
        """Logs the start of an interval; as `event`."""
        self._log.start(key, metadata=metadata, time_ms=time_ms)

    def end(self, key: str, *, time_ms: int | None = None, **metadata: object) -> None:
        """Logs the end of an interval; as `event`."""
        self._log.end(key, metadata=metadata, time_ms=time_ms)

    def close(self) -> None:
        """Closes the file; idempotent."""
        self._file.close()

    def __enter__(self) -> Self:
        """The log itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes the file."""
        self.close()


class _Lines(logging.Handler):
    """Hands whole lines to a file; what goes wrong there is told, not swallowed."""

    def __init__(self, file: LineFile) -> None:
        super().__init__(logging.INFO)
        self._file = file

    def emit(self, record: logging.LogRecord) -> None:
        self._file.append_line(self.format(record))
