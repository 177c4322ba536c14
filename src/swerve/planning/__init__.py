"""Planning: what a recipe's programs need of accelerators that are not there, before anyone pays for them.

This package owns compiling for a named topology, reading what that takes (memory by kind, work, communication) from
jaxpr, HLO and buffer assignment, and the verdict against a budget. It sits above the trainer, whose programs it
compiles, and below the command line. Tracing and compiling happen in processes of their own.
"""

from swerve.planning.compiler import Options, check_compiler, run_job
from swerve.planning.job import Job
from swerve.planning.plan import Plan, make_plan
from swerve.planning.report import plan_as_json, plan_as_text
from swerve.planning.topology import DEVICES, Topology, check_mesh, parse_topology

__all__ = [
    "DEVICES",
    "Job",
    "Options",
    "Plan",
    "Topology",
    "check_compiler",
    "check_mesh",
    "make_plan",
    "parse_topology",
    "plan_as_json",
    "plan_as_text",
    "run_job",
]
