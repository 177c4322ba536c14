"""What a person sees while a run goes on: a live line on a terminal, plain lines elsewhere.

A progress display is a sink of the metrics, so its step is theirs.
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol, TextIO

from swerve.telemetry.metrics import Scalar

if TYPE_CHECKING:
    from rich.progress import Progress as _RichBar

SHOWN: Mapping[str, str] = {
    "reward": "reward",
    "loss": "loss",
    "tokens_per_s": "tokens/s",
    "staleness_max": "staleness",
    "pass_at_1": "pass@1",
    "pass_at_4": "pass@4",
}
"""Metrics that the display shows, with their labels."""

_QUIET_S = 10.0


class Progress(Protocol):
    """A display of a run. Also a `Sink` of its metrics."""

    def log(self, step: int, values: Mapping[str, Scalar]) -> None:
        """Shows values of a step."""
        ...

    def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
        """Shows what the run waits for, and how far that is; cheap enough to be called often."""
        ...

    def say(self, text: str) -> None:
        """Shows a line that stays."""
        ...

    def close(self) -> None:
        """Ends the display; idempotent."""
        ...


def open_progress(mode: str, num_steps: int, stream: TextIO) -> Progress:
    """Opens the display that a recipe asks for.

    Args:
        mode: `auto`, `rich`, `plain` or `none`.
        num_steps: Optimizer steps of the whole run.
        stream: Where it is shown.

    Returns:
        The display, started.
    """
    if mode == "none":
        return SilentProgress()
    if mode == "rich" or (mode == "auto" and stream.isatty()):
        return RichProgress(num_steps, stream)
    return PlainProgress(num_steps, stream)


def format_values(values: Mapping[str, Scalar]) -> str:
    """The shown ones among the values, in one line; empty if there are none."""
    return "  ".join(f"{label} {_format(values[name])}" for name, label in SHOWN.items() if name in values)


def _format(value: Scalar) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.4g}" if abs(value) < 0.001 else f"{value:.3f}"
    return str(value)


def _waiting_text(what: str, done: int, total: int) -> str:
    return f"{what} {done}/{total}" if total else what


class SilentProgress:
    """Shows nothing."""

    def log(self, step: int, values: Mapping[str, Scalar]) -> None:
        """Takes values and shows nothing."""

    def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
        """Shows nothing."""

    def say(self, text: str) -> None:
        """Shows nothing."""

    def close(self) -> None:
        """Nothing to end."""


class PlainProgress:
    """One line per step, and now and then one about a long wait."""

    def __init__(self, num_steps: int, stream: TextIO) -> None:
        """Starts the clock.

        Args:
            num_steps: Optimizer steps of the whole run.
            stream: Where lines go.
        """
        self._num_steps = num_steps
        self._stream = stream
        self._start = self._spoke = time.monotonic()

    def log(self, step: int, values: Mapping[str, Scalar]) -> None:
        """One line, if the values hold something that is shown."""
        if text := format_values(values):
            self.say(f"step {step}/{self._num_steps}  {text}")

    def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
        """One line, if nothing has been said for a while."""
        if time.monotonic() - self._spoke >= _QUIET_S:
            self.say(f"waiting for {_waiting_text(what, done, total)}")

    def say(self, text: str) -> None:
        """One line, with the seconds since the start."""
        self._spoke = time.monotonic()
        self._stream.write(f"[{self._spoke - self._start:7.1f} s] {text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing to end."""


class RichProgress:
    """A bar of steps with the latest numbers and what is being waited for; lines that stay scroll above it."""

    def __init__(self, num_steps: int, stream: TextIO) -> None:
        """Starts the live display.

        Args:
            num_steps: Optimizer steps of the whole run.
            stream: The terminal.
        """
        from rich.console import Console  # takes a while to import, and many commands need none
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._bar: _RichBar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TimeElapsedColumn(),
            TextColumn("{task.fields[numbers]}", markup=False),
            TextColumn("{task.fields[waiting]}", markup=False, style="dim"),
            console=Console(file=stream),
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("", total=num_steps, numbers="", waiting="")
        self._bar.start()

    def log(self, step: int, values: Mapping[str, Scalar]) -> None:
        """Moves the bar and shows the values."""
        if text := format_values(values):
            self._bar.update(self._task, completed=step, numbers=text)
            self.say(f"step {step}  {text}")

    def waiting(self, what: str, done: int = 0, total: int = 0) -> None:
        """Shows it at the end of the live line."""
        self._bar.update(self._task, waiting=f"waiting for {_waiting_text(what, done, total)}")

    def say(self, text: str) -> None:
        """A line above the live one."""
        self._bar.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Leaves the last state on the terminal."""
        self._bar.stop()
