"""Check logs of scored runs, make a submission of them, and draw them.

`check` runs the checkers of mlperf-logging on a log, a folder or a submission tree, and says of each finding what it
means and what to do; it exits with 1 where there is one. `package` makes a submission tree of three logs, `system` a
system's description of what the machine tells, `report` a page of curves.
"""

from __future__ import annotations

import argparse
import json
import sys
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
    package = actions.add_parser("package", help="make a submission tree of three logs, and check it")
    package.add_argument("logs", type=Path, nargs="+", metavar="LOG", help="logs of three runs")
    package.add_argument("--org", required=True, metavar="NAME", help="organisation that submits")
    package.add_argument(
        "--system", required=True, type=Path, metavar="FILE.json", help="what the site says of its system; names it"
    )
    package.add_argument("--division", required=True, choices=("open", "closed"), help="division of the submission")
    package.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder in which ORG/ appears")
    package.add_argument(
        "--benchmark-code", default="", metavar="URL|DIR", help="address or folder of the code (default: Swerve itself)"
    )
    package.add_argument("--ruleset", default=_RULESET, metavar="VERSION", help="version of the rules (%(default)s)")
    system = actions.add_parser("system", help="write a system's description with what this machine tells")
    system.add_argument("--site", type=Path, metavar="FILE.json", help="what the site says; stands above the machine")
    system.add_argument("--out", type=Path, metavar="FILE.json", help="file to write (default: print it)")
    report = actions.add_parser("report", help="draw what logs say, by global batch size")
    report.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="logs, and folders of logs")
    report.add_argument("--out", required=True, type=Path, metavar="DIR", help="where the page and the pictures go")
    for action in (check, package, report):
        action.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Does one of them."""
    actions = {"check": _check, "package": _package, "system": _system, "report": _report}
    return actions[arguments.action](arguments)


def _check(arguments: argparse.Namespace) -> int:
    from swerve.mlperf.check import check

    verdict = check(arguments.path, arguments.ruleset)
    print(json.dumps(verdict.to_json(), indent=2) if arguments.json else _table(verdict))
    return int(bool(verdict.findings))


def _package(arguments: argparse.Namespace) -> int:
    from swerve.mlperf.check import check
    from swerve.mlperf.package import Submission, make_package
    from swerve.mlperf.system import read_site

    site = read_site(arguments.system)
    probed = {name: value for name, value in _probe().items() if name not in site}
    submission = Submission(
        org=arguments.org,
        system=arguments.system.stem,
        division=arguments.division,
        fields={**probed, **site},
        logs=tuple(arguments.logs),
        code=arguments.benchmark_code,
    )
    tree = make_package(submission, arguments.out)
    verdict = check(tree, arguments.ruleset)
    if arguments.json:
        print(json.dumps({"tree": str(tree), "probed": probed, **verdict.to_json()}, indent=2))
        return int(bool(verdict.findings))
    for path in sorted(path for path in tree.rglob("*") if path.is_file()):
        print(path)
    told = ", ".join(name for name, value in probed.items() if value)
    print(textwrap.fill(f"this machine told what {arguments.system.name} does not: {told}", 118), end="\n\n")
    print(_table(verdict))
    return int(bool(verdict.findings))


def _system(arguments: argparse.Namespace) -> int:
    from swerve.mlperf.system import missing_fields, read_site, template
    from swerve.telemetry import write_json

    fields = {**_probe(), **(read_site(arguments.site) if arguments.site else {})}
    if arguments.out:
        write_json(arguments.out, template(fields))
    else:
        print(json.dumps(template(fields), indent=2))
    for name, what in missing_fields(fields).items():
        print(f"to fill in: {name}: {what}", file=sys.stderr)
    return 0


def _report(arguments: argparse.Namespace) -> int:
    from swerve.mlperf.report import make_report

    document = make_report(arguments.paths, arguments.out)
    if arguments.json:
        print(json.dumps(document, indent=2))
        return 0
    print(f"{'GBS':>6} {'converged':>11} {'olympic':>9} {'to target':>10} {'step':>9} {'gap':>7}")
    for group in document["groups"]:
        share = group["mean_gap_share"]
        print(
            f"{group['global_batch_size'] or '-':>6} {group['converged']:>5} of {group['runs']:<2} "
            f"{_minutes(group['olympic_score_s']):>9} {_minutes(group['mean_train_to_target_s']):>10} "
            f"{_seconds(group['mean_step_time_s']):>9} {'-' if share is None else f'{share:.1%}':>7}"
        )
    print(f"written: {arguments.out / 'report.html'}")
    return 0


def _minutes(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds / 60:.1f} min"


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f} s"


def _probe() -> dict[str, str]:
    from swerve.cli.machine import ask_jax
    from swerve.mlperf.system import Accelerators, probe_system

    told = ask_jax()
    found = None if told is None else Accelerators(platform=told[1], count=told[2], kind=told[3])
    return probe_system(found)


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
