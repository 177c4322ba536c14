"""Check logs of scored runs, make a submission of them, and draw them.

`check` runs the checkers of mlperf-logging on a log, a folder or a submission tree, and says of each finding what it
means and what to do; it exits with 1 where there is one. `package` makes a submission tree of three logs, `system` a
system's description of what the machine tells, `report` a page of curves.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swerve.mlperf.check import Verdict
    from swerve.mlperf.findings import Finding

_RULESET = "6.1.0"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="run the checkers, and explain what they find")
    check.add_argument("path", type=Path, metavar="PATH", help="a log, a folder of logs, or a submission tree")
    check.add_argument("--ruleset", default=_RULESET, metavar="VERSION", help="version of the rules (%(default)s)")
    for action in (check,):
        action.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Does one of them."""
    return {"check": _check}[arguments.action](arguments)


def _check(arguments: argparse.Namespace) -> int:
    from swerve.mlperf.check import check

    verdict = check(arguments.path, arguments.ruleset)
    print(json.dumps(verdict.to_json(), indent=2) if arguments.json else _table(verdict))
    return int(bool(verdict.findings))


def _table(verdict: Verdict) -> str:
    """Findings, files that share theirs under one head; what a kind means and asks for is said once, at the end."""
    blocks: dict[tuple[object, ...], list[Path]] = {}
    lines_of: dict[tuple[object, ...], list[str]] = {}
    for file, group in groupby(verdict.findings, key=lambda finding: finding.file):
        findings = list(group)
        subject = tuple((finding.kind, finding.line, finding.key, finding.found) for finding in findings)
        blocks.setdefault(subject, []).append(file)
        lines_of[subject] = [line for finding in findings for line in _lines(finding)]
    lines = [line for subject, files in blocks.items() for line in (*map(str, files), *lines_of[subject], "")]
    for finding in {finding.kind: finding for finding in verdict.findings}.values():
        lines += [finding.kind]
        for words in (finding.meaning, f"-> {finding.remedy}"):
            lines += textwrap.wrap(words, 116, initial_indent="    ", subsequent_indent="    ")
    lines += [""] if verdict.findings else []
    num_bad = sum(map(len, blocks.values()))
    what = f"{len(verdict.findings)} findings in {num_bad} places" if verdict.findings else "no findings"
    lines += [f"{what}: {len(verdict.logs)} logs, ruleset {verdict.ruleset}, by {', '.join(verdict.checkers)}"]
    return "\n".join(lines)


def _lines(finding: Finding) -> list[str]:
    place = f"line {finding.line}" if finding.line else ""
    head = f"  {finding.severity:<8}{place:<9} "
    text = f"{finding.key}: {finding.found}" if finding.key else finding.found
    tail = f"({finding.kind}, {finding.checker})"
    return textwrap.wrap(f"{head}{text} {tail}", 118, subsequent_indent=" " * len(head), break_on_hyphens=False)
