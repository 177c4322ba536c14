"""`swerve mlperf package`: three logs become a submission tree, which appears whole or not at all.

    ORG/systems/SYSTEM.json
        results/SYSTEM/qwen35_397b_grpo/result_0.txt, result_1.txt, result_2.txt
        benchmarks/qwen35_397b_grpo/implementations/SYSTEM/   code, or a pointer to it, and the commands of the runs

What the checkers would refuse is refused before anything is written.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import swerve
from swerve.mlperf import rules
from swerve.mlperf.findings import ERROR, Finding
from swerve.mlperf.own_checks import check_log, check_set
from swerve.mlperf.read_log import Log, read_log
from swerve.mlperf.system import missing_fields, template
from swerve.telemetry import collect_provenance, machine_faults, write_atomic, write_json
from swerve.types import SwerveError

_NAME = r"[A-Za-z0-9][\w.+-]*"
"""Names that the checker of repositories takes: neither blanks nor a dot in front."""
_LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.pyc", "node_modules")


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What a tree is made of.

    Attributes:
        org: Organisation that submits; the tree's name.
        system: Name of the system; the name of its description.
        division: `closed` or `open`.
        fields: The description's fields, as far as they are known.
        logs: Files of the three runs, in the order of their numbers.
        code: Address or folder of the code; empty for Swerve itself.
    """

    org: str
    system: str
    division: str
    fields: Mapping[str, str]
    logs: tuple[Path, ...]
    code: str = ""


def make_package(submission: Submission, out: Path) -> Path:
    """Makes the tree.

    Args:
        submission: What it is made of.
        out: Folder in which the tree appears.

    Returns:
        The tree.

    Raises:
        SwerveError: The checkers would refuse it, with every reason; nothing is written.
        MachineError: It cannot be written; nothing is left behind.
    """
    logs = [read_log(path) for path in submission.logs]
    tree = out / submission.org
    fields = {"submitter": submission.org, "system_name": submission.system, "division": submission.division}
    fields |= submission.fields
    reasons = [*_misnamed(submission), *_refusals(submission, logs), *_incomplete(fields, submission.division)]
    if tree.exists():
        reasons.append(f"{tree}: exists: remove it, or choose another --out")
    if reasons:
        raise SwerveError("\n".join([f"refused for {len(reasons)} reasons, nothing is written:", *reasons]))
    staged = out / f".{submission.org}.{os.getpid()}.tmp"
    with machine_faults(tree):
        try:
            _write(staged, submission, logs, fields)
            staged.rename(tree)
        except BaseException:
            shutil.rmtree(staged, ignore_errors=True)
            raise
    return tree


def _code_folder(submission: Submission) -> Path | None:
    return Path(submission.code) if submission.code and "://" not in submission.code else None


def _misnamed(submission: Submission) -> list[str]:
    folder = _code_folder(submission)
    reasons = [
        f"--{option} {name}: must be letters, digits, and . _ + - within"
        for option, name in (("org", submission.org), ("system", submission.system))
        if not re.fullmatch(_NAME, name)
    ]
    if folder is not None and not folder.is_dir():
        reasons.append(f"--benchmark-code {folder}: neither a folder nor an address with ://")
    return reasons


def _refusals(submission: Submission, logs: Sequence[Log]) -> list[str]:
    """What is wrong with the logs, one line each."""
    found = [finding for log in logs for finding in check_log(log) if finding.severity == ERROR]
    together = check_set(logs, Path(submission.org), submission.division)
    found += [finding for finding in together if finding.severity == ERROR or finding.kind == "number-of-results"]
    reasons = [_line(finding) for finding in found]
    paths = [path.resolve() for path in submission.logs]
    if len(set(paths)) < len(paths):
        reasons.append("a log is named twice: name three logs of three runs")
    for log in logs:
        for key, wanted in (("submission_benchmark", rules.BENCHMARK), ("submission_org", submission.org)):
            if log.value(key) not in (None, wanted):
                reasons.append(f"{log.path}: {key}: {log.value(key)}, not {wanted}: a log goes with what it says")
    return reasons


