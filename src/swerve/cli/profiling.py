"""Profiles of training steps: what the devices did in which phase, for Perfetto and TensorBoard."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

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
