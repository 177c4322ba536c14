"""Profiles of training steps: what the devices did in which phase, for Perfetto and TensorBoard."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from swerve.types import SwerveError

PHASE_PREFIX = "phase: "
"""Tells phases from operations of the same name."""


def parse_steps(text: str, num_steps: int) -> tuple[int, int]:
    """Read what `--profile` says.

    Args:
        text: `FIRST:LAST`, or one step.
        num_steps: Of the run.

    Returns:
        First and last step.

    Raises:
        SwerveError: These are no steps of the run.
    """
    first, _, last = text.partition(":")
    try:
        steps = int(first), int(last or first)
    except ValueError:
        raise SwerveError(f"--profile {text}: expected a step, or the first and the last one as FIRST:LAST") from None
    if not 1 <= steps[0] <= steps[1] <= num_steps:
        raise SwerveError(f"--profile {text}: the run has steps 1 to {num_steps}: name steps of these, first one first")
    return steps


class StepProfiler:
    """Records some steps of a run; implements `swerve.orchestrator.Profiler`.

    Args:
        directory: Where the recording goes.
        first: First step recorded.
        last: Last one.
    """

    def __init__(self, directory: Path, first: int, last: int) -> None:
        self._directory = directory
        self._steps = range(first, last + 1)
        self._running = False
        self._step: AbstractContextManager[object] | None = None

    def begin_step(self, step: int) -> None:
        """Starts, goes on, or ends, as this step wants it."""
        self._end_step()
        if step in self._steps and not self._running:
            options = jax.profiler.ProfileOptions()
            options.python_tracer_level = 0  # a line per Python call would bury the phases
            jax.profiler.start_trace(self._directory, profiler_options=options)
            self._running = True
        if step not in self._steps:
            self.close()
        elif self._running:
            self._step = jax.profiler.StepTraceAnnotation("step", step_num=step)
            self._step.__enter__()

    def annotate(self, name: str) -> AbstractContextManager[object]:
        """Marks a block of the calling thread in the recording."""
        return jax.profiler.TraceAnnotation(PHASE_PREFIX + name)

    def close(self) -> None:
        """Ends the recording; idempotent."""
        self._end_step()
        if self._running:
            self._running = False
            jax.profiler.stop_trace()

    def _end_step(self) -> None:
        step, self._step = self._step, None
        if step:
            step.__exit__(None, None, None)


# ------------------------------------------------------------------------------------------------------ reading back


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A stretch of a recording.

    Attributes:
        name: What went on.
        start_s: Seconds from the recording's own zero.
        end_s: Likewise.
    """

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """A recording of training steps.

    Attributes:
        phases: In order of their start, names without prefix.
        busy: Stretches in which some operation ran on some device, in order, apart from each other.
    """

    phases: tuple[Span, ...]
    busy: tuple[Span, ...]

    def idle_s(self, start_s: float, end_s: float) -> float:
        """Seconds of a stretch in which no operation ran."""
        ran = sum(max(0.0, min(one.end_s, end_s) - max(one.start_s, start_s)) for one in self.busy)
        return end_s - start_s - ran

    def idle_at_boundaries(self) -> list[float]:
        """Seconds without an operation between each step's last micro-batch and the next step's first one.

        The stretch begins where the loop begins to wait for a step's last micro-batch, and ends where it has waited for
        the next step's first one: devices are busy at both ends.
        """
        waits = [one for one in self.phases if one.name == "compute"]
        idle = []
        for update in (one for one in self.phases if one.name == "update"):
            before = [one for one in waits if one.end_s <= update.start_s]
            after = [one for one in waits if one.start_s >= update.end_s]
            if before and after:
                idle.append(self.idle_s(before[-1].start_s, after[0].end_s))
        return idle


def read_profile(directory: Path) -> Profile:
    """Read the last recording in a directory.

    Args:
        directory: That of a `StepProfiler`.

    Raises:
        SwerveError: There is none.
    """
    files = sorted(directory.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise SwerveError(f"{directory}: holds no recording of a profiler")
    phases, operations = [], []
    for plane in jax.profiler.ProfileData.from_file(str(files[-1])).planes:
        on_device = plane.name.startswith("/device:")
        for line in plane.lines:
            # XLA's own threads are what a CPU has as devices.
            if on_device or line.name.startswith("tf_XLA"):
                operations.extend(_spans(line.events))
            else:
                phases.extend(one for one in _spans(line.events) if one.name.startswith(PHASE_PREFIX))
    named = (Span(name=one.name.removeprefix(PHASE_PREFIX), start_s=one.start_s, end_s=one.end_s) for one in phases)
    return Profile(phases=tuple(sorted(named, key=lambda one: one.start_s)), busy=tuple(_joined(operations)))


def _spans(events: Iterable[Any]) -> Iterator[Span]:
    for event in events:
        yield Span(name=event.name, start_s=event.start_ns / 1e9, end_s=event.end_ns / 1e9)


def _joined(spans: Iterable[Span]) -> Iterator[Span]:
    """Overlapping stretches as one."""
    start = end = None
    for span in sorted(spans, key=lambda one: one.start_s):
        if start is None or end is None or span.start_s > end:
            if start is not None and end is not None:
                yield Span(name="busy", start_s=start, end_s=end)
            start, end = span.start_s, span.end_s
        end = max(end, span.end_s)
    if start is not None and end is not None:
        yield Span(name="busy", start_s=start, end_s=end)