def _line(finding: Finding) -> str:
    place = f"{finding.file}:{finding.line}" if finding.line else str(finding.file)
    words = f"{finding.key}: {finding.found}" if finding.key else finding.found
    return f"{place}: {words}: {finding.remedy}"


def _incomplete(fields: Mapping[str, str], division: str) -> list[str]:
    reasons = [f"system: {name} is missing: {what}" for name, what in missing_fields(fields).items()]
    if fields["division"] != division:
        reasons.append(f"system: division: {fields['division']}, and --division says {division}: make them agree")
    status = fields.get("status")
    if status is not None and status not in rules.SYSTEM_STATUSES:
        reasons.append(f"system: status: {status}: must be one of {', '.join(rules.SYSTEM_STATUSES)}")
    return reasons


# ---------------------------------------------------------------------------------------------------- files


def _write(tree: Path, submission: Submission, logs: Sequence[Log], fields: Mapping[str, str]) -> None:
    write_json(tree / "systems" / f"{submission.system}.json", template(fields))
    for number, log in enumerate(logs):
        results = tree / "results" / submission.system / rules.BENCHMARK
        write_atomic(results / f"result_{number}.txt", log.path.read_bytes())
    code = tree / "benchmarks" / rules.BENCHMARK / "implementations" / submission.system
    folder = _code_folder(submission)
    if folder is not None:
        shutil.copytree(folder, code, ignore=_LEFT_OUT)
    for number, log in enumerate(logs):
        if _recipe_of(log).is_file():
            write_atomic(code / f"recipe_{number}.toml", _recipe_of(log).read_bytes())
    name = "RUNS.md" if (code / "README.md").exists() else "README.md"
    write_atomic(code / name, _readme(submission, logs, folder is not None))


def _readme(submission: Submission, logs: Sequence[Log], has_code: bool) -> str:
    source = cast("dict[str, Any]", collect_provenance([])["source"])
    commit = f" at commit {source['commit']}" if source.get("commit") else ""
    swerve_itself = f"Swerve {swerve.__version__}{commit}"
    where = "this folder" if has_code else submission.code or swerve_itself
    lines = [
        f"# {rules.BENCHMARK} on {submission.system}",
        "",
        f"Code: {where}. The tree was made by {swerve_itself}.",
        "",
        f"    pip install 'swerve[mlperf]=={swerve.__version__}'",
        "",
        "Training writes a log; the evaluation of the run's checkpoints finishes it:",
        "",
        "    swerve eval RUN/recipe.toml --manifest RUN/eval_checkpoints.jsonl",
        "",
    ]
    for number, log in enumerate(logs):
        seed, size = log.value("seed"), log.value("global_batch_size")
        lines += [
            f"- `result_{number}.txt`: seed {seed}, global batch size {size}, settings `{log.value('config_filename')}`"
            f"{_recorded(log)}",
            "",
            f"        {_command(log, number)}",
            "",
        ]
    return "\n".join(lines)


def _command(log: Log, number: int) -> str:
    """What repeats a run's training: its recipe as resolved where that is in the tree, else the recipe by its name."""
    if _recipe_of(log).is_file():
        return f"swerve train recipe_{number}.toml"
    return f"swerve train {log.value('config_filename')} --run.seed {log.value('seed')}"


def _recorded(log: Log) -> str:
    """What a run recorded of itself beside its log: command and commit."""
    try:
        record = json.loads((log.path.parent / "provenance.json").read_text(encoding="utf-8"))
        command = "swerve " + shlex.join(map(str, record["command"][1:]))
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    source = record.get("source", {})
    changed = " with changes" if source.get("dirty") else ""
    at = f", at commit {source['commit']}{changed}" if source.get("commit") else ""
    return f"{at}, started as `{command}`"


def _recipe_of(log: Log) -> Path:
    return log.path.parent / "recipe.toml"
