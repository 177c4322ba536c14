"""Plan a recipe for accelerators that need not be there.

Compiles the programs of an optimizer step (forward, head, loss and backward; then the update) for a named topology, and
says per device what memory they take by kind, what they compute, what they send, and whether that fits. The quick tier
stops before code is generated; --full goes to the end. Exit code 0: fits; 1: does not fit; 2: the input is at fault.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from typing import TYPE_CHECKING

from swerve.cli.recipe_arguments import add_recipe_arguments, recipe_from
from swerve.config import TrainRecipe, render

if TYPE_CHECKING:
    from swerve.planning import Plan, Topology

PROGRAMS = "swerve.planning.programs:recipe_programs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the recipe, its settings, the topology and its figures."""
    add_recipe_arguments(parser, TrainRecipe, dry_run=False)
    parser.add_argument(
        "--topology",
        required=True,
        metavar="NAME:SHAPE",
        help="for example tpu7x:4x4x8, v5p:4x4x8, v6e:16x16, cpu:8",
    )
    parser.add_argument("--full", action="store_true", help="generate code too")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--no-cache", action="store_true", help="compile even what has not changed since the last plan")
    parser.add_argument(
        "--time-limit-s",
        type=float,
        default=3600.0,
        metavar="SECONDS",
        help="of a compilation (%(default)s); 0: none",
    )
    figures = parser.add_argument_group("figures per device, in place of the vendor's")
    figures.add_argument("--budget-mib", type=int, metavar="MIB", help="memory that programs may use")
    figures.add_argument("--peak-tflops", type=float, metavar="TFLOPS", help="bf16 TFLOP/s")
    figures.add_argument("--hbm-gbps", type=float, metavar="GBPS", help="memory bandwidth, GB/s")
    figures.add_argument("--ici-gbps", type=float, metavar="GBPS", help="interconnect bandwidth of all links, GB/s")


def run(arguments: argparse.Namespace) -> int:
    """Plans and prints; exits with 1 where the programs do not fit."""
    from swerve.planning import parse_topology, plan_as_json, plan_as_text

    topology = parse_topology(arguments.topology).with_figures(
        budget_mib=arguments.budget_mib,
        peak_tflops=arguments.peak_tflops,
        hbm_gbps=arguments.hbm_gbps,
        ici_gbps=arguments.ici_gbps,
    )
    plan = _plan(recipe_from(arguments, TrainRecipe), topology, arguments)
    width = shutil.get_terminal_size((120, 24)).columns
    print(json.dumps(plan_as_json(plan), indent=2) if arguments.json else plan_as_text(plan, width))
    return int(not plan.fits)


def _plan(recipe: TrainRecipe, topology: Topology, arguments: argparse.Namespace) -> Plan:
    from swerve.planning import Job, Options, check_mesh, make_plan, run_job

    mesh = dataclasses.asdict(recipe.mesh)
    check_mesh(topology, mesh)
    job = Job(
        recipe=render(recipe),
        topology=topology.name,
        mesh=mesh,
        programs=PROGRAMS,
        budget_mib=topology.device.budget_mib,
    )
    options = Options(full=arguments.full, use_cache=not arguments.no_cache, time_limit_s=arguments.time_limit_s)
    return make_plan(topology, mesh, arguments.full, run_job(job, options, _say))


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
