"""How fast the model computes, alone or beside `transformers`: the same weights, tokens and cores in one run.

A model of four layers and width 256, in the proportions of its family, on rows that each hold one sequence: without its
GPU kernels `transformers` resets no recurrent state inside a row. Measured are forward and backward (loss over all
tokens, gradients of all parameters) and prefill (cache filled, logits of the last token), in float32 and in the
precision that is fastest for each side. Each side is a process of its own; repetitions alternate, and the median
counts. No ratio is given unless both sides found the same loss, gradient norm and logits.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from swerve.cli.benches import Figure
from swerve.types import MachineError, SwerveError

if TYPE_CHECKING:
    from swerve.cli.benches._sides import Side

_TARGET = 1.3
_PATIENCE = 1.5  # a precision that takes so many times the float32 one is not the fastest
_TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2}
_MEASUREMENTS = {"forward_backward": "forward+backward", "prefill": "prefill"}
_PRECISIONS = ("float32", "bfloat16")
MODEL: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "max_position_embeddings": 4096,
}
"""As in the family: queries and DeltaNet values twice as wide as the residual stream, keys as wide, two key heads."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the peer and sizes."""
    parser.add_argument("--peer", choices=["transformers"], help="measure this implementation as well")
    parser.add_argument(
        "--peer-python", metavar="PATH", help="its interpreter; made in the cache directory where it is not given"
    )
    parser.add_argument("--threads", type=int, default=0, metavar="INT", help="cores for each side (all)")
    for name, default, text in (
        ("rows", 4, "rows of a batch"),
        ("row-length", 2048, "tokens of a row"),
        ("repetitions", 7, "of every measurement"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="INT", help=f"{text} (%(default)s)")
    parser.add_argument(
        "--precision", choices=["float32", "all"], default="all", help="float32 only, or each that a side offers (all)"
    )


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    """Measure everything; see `swerve bench model --help`."""
    from swerve.cli.benches._sides import peer_python, start_side, threads_of

    threads = threads_of(arguments.threads)
    for name in ("rows", "row_length", "repetitions"):
        if getattr(arguments, name) < (2 if name == "row_length" else 1):
            raise SwerveError(f"--{name.replace('_', '-')} {getattr(arguments, name)}: too small")
    commands: dict[str, list[str | Path]] = {"swerve": [sys.executable, "-m", "swerve.cli.benches._own_model"]}
    if arguments.peer:
        script = Path(__file__).with_name("_peer_transformers.py")
        # -P: beside the script lie modules that have the names of packages
        commands["transformers"] = [peer_python(arguments.peer_python), "-P", script]
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        _write_inputs(Path(directory), arguments.rows, arguments.row_length)
        sides = [stack.enter_context(start_side(name, command, threads)) for name, command in commands.items()]
        for side in sides:
            told = side.ask("open", directory=directory, threads=threads)
            print(f"{side.name}: {told['versions']}, {told['threads']} threads", file=sys.stderr, flush=True)
        yield from _compare(sides, arguments)


def _write_inputs(directory: Path, rows: int, row_length: int) -> None:
    """Random weights as Hugging Face files, and tokens, for both sides."""
    import jax
    import numpy as np

    from swerve import models

    config = models.Qwen35MoeConfig(**MODEL)
    models.save_hf(directory, config, models.initialise(config, jax.random.key(0)), "float32")
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (rows, row_length)).astype(np.int32)
    np.save(directory / "tokens.npy", tokens)


class _Measured(NamedTuple):
    """One side's outcome of one measurement in one precision."""

    prepared: dict[str, Any]
    runs: list[dict[str, Any]]

    @property
    def given_up(self) -> bool:
        """Whether one row took so long that all were not tried."""
        return "given_up" in self.prepared

    @property
    def seconds(self) -> float:
        """The median, or what one row let expect."""
        return self.prepared["given_up"] if self.given_up else statistics.median(run["seconds"] for run in self.runs)


