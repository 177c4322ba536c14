"""Measure what parts of Swerve cost on this machine.

Each figure comes with the number of repetitions, the time it took, and the machine's load before it: other work that
runs at the same time makes figures worse. Targets are those of a quiet machine with two cores.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import importlib
import json
import os
import time
from pathlib import Path
from typing import Any

_BENCHES = Path(__file__).parents[1] / "benches"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares every bench."""
    benches = parser.add_subparsers(dest="bench", required=True, metavar="BENCH")
    for path in sorted(_BENCHES.glob("[!_]*.py")):
        description = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        summary = description.partition("\n")[0].rstrip(".")
        bench = benches.add_parser(path.stem.replace("_", "-"), help=summary, description=description)
        bench.add_argument("--json", action="store_true", help="print JSON")
        _module(path.stem).add_arguments(bench)


def run(arguments: argparse.Namespace) -> int:
    """Measures, and prints each figure as it comes."""
    rows: list[dict[str, Any]] = []
    load = os.getloadavg()[0]
    began = time.monotonic()
    for figure in _module(arguments.bench.replace("-", "_")).measure(arguments):
        rows.append(dataclasses.asdict(figure) | {"load": round(load, 2)})
        load = os.getloadavg()[0]
        if not arguments.json:
            print(_line(rows[-1]), flush=True)
    if arguments.json:
        about = {"bench": arguments.bench, "cores": os.cpu_count(), "seconds": round(time.monotonic() - began, 2)}
        print(json.dumps(about | {"figures": rows}, indent=2))
    return 0


def _module(name: str) -> Any:
    return importlib.import_module(f"swerve.cli.benches.{name}")


def _line(row: dict[str, Any]) -> str:
    target = "" if row["target"] is None else f"  (target {row['target']:g})"
    measured = f"{row['value']:10.4g} {row['unit']:<14}"
    return f"{row['name']:<44}{measured} x {row['count']:<5} load {row['load']:.1f}{target}"
