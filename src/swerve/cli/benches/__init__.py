"""One module per bench: `swerve bench NAME` is the module `NAME`. A module dropped here is registered by being here.

It has

    - a docstring, whose first line is the bench's summary, and whose rest opens its help;
    - `add_arguments(parser: argparse.ArgumentParser) -> None`;
    - `measure(arguments: argparse.Namespace) -> Iterator[Figure]`, which yields each figure as soon as it is known.

Whatever is slow to import is imported inside `measure`. The machine's load is recorded around every figure.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """One measured number.

    Attributes:
        name: What was measured.
        value: The number.
        unit: Of the number.
        count: Repetitions, or things that were there at once.
        seconds: Wall-clock seconds that the measurement took.
        target: What it should reach on the machine the documentation names; `None` without one.
    """

    name: str
    value: float
    unit: str
    count: int
    seconds: float
    target: float | None = None
