"""The numbers of a run, all on one step axis.

    Metrics.log(step, values) --+--> metrics.jsonl
                                +--> each sink: TensorBoard, the progress display, ...

A step is the number of optimizer steps done; 0 is before the first. Every consumer is handed the same step by the one
`log`, so no two of them can count differently.
"""

import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from swerve.telemetry.files import JsonLines, append_whole, keep_json_lines, machine_faults, read_json_lines

Scalar = float | int | str | bool | None


class Sink(Protocol):
    """Whatever else wants the metrics."""

    def log(self, step: int, values: Mapping[str, Scalar]) -> None:
        """Takes values of one step."""
        ...

    def close(self) -> None:
        """Flushes and ends; idempotent."""
        ...


class Metrics:
    """Writer of a run's metrics.

    Steps never go back, and a metric has one value per step; either is a mistake of the caller.
    """

    def __init__(
        self, path: Path, *, sinks: Sequence[Sink] = (), durable: bool = False, resume_step: int | None = None
    ) -> None:
        """Opens the file of metrics.

        Args:
            path: JSON-lines file.
            sinks: Further takers of every value.
            durable: Force every line to the disk.
            resume_step: Steps done by the state a run goes on from; lines of later steps, which will be done again,
                are dropped. `None` for a new run.
        """
        self._step = 0
        self._names: set[str] = set()
        if resume_step is not None:
            keep_json_lines(path, lambda record: record["step"] <= resume_step)
            for record in read_json_lines(path):
                self._admit(record["step"], record.keys() - _RESERVED)
        self._file = JsonLines(path, durable=durable)
        self._sinks = tuple(sinks)

    @property
    def step(self) -> int:
        """The latest step logged."""
        return self._step

    def logged(self, name: str) -> bool:
        """Whether the latest step already has a value of this name."""
        return name in self._names

    def log(self, step: int, values: Mapping[str, Scalar]) -> None:
        """Writes values of one step.

        Args:
            step: Optimizer steps done; equal to the latest step, or greater.
            values: By name.

        Raises:
            ValueError: The step went back, or a name already has a value at this step.
            MachineError: The disk is full.
        """
        if reserved := values.keys() & _RESERVED:
            raise ValueError(f"reserved metric name: {', '.join(sorted(reserved))}")
        self._admit(step, values.keys())
        self._file.append({"step": step, "unix_time_s": round(time.time(), 3), **values})
        for sink in self._sinks:
            sink.log(step, values)

    def close(self) -> None:
        """Closes the file and every sink; idempotent."""
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def _admit(self, step: int, names: "set[str] | Any") -> None:
        if step < self._step:
            raise ValueError(f"metrics of step {step} after those of step {self._step}")
        if step > self._step:
            self._step, self._names = step, set()
        if again := self._names & set(names):
            raise ValueError(f"step {step} already has a value of {', '.join(sorted(again))}")
        self._names |= set(names)


_RESERVED = frozenset({"step", "unix_time_s"})


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """Reads the lines of a file of metrics, in order; each has `step`, `unix_time_s` and the values logged."""
    return read_json_lines(path)


class TensorBoardSink:
    """Writes metrics as TensorBoard event files, in the thread that logs: a full disk is met where it can be told."""

    def __init__(self, directory: Path, resume_step: int | None = None) -> None:
        """Opens a new event file.

        Args:
            directory: Folder of the event files.
            resume_step: As for `Metrics`; TensorBoard then hides what older files hold of later steps.

        Raises:
            MachineError: It cannot be written.
        """
        from tensorboardX.proto import event_pb2  # takes a while to import, and many commands need none

        self._messages: Any = event_pb2
        self._path = directory / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}"
        with machine_faults(self._path):
            directory.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._append({"wall_time": time.time(), "file_version": "brain.Event:2"})
        if resume_step is not None:
            start = self._messages.SessionLog(status=self._messages.SessionLog.START)
            self._append({"step": resume_step + 1, "session_log": start})

    def log(self, step: int, values: Mapping[str, Scalar]) -> None:
        """Takes the numbers among the values.

        Raises:
            MachineError: The disk is full; the file holds what it held before.
        """
        from tensorboardX.summary import scalar

        now = time.time()
        numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
        self._append(*({"wall_time": now, "step": step, "summary": scalar(name, x)} for name, x in numbers.items()))

    def close(self) -> None:
        """Closes the file; idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, *events: Mapping[str, Any]) -> None:
        records = [_framed(self._messages.Event(**event).SerializeToString()) for event in events]
        with machine_faults(self._path):
            append_whole(self._descriptor, b"".join(records))


def _framed(data: bytes) -> bytes:
    """A record of an event file: length, its checksum, content, its checksum."""
    from tensorboardX.record_writer import masked_crc32c

    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))
