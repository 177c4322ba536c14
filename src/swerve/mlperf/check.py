"""`swerve mlperf check`: a log, a folder of logs or a submission tree, looked at by every checker that applies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swerve.mlperf import checkers, rules
from swerve.mlperf.findings import OWN_CHECKER, Finding
from swerve.mlperf.own_checks import check_log, check_set, check_system, system_fields
from swerve.mlperf.read_log import TOKEN, Log, read_log
from swerve.types import SwerveError


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What came of a check.

    Attributes:
        path: What was checked.
        kind: `log`, `folder` or `tree`.
        ruleset: Version of the rules.
        logs: Every log that was looked at.
        checkers: Every checker that ran, in order; `swerve` is this package's own.
        findings: What they object to, by file.
    """

    path: Path
    kind: str
    ruleset: str
    logs: tuple[Path, ...]
    checkers: tuple[str, ...]
    findings: tuple[Finding, ...]

    def to_json(self) -> dict[str, object]:
        """The verdict as JSON values."""
        return {
            "path": str(self.path),
            "kind": self.kind,
            "ruleset": self.ruleset,
            "checkers": list(self.checkers),
            "logs": [str(path) for path in self.logs],
            "clean": not self.findings,
            "findings": [finding.to_json() for finding in self.findings],
        }


def check(path: Path, ruleset: str = rules.RULESET) -> Verdict:
    """Checks what a path holds.

    Args:
        path: A log; a folder of logs, or of such folders; a tree with `results` and `systems`, or the folder it is in.
        ruleset: Version of the rules.

    Returns:
        The verdict.

    Raises:
        SwerveError: There is nothing to check, or the ruleset is unknown.
        MachineError: `mlperf-logging` is missing.
    """
    checkers.require_ruleset(ruleset)
    if not path.is_dir():
        log = read_log(path)
        found = merge(check_log(log), checkers.run_compliance(log, ruleset))
        return _verdict(path, "log", ruleset, [log], ("compliance_checker",), found)
    trees = [path] if (path / "results").is_dir() else _trees(path)
    if len(trees) > 1:
        raise SwerveError(f"{path}: holds several trees: name one of {', '.join(map(str, trees))}")
    if trees:
        return _check_tree(trees[0], ruleset)
    groups = find_logs(path)
    if not groups:
        raise SwerveError(f"{path}: no log in it: name a log, a folder of logs, or a folder with results/ and systems/")
    found: list[Finding] = []
    ran = {"compliance_checker": True}
    for folder, logs in groups.items():
        found += _check_group(folder, logs, _division(logs), ruleset)
        ran |= {"rcp_checker": True} if _division(logs) == "closed" else {}
    return _verdict(path, "folder", ruleset, [log for logs in groups.values() for log in logs], tuple(ran), found)


def find_logs(folder: Path) -> dict[Path, list[Log]]:
    """Logs of a folder and of the folders below it.

    Args:
        folder: Where to look; hidden files are left out.

    Returns:
        By folder, in the order of names: every file that holds the token, and every `result_*.txt`.
    """
    groups: dict[Path, list[Log]] = {}
    for path in sorted(folder.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(folder).parts)
        if path.is_file() and not hidden and _is_log(path):
            groups.setdefault(path.parent, []).append(read_log(path))
    return groups


def merge(own: Sequence[Finding], theirs: Sequence[Finding]) -> list[Finding]:
    """One finding where this package and a checker found the same; the words of the first, the name of the second."""
    found = list(own)
    for finding in theirs:
        same = [place for place, mine in enumerate(found) if _subject(mine) == _subject(finding)]
        if same:
            place = next((place for place in same if found[place].line == finding.line), same[0])
            found[place] = replace(found[place], checker=finding.checker)
        else:
            found.append(finding)
    return found


def _subject(finding: Finding) -> tuple[object, ...]:
    return finding.file, finding.kind, finding.key


def _trees(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if (path / "results").is_dir() and (path / "systems").is_dir()]


def _is_log(path: Path) -> bool:
    """Whether a file is a log by its name or holds the token; binary files, such as weights, are not read through."""
    if path.match("result_*.txt"):
        return True
    try:
        with path.open("rb") as file:
            if b"\0" in file.read(4096):
                return False
            file.seek(0)
            return any(TOKEN.encode() in line for line in file)
    except OSError:
        return True  # reading it says why it cannot be


def _division(logs: Sequence[Log]) -> object:
    return next((value for log in logs if (value := log.value("submission_division")) is not None), None)


def _check_group(folder: Path, logs: Sequence[Log], division: object, ruleset: str) -> list[Finding]:
    """Every log, then all together."""
    found: list[Finding] = []
    for log in logs:
        found += merge(check_log(log), checkers.run_compliance(log, ruleset))
    together = check_set(logs, folder, division)
    if division == "closed" and all(log.value("submission_benchmark") == rules.BENCHMARK for log in logs):
        together = merge(together, checkers.run_convergence(logs, folder, ruleset))
    return found + together


def _check_tree(tree: Path, ruleset: str) -> Verdict:
    ran = {"compliance_checker": True, "system_desc_checker": True}
    found: list[Finding] = []
    logs: list[Log] = []
    whole = True
    folders = [path for path in sorted((tree / "results").glob("*/*")) if path.is_dir()]
    for folder in folders:
        description = tree / "systems" / f"{folder.parent.name}.json"
        fields = system_fields(description)
        whole = whole and "division" in fields
        group = [read_log(path) for path in sorted(folder.glob("result_*.txt"))]
        found += _check_group(folder, group, fields.get("division", _division(group)), ruleset)
        ran |= {"rcp_checker": True} if fields.get("division") == "closed" else {}
        logs += group
        if not (tree / "benchmarks" / folder.name / "implementations").is_dir():
            what = f"no benchmarks/{folder.name}/implementations"
            found.append(Finding(kind="no-code", file=tree, found=what, severity="warning"))
    named = [tree / "systems" / f"{folder.parent.name}.json" for folder in folders]
    for description in dict.fromkeys([*named, *sorted((tree / "systems").glob("*.json"))]):
        theirs = checkers.run_system(description, ruleset) if system_fields(description) else []
        found += merge(check_system(description), theirs)
    if not logs:
        found.append(Finding(kind="no-results", file=tree, found="no results/SYSTEM/BENCHMARK/result_*.txt"))
    elif whole:  # it stops with a traceback where a description is missing
        ran |= {"package_checker": True}
        found = merge(found, checkers.run_package(tree, ruleset))
    return _verdict(tree, "tree", ruleset, logs, tuple(ran), found)


def _verdict(
    path: Path, kind: str, ruleset: str, logs: Iterable[Log], ran: tuple[str, ...], found: Iterable[Finding]
) -> Verdict:
    return Verdict(
        path=path,
        kind=kind,
        ruleset=ruleset,
        logs=tuple(log.path for log in logs),
        checkers=(OWN_CHECKER, *ran),
        findings=tuple(sorted(found, key=lambda finding: (str(finding.file), finding.line))),
    )