def _compare(sides: list[Side], arguments: argparse.Namespace) -> Iterator[Figure]:
    from swerve.cli.benches._sides import require_agreement

    tokens = arguments.rows * arguments.row_length
    precisions = _PRECISIONS if arguments.precision == "all" else _PRECISIONS[:1]
    fastest: dict[tuple[str, str], tuple[str, _Measured]] = {}
    for precision in precisions:
        for measurement, title in _MEASUREMENTS.items():
            limits = {name: _PATIENCE * best.seconds for (m, name), (_, best) in fastest.items() if m == measurement}
            measured = _alternate(sides, measurement, precision, arguments.repetitions, limits)
            for name, one in measured.items():
                yield from _figures(f"{title}, {precision}, {name}", one, tokens)
                best = fastest.get((measurement, name))
                if best is None or one.seconds < best[1].seconds:
                    fastest[measurement, name] = (precision, one)
            if len(sides) == 2 and all(name in measured and not measured[name].given_up for name in _names(sides)):
                checks = [one.prepared["check"] for one in measured.values()]
                require_agreement(f"{title}, {precision}", "the peer's", checks[0], checks[1], _TOLERANCE[precision])
                yield _ratio(f"{title}, {precision}: swerve / transformers", *measured.values())
    if len(sides) == 2 and len(precisions) > 1:
        for measurement, title in _MEASUREMENTS.items():
            (ours_in, ours), (theirs_in, theirs) = (fastest[measurement, name] for name in _names(sides))
            yield _ratio(f"{title}, fastest of each ({ours_in} / {theirs_in})", ours, theirs)


def _names(sides: list[Side]) -> list[str]:
    return [side.name for side in sides]


def _alternate(
    sides: list[Side], measurement: str, precision: str, repetitions: int, limits: dict[str, float]
) -> dict[str, _Measured]:
    """Each side's outcome by its name; a side that does not offer the precision is left out.

    A side that takes longer than its limit is not measured again: it has been faster in another precision.
    """
    asked = {"measurement": measurement, "precision": precision}
    measured: dict[str, _Measured] = {}
    for side in sides:
        try:
            prepared = side.ask("prepare", **asked, limit_s=limits.get(side.name))
            measured[side.name] = _Measured(prepared, [])
        except MachineError as error:
            if precision == _PRECISIONS[0]:
                raise
            print(error, file=sys.stderr, flush=True)
    for _ in range(repetitions):
        for side in sides:
            one = measured.get(side.name)
            if one and not one.given_up and not (one.runs and one.seconds > limits.get(side.name, math.inf)):
                one.runs.append(side.ask("run", **asked))
    return measured


def _figures(name: str, one: _Measured, tokens: int) -> Iterator[Figure]:
    if one.given_up:
        spent = round(one.seconds, 3)
        yield Figure(name=f"{name}: by one row, then given up", value=tokens / one.seconds, unit="tokens/s", count=1,
                     seconds=spent)  # fmt: skip
        return
    rates = sorted(tokens / run["seconds"] for run in one.runs)
    count, spent = len(rates), round(sum(run["seconds"] for run in one.runs), 3)
    settings = one.prepared["settings"]
    yield Figure(name=f"{name} ({settings})", value=tokens / one.seconds, unit="tokens/s", count=count, seconds=spent)
    for label, value, unit in (
        ("slowest repetition", rates[0], "tokens/s"),
        ("fastest repetition", rates[-1], "tokens/s"),
        ("time of all cores", statistics.median(run["core_seconds"] for run in one.runs), "s"),
        ("peak memory so far", max(run["peak_bytes"] for run in one.runs) / 2**20, "MiB"),
        (one.prepared["preparation"], one.prepared["seconds"], "s"),
    ):
        yield Figure(name=f"{name}: {label}", value=value, unit=unit, count=count, seconds=spent)
    for label, value in one.prepared["check"].items():
        if isinstance(value, float):
            yield Figure(name=f"{name}: {label.replace('_', ' ')}", value=value, unit="", count=1, seconds=spent)


def _ratio(name: str, ours: _Measured, theirs: _Measured) -> Figure:
    spent = round(sum(run["seconds"] for side in (ours, theirs) for run in side.runs), 3)
    value = theirs.seconds / ours.seconds
    return Figure(name=name, value=value, unit="times", count=len(ours.runs), seconds=spent, target=_TARGET)
