"""The checkers of `mlperf-logging`, run in this process and read as findings.

They keep state in globals, write to the root logger, leave files beside what they check and stop with tracebacks; all
of that is contained here. What they check is a copy made of links.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import re
import tempfile
import warnings
from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from swerve.config import laws
from swerve.mlperf import rules
from swerve.mlperf.findings import ERROR, WARNING, Finding
from swerve.mlperf.own_checks import value_kind
from swerve.mlperf.read_log import Log
from swerve.types import MachineError, SwerveError


def checker(module: str) -> Any:
    """A module of `mlperf-logging`.

    Args:
        module: Its name below the package.

    Returns:
        The module.

    Raises:
        MachineError: It is not installed.
    """
    try:
        return importlib.import_module(f"mlperf_logging.{module}")
    except ImportError as error:
        raise MachineError("mlperf-logging is missing: pip install 'swerve[mlperf]'") from error


def require_ruleset(ruleset: str) -> None:
    """Refuses a ruleset that the checkers do not know.

    Raises:
        SwerveError: They know others, which are named.
    """
    known = sorted(checker("compliance_checker.mlp_compliance").rule_choices())
    if ruleset not in known:
        raise SwerveError(f"--ruleset {ruleset}: unknown; one of {', '.join(known)}")


def run_compliance(log: Log, ruleset: str) -> list[Finding]:
    """Runs the compliance checker on one log.

    Args:
        log: The log.
        ruleset: Such as 6.1.0.

    Returns:
        Its findings; it keeps at most one of each key.
    """
    module = checker("compliance_checker.mlp_compliance")
    made = module.make_checker(usage="training", ruleset=ruleset, quiet=False, werror=False)
    module.enqueued_configs.clear()
    found: list[Finding] = []
    try:
        with contained():
            made.check_file(str(log.path), f"training_{ruleset}/common.yaml")
    except Exception as error:
        found = [Finding(kind="checker-crash", file=log.path, found=f"{type(error).__name__}: {error}")]
    finally:
        module.enqueued_configs.clear()
    found += [_read_message(log, text, WARNING) for text in made.warnings.values()]
    found += [_read_message(log, text, ERROR) for text in (*made.overwritable.values(), *made.not_overwritable)]
    return [_by("compliance_checker", finding) for finding in found]


def run_convergence(logs: Sequence[Log], folder: Path, ruleset: str) -> list[Finding]:
    """Runs the checker of reference convergence on the logs of one result.

    Args:
        logs: The logs, whatever their names.
        folder: Where they are.
        ruleset: Such as 6.1.0.

    Returns:
        Its findings.
    """
    module = checker("rcp_checker.rcp_checker")
    with tempfile.TemporaryDirectory(prefix="swerve-rcp-") as place, contained():
        for number, log in enumerate(logs):
            (Path(place) / f"result_{number}.txt").symlink_to(log.path.resolve())
        try:
            passed, words, _ = module.check_directory(place, "training", ruleset, False, False, rcp_pass="pruned_rcps")
        except Exception as error:
            crash = Finding(kind="checker-crash", file=folder, found=f"{type(error).__name__}: {error}")
            return [_by("rcp_checker", crash)]
    if passed:
        return []
    kind = next((kind for start, kind in _CONVERGENCE if words.startswith(start)), "too-fast")
    return [_by("rcp_checker", Finding(kind=kind, file=folder, found=words))]


_CONVERGENCE = (
    ("Could not detect", "no-batch-size"),
    ("Insufficient", "not-converged"),
    ("Missing RCP", "no-reference"),
    ("Cannot find", "no-reference"),
)
"""How refusals begin, and what they are; the rest converged too fast."""


def run_system(path: Path, ruleset: str) -> list[Finding]:
    """Runs the checker of system descriptions.

    Args:
        path: `systems/SYSTEM.json`.
        ruleset: Such as 6.1.0.

    Returns:
        Its findings.
    """
    module = checker("system_desc_checker.system_desc_checker")
    try:
        with contained() as said:
            valid, *_ = module.check_system_desc(str(path), "training", ruleset)
    except Exception as error:
        crash = Finding(kind="checker-crash", file=path, found=f"{type(error).__name__}: {error}")
        return [_by("system_desc_checker", crash)]
    if valid:
        return []
    reasons = "; ".join(record.getMessage().partition(" : ")[2] for record in said if record.levelno >= logging.ERROR)
    missing = re.findall(r"Missing field ([\w-]+)", reasons)
    found = [
        Finding(kind="missing-system-field", file=path, key=name, found=f"missing: {rules.SYSTEM_FIELDS[name]}")
        for name in missing
    ]
    if "Field status" in reasons:
        found.append(Finding(kind="system-status", file=path, key="status", found=reasons.strip("[]'\"")))
    found = found or [Finding(kind="system-refused", file=path, found=reasons)]
    return [_by("system_desc_checker", finding) for finding in found]


def run_package(tree: Path, ruleset: str) -> list[Finding]:
    """Runs the package checker on a submission tree.

    Args:
        tree: The folder of an organisation: `systems`, `results`, `benchmarks`.
        ruleset: Such as 6.1.0.

    Returns:
        What it says of the tree as a whole; what it says of single logs and descriptions, the other checkers say too.
    """
    module = checker("package_checker.package_checker")
    with tempfile.TemporaryDirectory(prefix="swerve-package-") as place:
        copy = Path(place) / tree.resolve().name
        mirror(tree, copy)  # the checker writes scaling.json beside results
        try:
            with contained() as said:
                module.check_training_package(str(copy), "training", ruleset, False, False, False, False, False, "")
        except Exception as error:
            crash = Finding(kind="checker-crash", file=tree, found=f"{type(error).__name__}: {error}")
            return [_by("package_checker", crash)]
    found: list[Finding] = []
    folder = tree
    for record in said:
        words = record.getMessage().strip().replace(str(copy), str(tree))
        if words.startswith("Running compliance checks in dir "):
            folder = Path(words.removeprefix("Running compliance checks in dir "))
        finding = _read_package_words(record, words, folder) if record.module in _OF_PACKAGE else None
        if finding is not None:
            found.append(_by("package_checker", finding))
    return found


_OF_PACKAGE = ("package_checker", "seed_checker")
_PACKAGE_WORDS = (
    ("Incorrect number of files", "number-of-results"),
    ("Unknown files", "unknown-file"),
    ("Skipping benchmark", "unknown-benchmark"),
    ("Seed checker failed and found", "seeds"),
)
_SAID_ELSEWHERE = ("System description file checker failed", "Seed checker failed", "RCP Test Failed", "Detected ")


def _read_package_words(record: logging.LogRecord, words: str, folder: Path) -> Finding | None:
    if record.levelno < logging.WARNING:
        return None
    severity = ERROR if record.levelno >= logging.ERROR else WARNING
    kind = next((kind for start, kind in _PACKAGE_WORDS if words.startswith(start)), None)
    if kind is None and words.startswith(_SAID_ELSEWHERE):
        return None
    if "do not comply" in words or "does not comply" in words:
        kind = "one-bad-log" if severity == WARNING else "bad-logs"
    return Finding(kind=kind or "package-refused", file=folder, found=" ".join(words.split()), severity=severity)


def mirror(source: Path, copy: Path) -> None:
    """Copies a folder as folders of links to its files."""
    copy.mkdir(parents=True)
    for path in sorted(source.iterdir()):
        if path.is_dir():
            mirror(path, copy / path.name)
        else:
            (copy / path.name).symlink_to(path.resolve())


class _Keeper(logging.Handler):
    def __init__(self, said: list[logging.LogRecord]) -> None:
        super().__init__()
        self._said = said

    def emit(self, record: logging.LogRecord) -> None:
        self._said.append(record)


@contextlib.contextmanager
def contained() -> Generator[list[logging.LogRecord]]:
    """Keeps what checkers say from the terminal and from other loggers; yields it as it is said."""
    said: list[logging.LogRecord] = []
    root = logging.getLogger()
    handlers, level, disabled = root.handlers[:], root.level, logging.root.manager.disable
    root.handlers[:] = [_Keeper(said)]
    root.setLevel(logging.INFO)
    logging.disable(logging.NOTSET)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield said
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.disable(disabled)


# ---------------------------------------------------------------------------------------------------- messages


def _read_message(log: Log, text: str, severity: str) -> Finding:
    """One message of the compliance checker as a finding."""
    first = text.partition("\n")[0]
    if match := re.match(r"Required (\S+) occurrence of '(\w+)'(?: or '(\w+)')? ?(?:but found (\d+))?(.*)", first):
        return _occurrences(log, match, severity)
    if match := re.match(r"CHECK for '(\w+)' failed in line (\d+)", first):
        key, line = match[1], log.token_lines[int(match[2])]
        return _failed_check(log, key, line, text, severity)
    if match := re.match(r"Failed checks for (\w+) : ", first):
        return _no_passing(log, match[1], first, severity)
    if "Failed executing" in first:
        record = next((record for record in log.records if f'"key": "{record.key}"' in text), None)
        key = record.key if record else ""
        what = f"the test {' '.join(text.splitlines()[1].split())} cannot be computed"
        line = record.line if record else 0
        kind = "bad-accuracy" if key == "eval_accuracy" else "wrong-order"
        return Finding(kind=kind, file=log.path, line=line, key=key, found=what, severity=severity)
    if first.startswith("Log lines had parsing errors"):
        fault = next((fault for fault in log.faults if fault.kind in ("torn", "broken")), None)
        kind = "torn-line" if fault is None or fault.kind == "torn" else "broken-line"
        line = fault.line if fault else 0
        return Finding(kind=kind, file=log.path, line=line, found=first, severity=severity)
    if first.startswith("No log lines"):
        return Finding(kind="empty-log", file=log.path, found=first, severity=severity)
    return Finding(kind="failed-check", file=log.path, found=first, severity=severity)


def _occurrences(log: Log, match: re.Match[str], severity: str) -> Finding:
    key, other, count = match[2], match[3], int(match[4] or 0)
    if count > 1:
        line = next((record.line for record in log.all(key)[1:]), 0)
        what = f"{count} records, exactly one is asked for{match[5]}"
        return Finding(kind="repeated-key", file=log.path, line=line, key=key, found=what, severity=severity)
    kind = "not-finished" if key == "run_stop" else "missing-key"
    what = f"missing{f', and so is {other}' if other else ''}; it tells {rules.KEYS.get(key, 'what the ruleset asks')}"
    return Finding(kind=kind, file=log.path, key=key, found=what, severity=severity)


def _failed_check(log: Log, key: str, line: int, text: str, severity: str) -> Finding:
    record = next(record for record in log.records if record.line == line)
    test = re.search(r"\nfailed test: (.*?)\n", text, re.DOTALL)
    found, kind = f"{record.value!r} fails {' '.join(test[1].split()) if test else 'its test'}", "failed-check"
    expected = rules.expected_value(key, log.value("submission_division"), log.value("global_batch_size"))
    if expected is not None and not rules.is_expected(record.value, expected):
        found, kind = f"{record.value!r}, expected {expected!r}", value_kind(key)
    elif key == "eval_accuracy" and test and "next_validation_samples" in test[1]:
        wanted = _context(text).get("next_validation_samples")
        found, kind = f"at {record.samples_count} samples, expected {wanted}", "evaluation-gap"
    elif key == "eval_accuracy":
        kind = "bad-accuracy"
    elif key == "init_stop" and test and "first_init_start" in test[1]:
        kind = "init-too-long"
    elif key in ("submission_benchmark", "submission_division"):
        kind = f"unknown-{key.removeprefix('submission_')}"
    return Finding(kind=kind, file=log.path, line=line, key=key, found=found, severity=severity)


def _no_passing(log: Log, key: str, words: str, severity: str) -> Finding:
    values = [record for record in log.all(key) if isinstance(record.value, int | float)]
    if key != "eval_accuracy" or not values:
        return Finding(kind="failed-check", file=log.path, key=key, found=words, severity=severity)
    best = max(values, key=lambda record: record.value)
    kind = "accuracy-at-target" if best.value >= laws.TARGET_ACCURACY else "accuracy-below-target"
    what = f"at most {best.value}, expected above {laws.TARGET_ACCURACY}"
    return Finding(kind=kind, file=log.path, line=best.line, key=key, found=what, severity=severity)


def _context(text: str) -> dict[str, Any]:
    """The state that a message shows."""
    match = re.search(r"current context\[s\]=(\{.*?\n\})", text, re.DOTALL)
    return json.loads(match[1]) if match else {}


def _by(name: str, finding: Finding) -> Finding:
    return replace(finding, checker=name)
