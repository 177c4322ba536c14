"""The process that traces and compiles: `python -m swerve.planning.child JOB.json STAGE`.

A process of its own, so that the accelerator's variables hold for it alone, that it can be stopped as soon as enough is
known, and that a compiler which dies takes nothing with it. Stage `describe` traces every program and writes
`described.json`; any other stage is the name of a program to compile, which leaves XLA's dump, and `outcome.json` once
the compiler is through.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

import jax

from swerve.config import parse_recipe
from swerve.planning.costs import Description
from swerve.planning.jaxpr import count_costs
from swerve.planning.job import Job
from swerve.planning.topology import make_mesh, parse_topology
from swerve.telemetry import die_with_parent, write_json
from swerve.types import SwerveError


def main(path: str, stage: str) -> None:
    """Runs one stage of a job.

    Args:
        path: The job's file; results lie beside it.
        stage: `describe`, or a program's name.
    """
    die_with_parent()
    directory = Path(path).parent
    job = Job(**json.loads(Path(path).read_text(encoding="utf-8")))
    try:
        programs = load_programs(job)
        if stage == "describe":
            write_json(directory / "described.json", {name: asdict(describe(p, job)) for name, p in programs.items()})
        else:
            write_json(directory / "outcome.json", compile_program(programs[stage], job, directory / "dump"))
    except SwerveError as error:
        write_json(directory / "refused.json", {"error": str(error)})


def load_programs(job: Job) -> Mapping[str, Any]:
    """The programs of a job, on its mesh."""
    module, _, function = job.programs.partition(":")
    mesh = make_mesh(parse_topology(job.topology), tuple(job.mesh), tuple(job.mesh.values()))
    recipe = parse_recipe(job.recipe, "recipe") if job.recipe else None
    return getattr(importlib.import_module(module), function)(recipe, mesh, **job.options)


def describe(program: Any, job: Job) -> Description:
    """What is known of a program without a compiler.

    Args:
        program: Jitted function, abstract arguments, and their kinds.
        job: What is planned.

    Returns:
        Its costs, the bytes of its arguments by kind, and a digest of what a compiler would be given.
    """
    traced = program.jitted.trace(*program.arguments)
    lowered = traced.lower()
    kinds: dict[str, int] = {}
    for position, argument in enumerate(program.arguments):
        kind = program.kinds[position]
        kinds[kind] = kinds.get(kind, 0) + sum(map(shard_bytes, jax.tree.leaves(argument)))
    donated = sum(
        shard_bytes(array)
        for array, info in zip(jax.tree.leaves(program.arguments), jax.tree.leaves(lowered.args_info), strict=True)
        if info.donated
    )
    text = hashlib.sha256(lowered.as_text().encode())
    text.update(" ".join(map(_version, ("jax", "jaxlib", "libtpu"))).encode())
    return Description(
        costs=count_costs(traced.jaxpr, job.mesh),
        argument_bytes=kinds,
        donated_bytes=donated,
        digest=text.hexdigest(),
        reference_flops=program.reference_flops / math.prod(job.mesh.values()),
    )


def compile_program(program: Any, job: Job, dump: Path) -> dict[str, Any]:
    """Compile, and say what came of it.

    Args:
        program: Jitted function and abstract arguments.
        job: What is planned.
        dump: Where XLA writes about it.

    Returns:
        `code_bytes`, or `out_of_memory` with XLA's message.
    """
    options: dict[str, Any] = {"xla_dump_to": str(dump)}
    if parse_topology(job.topology).is_tpu:
        options["xla_tpu_max_hbm_size_mib"] = str(job.budget_mib)
    lowered = program.jitted.lower(*program.arguments)
    try:
        compiled = lowered.compile(compiler_options=options)
    except Exception as error:  # jax.errors.JaxRuntimeError, whose only sign is its text
        if "RESOURCE_EXHAUSTED" in str(error) and " hbm" in str(error).lower():
            return {"out_of_memory": str(error)}
        raise SwerveError(f"the compiler refuses it: {_first_lines(str(error))}") from error
    return {"code_bytes": compiled.memory_analysis().generated_code_size_in_bytes}


def shard_bytes(array: Any) -> int:
    """Bytes of an abstract array on one device."""
    shape = array.shape if array.sharding is None else array.sharding.shard_shape(array.shape)
    return math.prod(shape) * array.dtype.itemsize


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _first_lines(text: str, length: int = 400) -> str:
    joined = " ".join(text.split())
    return joined if len(joined) <= length else f"{joined[:length]}..."


if __name__ == "__main__":
    main(*sys.argv[1:])
