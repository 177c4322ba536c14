"""What the sharded head saves, against its plain twin: compiled for a pod, and run here.

Both heads are compiled, forward and backward, at the benchmark's cell: 256 devices, mesh fsdp 32 x context 4 x expert
2, 64 rows of 65,536 tokens, width 4,096, vocabulary 248,320, bfloat16. Counted in what the compiler made, per device:
FLOPs of products, and how often the table or a part of it is gathered or reduced, loops included. The devices are
simulated, or those of --topology, for which libtpu compiles.

Then both, and a head that holds all logits and takes optax's cross-entropy, run on simulated devices at a small size,
each in a process of its own; repetitions alternate, the median counts. No ratio is given unless all found the same
loss and gradients.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swerve.cli.benches import Figure
from swerve.types import MachineError, SwerveError

if TYPE_CHECKING:
    from swerve.planning.costs import Collective

_PROGRAMS = "swerve.cli.benches._heads:planned_heads"
_CONTEXT, _EXPERT = 4, 2  # of the benchmark's mesh; rows are split over the other devices
_TOLERANCE = 1e-4  # of loss and gradients, relative to their largest entry, float32
_REDUCTIONS = ("reduce_scatter", "all_reduce")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares sizes and the topology."""
    parser.add_argument("--topology", metavar="NAME:SHAPE", help="compile for, e.g. tpu7x:4x4x8 (simulated devices)")
    for name, default, text in (
        ("devices", 256, f"simulated devices to compile for, a multiple of {_CONTEXT * _EXPERT}"),
        ("row-length", 65_536, "tokens of a row, when compiled"),
        ("width", 4096, "of the hidden states, when compiled"),
        ("vocabulary", 248_320, "when compiled"),
        ("chunk", 1024, "tokens whose logits are live at a time, when compiled"),
        ("timed-devices", 2, "simulated devices, when run"),
        ("timed-row-length", 512, "tokens of a row, when run"),
        ("timed-width", 256, "of the hidden states, when run"),
        ("timed-vocabulary", 16_384, "when run"),
        ("repetitions", 3, "of every measurement; 0 runs nothing"),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="INT", help=f"{text} (%(default)s)")


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    """Measure everything; see `swerve bench head --help`."""
    for name, value in vars(arguments).items():
        if isinstance(value, int) and not isinstance(value, bool) and value < (name != "repetitions"):
            raise SwerveError(f"bench head: --{name.replace('_', '-')} {value}: too small")
    yield from _compiled(arguments)
    if arguments.repetitions:
        devices = arguments.timed_devices
        for axis in ("fsdp", "context") if devices > 1 else ("fsdp",):
            yield from _run(axis, devices, arguments)


# ------------------------------------------------------------------------------------------------ compiled


