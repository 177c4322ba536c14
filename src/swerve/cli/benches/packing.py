"""How close the packing of a step's trajectories comes to the best one there is, and how long it takes.

Lengths are those of a real run, drawn from several seeds: a mean of 25k tokens in rows of 65,536. No packing needs
fewer rows than a bound that is computed from the lengths (Martello & Toth's L2), so the distance to the best packing is
at most what is shown. Times are of one core.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from swerve.cli.benches import Figure
from swerve.types import SwerveError

if TYPE_CHECKING:
    import numpy as np

SHAPES = ("gamma", "lognormal", "bimodal")
_ROW_LENGTH = 65_536
_MEAN = 25_000
_ROWS_TARGET = 1.03
_TARGETS_MS = {1152: 100.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what is packed."""
    parser.add_argument(
        "--sequences", type=int, nargs="+", default=[256, 512, 1024, 1152], metavar="INT",
        help="sequences of a step (256 512 1024 1152)",
    )  # fmt: skip
    parser.add_argument(
        "--lengths", nargs="+", choices=SHAPES, default=["gamma"], metavar="SHAPE",
        help=f"how they are distributed, of {', '.join(SHAPES)} (gamma, as of synthetic trajectories)",
    )  # fmt: skip
    parser.add_argument("--seeds", type=int, default=5, metavar="INT", help="draws of each (%(default)s)")


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    """Pack every draw; see `swerve bench packing --help`."""
    if arguments.seeds < 1 or min(arguments.sequences) < 1:
        raise SwerveError("bench packing: --seeds and --sequences are positive numbers")
    _plan(_lengths("gamma", 8, 0))  # what a first call costs beyond planning is none of it
    for shape in arguments.lengths:
        for count in arguments.sequences:
            began = time.perf_counter()
            plans = [_plan(_lengths(shape, count, seed)) for seed in range(arguments.seeds)]
            spent = round(time.perf_counter() - began, 3)

            def figure(name: str, value: float, unit: str, target: float | None = None) -> Figure:
                title = f"{count} sequences, {shape}: {name}"  # noqa: B023
                return Figure(
                    name=title, value=value, unit=unit, count=arguments.seeds, seconds=spent, target=target  # noqa: B023
                )  # fmt: skip

            yield figure("rows", statistics.mean(one.rows for one in plans), "rows")
            yield figure("fewest rows, bound", statistics.mean(one.bound for one in plans), "rows")
            yield figure("rows / bound, worst", max(one.rows / one.bound for one in plans), "x", _ROWS_TARGET)
            yield figure("padding", 100 * statistics.mean(one.padding(one.rows) for one in plans), "% of slots")
            yield figure("padding, bound", 100 * statistics.mean(one.padding(one.bound) for one in plans), "% of slots")
            yield figure("time, slowest", 1e3 * max(one.seconds for one in plans), "ms", _TARGETS_MS.get(count))


class _Planned(NamedTuple):
    """Rows of a plan, the bound on them, tokens, and seconds of one core."""

    rows: int
    bound: int
    tokens: int
    seconds: float

    def padding(self, rows: int) -> float:
        """Share of the slots of so many rows that no token takes."""
        return 1 - self.tokens / (rows * _ROW_LENGTH)


def _plan(lengths: np.ndarray) -> _Planned:
    from swerve.packing import fewest_rows, plan_rows

    sizes = lengths.tolist()
    began = time.process_time()
    plan = plan_rows(sizes, _ROW_LENGTH)
    seconds = time.process_time() - began
    return _Planned(len(plan.rows), fewest_rows(sizes, _ROW_LENGTH), sum(sizes), seconds)


def _lengths(shape: str, count: int, seed: int) -> np.ndarray:
    """Tokens of each sequence, int64 `[count]`."""
    import numpy as np

    from swerve.trainer import SyntheticShape, synthetic_lengths

    if shape == "gamma":
        return synthetic_lengths(SyntheticShape(context_length=_ROW_LENGTH), count, seed)
    rng = np.random.default_rng([seed, count])
    if shape == "lognormal":
        drawn = rng.lognormal(np.log(_MEAN) - 0.125, 0.5, count)
    else:  # quick repairs, and long searches
        drawn = np.where(rng.random(count) < 0.6, rng.normal(14_000, 3_000, count), rng.normal(42_000, 6_000, count))
    return np.clip(drawn, 500, _ROW_LENGTH).astype(np.int64)
