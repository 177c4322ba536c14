"""Say what this machine can do, and the remedy for what is missing.

Looks at interpreter, cores, memory, disk, kernel, user namespaces, bubblewrap, control groups, container programs and
accelerators, and starts a sandbox to see whether one starts. Leaves nothing behind.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator
from pathlib import Path

from swerve.cli import machine
from swerve.sandboxes import probe
from swerve.sandboxes.probe import Finding


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `--json`."""
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Looks and reports; exits with 1 where something that every run needs is missing."""
    findings: list[Finding] = []
    for look in _looks():
        finding = look()
        findings.append(finding)
        if not arguments.json:
            print(_line(finding), flush=True)
    if arguments.json:
        print(json.dumps({"findings": [dataclasses.asdict(finding) for finding in findings]}, indent=2))
    return int(any(finding.required and not finding.ok for finding in findings))


def _looks() -> Iterator[Callable[[], Finding]]:
    yield from (machine.find_python, machine.find_cores, machine.find_memory, lambda: machine.find_disk(Path()))
    yield from (probe.probe_kernel, probe.probe_user_namespaces, probe.probe_bubblewrap, probe.probe_sandbox)
    yield from (probe.probe_cgroups, probe.probe_apptainer, probe.probe_docker, machine.find_accelerators)


def _line(finding: Finding) -> str:
    mark = "ok" if finding.ok else "MISSING" if finding.required else "-"
    remedy = f"\n{'':28}-> {finding.remedy}" if finding.remedy else ""
    return f"{finding.name:<18}{mark:<10}{finding.detail}{remedy}"