def _compiled(arguments: argparse.Namespace) -> Iterator[Figure]:
    from swerve.planning import Job, Options, parse_topology, run_job

    topology = parse_topology(arguments.topology or f"cpu:{arguments.devices}")
    rows, rest = divmod(topology.num_devices, _CONTEXT)
    if rest or rows % _EXPERT:
        raise SwerveError(f"bench head: {topology.num_devices} devices are no multiple of {_CONTEXT * _EXPERT}")
    sizes = {"rows": rows, "row_length": arguments.row_length, "width": arguments.width}
    sizes |= {"vocabulary": arguments.vocabulary, "chunk": arguments.chunk}
    job = Job(
        recipe="",
        topology=topology.name,
        mesh={"fsdp": rows // _EXPERT, "context": _CONTEXT, "expert": _EXPERT, "tensor": 1},
        programs=_PROGRAMS,
        budget_mib=topology.device.budget_mib,
        options=sizes | {"dtype": "bfloat16"},
    )
    began = time.monotonic()
    results = run_job(job, Options(use_cache=False), _say)
    seconds = round(time.monotonic() - began, 2)
    needed = 4 * 2 * rows * arguments.row_length * arguments.width * arguments.vocabulary / topology.num_devices
    for name, (_, compiled) in results.items():
        if compiled.emitted is None:
            raise MachineError(f"bench head: the {name} head does not fit: {compiled.out_of_memory[:200]}")
        found = [
            (each, _part(each, arguments.width * arguments.vocabulary, topology.num_devices))
            for each in compiled.emitted.by_size
        ]
        values: list[tuple[str, float, str, float | None]] = [
            ("products", compiled.emitted.flops / 1e12, "TFLOP", needed / 1e12)
        ]
        for what, kinds in (("gathers", ("all_gather",)), ("reductions", _REDUCTIONS)):
            moved = [(each, part) for each, part in found if part and each.kind in kinds]
            values += [
                (f"table {what}", sum(each.count for each, part in moved if part == 1), "", 2),
                (f"table {what}, those of parts too", sum(each.count for each, _ in moved), "", None),
                (f"table {what}: size", sum(each.num_bytes for each, _ in moved) / 2**30, "GiB", None),
            ]
        for label, value, unit, target in values:
            yield Figure(
                name=f"{name} head, {topology.name}, per device: {label}", value=value, unit=unit, count=1,
                seconds=seconds, target=target if name == "sharded" else None,
            )  # fmt: skip


def _part(collective: Collective, entries: int, devices: int) -> int:
    """1 where the larger side of a collective is the whole table, n where it is an n-th of it; 0 where it is neither.

    Compilers for CPUs compute bfloat16 in float32.
    """
    num_bytes = collective.num_bytes // collective.count
    for itemsize in (2, 4):
        part, rest = divmod(entries * itemsize, max(num_bytes, 1))
        if part and not rest and devices % part == 0:
            return part
    return 0


# ------------------------------------------------------------------------------------------------ run


def _run(axis: str, devices: int, arguments: argparse.Namespace) -> Iterator[Figure]:
    """All three on a mesh that splits rows, or each row."""
    import os

    from swerve.cli.benches._heads import NAMES
    from swerve.cli.benches._sides import start_side

    mesh = dict.fromkeys(("fsdp", "context", "expert", "tensor"), 1) | {axis: devices}
    sizes = {"rows": 2 * devices, "row_length": arguments.timed_row_length, "width": arguments.timed_width}
    sizes |= {"vocabulary": arguments.timed_vocabulary, "chunk": 256, "dtype": "float32"}
    command = [sys.executable, "-m", "swerve.cli.benches._heads"]
    threads = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        sides = [stack.enter_context(start_side(name, command, threads)) for name in NAMES]
        prepared, runs = {}, {side.name: [] for side in sides}
        for side in sides:
            _say(
                f"{axis} {devices}, {side.name}: {side.ask('open', head=side.name, sizes=sizes, mesh=mesh)['versions']}"
            )
            prepared[side.name] = side.ask("prepare", save=str(Path(directory) / f"{side.name}.npz"))
        _require_equal(Path(directory), [side.name for side in sides])
        for _ in range(arguments.repetitions):
            for side in sides:
                runs[side.name].append(side.ask("run"))
    values = {name: _values(prepared[name], of_side) for name, of_side in runs.items()}
    for name, of_side in values.items():
        label = "full logits, optax" if name == "full" else f"{name} head"
        for what, (value, unit) in of_side.items():
            spent = round(sum(run["seconds"] for run in runs[name]), 3)
            yield Figure(name=f"{label}, {axis} {devices}: {what}", value=value, unit=unit,
                         count=arguments.repetitions, seconds=spent)  # fmt: skip
            if name != "sharded":
                yield Figure(name=f"{label} / sharded head, {axis} {devices}: {what}", unit="times",
                             value=value / values["sharded"][what][0], count=arguments.repetitions,
                             seconds=spent)  # fmt: skip


def _values(prepared: dict[str, Any], runs: list[dict[str, Any]]) -> dict[str, tuple[float, str]]:
    return {
        "forward+backward": (statistics.median(run["seconds"] for run in runs), "s"),
        "temporaries of a device": (prepared["temporary_bytes"] / 2**20, "MiB"),
        "peak memory of the process": (max(run["peak_bytes"] for run in runs) / 2**20, "MiB"),
    }


def _require_equal(directory: Path, names: list[str]) -> None:
    """Refuse to compare heads that do not compute the same."""
    import numpy as np

    first, *others = (np.load(directory / f"{name}.npz") for name in names)
    for name, other in zip(names[1:], others, strict=True):
        for what, expected in first.items():
            error = float(np.abs(other[what] - expected).max() / np.abs(expected).max())
            if not error <= _TOLERANCE:
                raise MachineError(
                    f"bench head: {what} of {name} differs from that of {names[0]} by {error:.1e} of its "
                    f"size, more than {_TOLERANCE:g}: the two do not compute the same"
                )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
