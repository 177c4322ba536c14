"""A plan as JSON, and as text for a person."""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from swerve.planning.costs import Collective, Work
from swerve.planning.names import scope_of
from swerve.planning.plan import ASSUMPTIONS, KINDS, Plan, ProgramPlan
from swerve.planning.topology import MIB

_ROWS = 12


def plan_as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain values.

    Args:
        plan: The plan.

    Returns:
        Sizes in bytes, times in seconds, work in FLOPs, all per device.
    """
    return {
        "topology": plan.topology.name,
        "mesh": dict(plan.mesh),
        "num_devices": plan.topology.num_devices,
        "device": asdict(plan.topology.device),
        "tier": "full" if plan.full else "quick",
        "fits": plan.fits,
        "budget_mib": plan.topology.device.budget_mib,
        "total_mib": round(plan.total_bytes / MIB),
        "programs": {name: _program_as_json(program) for name, program in plan.programs.items()},
        "assumptions": list(ASSUMPTIONS),
    }


def _program_as_json(program: ProgramPlan) -> dict[str, Any]:
    costs, compiled = program.description.costs, program.compiled
    return {
        "fits": program.fits,
        "total_mib": round(program.total_bytes / MIB),
        "memory_bytes": dict(program.memory_bytes),
        "out_of_memory": compiled.out_of_memory,
        "flops": costs.flops,
        "reference_flops": program.description.reference_flops,
        "flops_by_source": [asdict(work) for work in costs.work],
        "collectives": [asdict(each) for each in program.collectives],
        "collectives_asked_for": [asdict(each) for each in costs.collectives],
        "seconds": dict(program.seconds),
        "largest_buffers": [asdict(buffer) for buffer in compiled.memory.buffers] if compiled.memory else [],
        "bad_lowerings": list(program.bad_lowerings),
        "notes": _notes(program),
        "compile": {
            "seconds": compiled.seconds,
            "cpu_seconds": compiled.cpu_seconds,
            "peak_rss_bytes": compiled.peak_rss_bytes,
            "cached": compiled.cached,
            "code_bytes": compiled.code_bytes,
        },
    }


def _notes(program: ProgramPlan) -> list[str]:
    notes = list(program.description.costs.notes)
    emitted = program.compiled.emitted
    if emitted and emitted.num_unknown_loops:
        notes.append(f"{emitted.num_unknown_loops} loops of unknown length hold collectives, counted once")
    return notes


def plan_as_text(plan: Plan, width: int = 120) -> str:
    """The plan for a person.

    Args:
        plan: The plan.
        width: Characters of a line.

    Returns:
        Text without a final newline.
    """
    from rich.console import Console

    out = io.StringIO()
    console = Console(width=width, highlight=False, markup=False, emoji=False, color_system=None, file=out)
    mesh = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    console.print(f"{plan.topology.name}: {plan.topology.num_devices} devices, mesh {mesh}")
    if not plan.topology.is_tpu:
        console.print("memory is that of the CPU backend, which computes bf16 in f32, and not that of a TPU")
    console.print(_memory_table(plan))
    for name, program in plan.programs.items():
        _print_program(console, name, program)
    console.print("\nassumed: " + ";\n         ".join(ASSUMPTIONS))
    need, budget = plan.total_bytes / MIB, plan.topology.device.budget_mib
    relation = "fits" if plan.fits else "DOES NOT FIT"
    console.print(f"\n{relation}: {need:,.0f} of {budget:,} MiB per device ({need / budget:.0%})")
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def _table(*columns: str, title: str = "") -> Any:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="", pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    return table


def _memory_table(plan: Plan) -> Any:
    table = _table("MiB per device", *plan.programs)
    programs = plan.programs.values()
    for kind in KINDS:
        table.add_row(kind, *(_mib(each.memory_bytes.get(kind)) for each in programs))
    table.add_row("total", *(_mib(each.total_bytes) for each in programs), end_section=True)
    return table


def _print_program(console: Any, name: str, program: ProgramPlan) -> None:
    costs, seconds = program.description.costs, program.seconds
    reference = program.description.reference_flops
    share = f"; the model's own {_flop(reference)} are {reference / costs.flops:.2f} of it" if reference else ""
    console.print(f"\n{name}: {_flop(costs.flops)} per device{share}")
    console.print(
        f"at least {seconds['at_least']:.3g} s, at most {seconds['at_most']:.3g} s: "
        f"computing {seconds['compute']:.3g} s, memory {seconds['memory']:.3g} s, "
        f"interconnect {seconds['interconnect']:.3g} s"
    )
    if costs.work:
        console.print(_rows(_table("work", "computed", "read and written"), map(_work_row, costs.work)))
    if program.collectives:
        console.print(
            _rows(_table("collective", "devices", "times", "moved"), map(_collective_row, program.collectives))
        )
    if program.compiled.memory:
        rows = (
            (_buffer_name(buffer), buffer.kind, buffer.shape, _mib(buffer.num_bytes))
            for buffer in program.compiled.memory.buffers
            if buffer.num_bytes > program.total_bytes / 1000
        )
        console.print(_rows(_table("largest at the peak", "kind", "shape", "MiB"), rows))
    for line in program.bad_lowerings:
        console.print(f"bad lowering: {line}")
    for line in _notes(program):
        console.print(f"note: {line}")
    if program.compiled.out_of_memory:
        console.print(f"XLA: {' '.join(program.compiled.out_of_memory.split())[:300]}")


def _rows(table: Any, rows: Iterator[tuple[str, ...]]) -> Any:
    all_rows = list(rows)
    for row in all_rows[:_ROWS]:
        table.add_row(*row)
    if len(all_rows) > _ROWS:
        table.add_row(f"and {len(all_rows) - _ROWS} more (--json lists them)")
    return table


def _work_row(work: Work) -> tuple[str, ...]:
    return f"{work.source}, {work.direction}", _flop(work.flops), _bytes(work.num_bytes)


def _collective_row(each: Collective) -> tuple[str, ...]:
    over = ", ".join(each.axes) or "?"
    return f"{each.kind} over {over}", str(each.group_size), f"{each.count:,}", _bytes(each.num_bytes)


def _buffer_name(buffer: Any) -> str:
    return scope_of(buffer.source.replace("\\'", "'")) or buffer.instruction


def _mib(num_bytes: int | None) -> str:
    if num_bytes is None:
        return "?"
    return f"{num_bytes / MIB:,.0f}" if num_bytes >= 10 * MIB or not num_bytes else f"{num_bytes / MIB:.3g}"


def _flop(flops: float) -> str:
    return _scaled(flops, 1000.0, ("", "K", "M", "G", "T"), "FLOP")


def _bytes(num_bytes: float) -> str:
    return _scaled(num_bytes, 1024.0, ("", "Ki", "Mi", "Gi"), "B")


def _scaled(value: float, step: float, prefixes: tuple[str, ...], unit: str) -> str:
    power = 0
    while value >= step and power + 1 < len(prefixes):
        value, power = value / step, power + 1
    return f"{value:,.0f} {prefixes[power]}{unit}" if value >= 100 else f"{value:.3g} {prefixes[power]}{unit}"
