"""Checks that run before those of `mlperf-logging`: what these would crash on, or pass without a word."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from swerve.config import laws
from swerve.mlperf import rules
from swerve.mlperf.findings import ERROR, WARNING, Finding
from swerve.mlperf.read_log import Log, LogRecord

_LINE_KINDS = {
    "torn": "torn-line",
    "glued": "glued-lines",
    "broken": "broken-line",
    "incomplete": "incomplete-line",
}
_WORDS = (
    ("foreign-accuracy", ("eval_accuracy", "eval_error"), ("eval_accuracy",)),
    ("foreign-batch-size", ("global_batch_size",), ("global_batch_size",)),
    ("foreign-benchmark", ("submission_benchmark",), ("submission_benchmark",)),
)
"""Words that the reader of convergence searches lines for, and the key whose lines may hold them."""


def is_accuracy(record: LogRecord) -> bool:
    """Whether an `eval_accuracy` record can be read: a number from 0 to 1, with the samples it was reached at."""
    value = record.value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 <= value <= 1 and record.samples_count is not None


def check_log(log: Log) -> list[Finding]:
    """Looks at one log.

    Args:
        log: The log.

    Returns:
        What is wrong with it, in the order of the file where it has one.
    """
    if not log.records and not log.faults:
        return [Finding(kind="empty-log", file=log.path, found="no line with :::MLLOG")]
    looks: tuple[Callable[[Log], Iterator[Finding]], ...] = (
        *(_lines, _head, _missing, _words, _values, _repeated, _clock),
        *(_outcome, _evaluations, _seeds),
    )
    return [finding for look in looks for finding in look(log)]


def check_set(logs: Sequence[Log], folder: Path, division: object) -> list[Finding]:
    """Looks at the logs of one benchmark on one system.

    Args:
        logs: The logs.
        folder: Where they are.
        division: `closed` or `open`, as the system's description or the logs have it.

    Returns:
        What is wrong with them together.
    """
    found: list[Finding] = []
    for kind, key in (
        ("mixed-batch-sizes", "global_batch_size"),
        ("mixed-benchmarks", "submission_benchmark"),
        ("mixed-divisions", "submission_division"),
    ):
        values = {json.dumps(log.value(key)) for log in logs}
        if len(values) > 1:
            found.append(Finding(kind=kind, file=folder, key=key, found=", ".join(sorted(values))))
    if len(logs) != rules.NUM_RESULTS:
        what = f"{len(logs)} logs where {rules.NUM_RESULTS} are asked for"
        found.append(Finding(kind="number-of-results", file=folder, found=what, severity=WARNING))
    if any(log.value("submission_division") not in (None, division) for log in logs):
        logged = ", ".join(sorted({str(log.value("submission_division")) for log in logs}))
        what = f"{division}, and the logs say {logged}"
        found.append(Finding(kind="system-division", file=folder, key="division", found=what))
    owners: dict[object, Log] = {}
    for log in logs:
        for record in log.all("seed"):
            before = owners.setdefault(json.dumps(record.value), log)
            if before is not log:
                what = f"{record.value}, as in {before.path.name}"
                found.append(Finding(kind="equal-seeds", file=log.path, line=record.line, key="seed", found=what))
    return found


def check_system(path: Path) -> list[Finding]:
    """Looks at the description of a system.

    Args:
        path: `systems/SYSTEM.json`.

    Returns:
        What is wrong with it; the checker names missing fields too, but not beside a wrong status, and stops with a
        traceback at numbers.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return [Finding(kind="no-system", file=path, found="missing")]
    except ValueError as error:
        return [Finding(kind="bad-system", file=path, found=str(error))]
    if not isinstance(document, dict):
        return [Finding(kind="bad-system", file=path, found="not an object")]
    fields = cast("dict[str, Any]", document)
    found: list[Finding] = []
    for name, what in rules.SYSTEM_FIELDS.items():
        if name not in fields:
            found.append(Finding(kind="missing-system-field", file=path, key=name, found=f"missing: {what}"))
        elif not isinstance(fields[name], str):
            what = f"{json.dumps(fields[name])} is no text"
            found.append(Finding(kind="system-field-type", file=path, key=name, found=what))
    status = fields.get("status")
    if "status" in fields and status not in rules.SYSTEM_STATUSES:
        what = f"{status}; one of: {', '.join(rules.SYSTEM_STATUSES)}"
        found.append(Finding(kind="system-status", file=path, key="status", found=what))
    if "division" in fields and fields["division"] not in rules.DIVISIONS:
        what = f"{fields['division']} is neither closed nor open"
        found.append(Finding(kind="system-division", file=path, key="division", found=what))
    return found


# ---------------------------------------------------------------------------------------------------- one log


def _lines(log: Log) -> Iterator[Finding]:
    for fault in log.faults:
        found = f"{fault.reason}: {fault.text[:60]}"
        yield Finding(kind=_LINE_KINDS[fault.kind], file=log.path, line=fault.line, found=found)


def _head(log: Log) -> Iterator[Finding]:
    benchmark, division = log.first("submission_benchmark"), log.first("submission_division")
    if benchmark is not None and not isinstance(benchmark.value, str):
        yield _about(log, benchmark, "unknown-benchmark", f"{benchmark.value} is no text")
    if division is not None and division.value not in rules.DIVISIONS:
        yield _about(log, division, "unknown-division", f"{division.value}")


def _missing(log: Log) -> Iterator[Finding]:
    if log.value("submission_benchmark", rules.BENCHMARK) != rules.BENCHMARK:
        return
    for key in rules.REQUIRED:
        if log.first(key) is None:
            yield Finding(kind="missing-key", file=log.path, key=key, found=f"missing; it tells {rules.KEYS[key]}")


def _words(log: Log) -> Iterator[Finding]:
    for record in log.records:
        text = json.dumps([record.key, record.value, dict(record.metadata)])
        for kind, words, owners in _WORDS:
            word = next((word for word in words if word in text), None)
            if word is not None and record.key not in owners:
                yield _about(log, record, kind, f"the word {word} in a line of {record.key}")


def _values(log: Log) -> Iterator[Finding]:
    for record in log.records:
        if isinstance(record.value, str) and re.search(r"@\w+@|\$\{\w+\}|<\w*TODO\w*>", record.value):
            yield _about(log, record, "placeholder", record.value, WARNING)
    if log.value("submission_benchmark") != rules.BENCHMARK:
        return
    division, size = log.value("submission_division"), log.value("global_batch_size")
    for record in log.records:
        expected = rules.expected_value(record.key, division, size)
        if expected is not None and not rules.is_expected(record.value, expected):
            yield _about(log, record, value_kind(record.key), f"{record.value!r}, expected {expected!r}")


def value_kind(key: str) -> str:
    """Which explanation a wrong value of this key has."""
    return "law-value" if key not in rules.FIXED_IN_CLOSED and key in rules.KEYS else "wrong-value"


def _repeated(log: Log) -> Iterator[Finding]:
    """Keys of the run's head, logged again; the checker only warns where the values agree."""
    for key in rules.KEYS:
        if key in _MANY:
            continue
        records = log.all(key)
        if len(records) > 1:
            values = [json.dumps(record.value) for record in records]
            lines = ", ".join(str(record.line) for record in records)
            what = f"{len(records)} records (lines {lines}): {', '.join(values)}"
            yield _about(log, records[1], "repeated-key", what, WARNING if len(set(values)) == 1 else ERROR)


_MANY = frozenset(
    (
        *("cache_clear", "init_start", "block_start", "block_stop", "eval_start", "eval_stop"),
        *("eval_accuracy", "seed"),
    )
)
"""Keys that may be logged more than once."""


def _clock(log: Log) -> Iterator[Finding]:
    start, stop = log.first("run_start"), log.last("run_stop")
    if start is not None and stop is not None and stop.time_ms < start.time_ms:
        what = f"run_stop is dated {(start.time_ms - stop.time_ms) / 1000:.3f} s before run_start"
        yield _about(log, stop, "clock", what)
    begun, ready = log.all("init_start"), log.first("init_stop")
    limit = rules.INIT_LIMIT_MINUTES.get(str(log.value("submission_division")))
    if begun and ready is not None and limit is not None:
        minutes = (ready.time_ms - min(record.time_ms for record in begun)) / 60_000
        if minutes >= limit:
            yield _about(log, ready, "init-too-long", f"{minutes:.1f} minutes, at most {limit}")


def _outcome(log: Log) -> Iterator[Finding]:
    stop = log.last("run_stop")
    if stop is None:
        trained = log.first("block_stop") is not None
        state = "training has ended and no evaluation has stopped the clock" if trained else "training has not ended"
        yield Finding(kind="not-finished", file=log.path, key="run_stop", found=f"no run_stop: {state}")
        return
    status = stop.metadata.get("status")
    if status == "aborted":
        yield _about(log, stop, "run-aborted", "metadata.status is aborted")
    elif status != "success":
        yield _about(log, stop, "bad-status", f"metadata.status is {status!r}")


def _evaluations(log: Log) -> Iterator[Finding]:
    records = log.all("eval_accuracy")
    for record in records:
        if not is_accuracy(record):
            what = f"{record.value!r}, samples_count {record.metadata.get('samples_count')!r}"
            yield _about(log, record, "bad-accuracy", what)
    good = [record for record in records if is_accuracy(record)]
    if not good:
        return
    passing = [place for place, record in enumerate(good) if record.value >= laws.TARGET_ACCURACY]
    best = max(good, key=lambda record: record.value)
    if not passing:
        what = f"at most {best.value:.4f}, expected above {laws.TARGET_ACCURACY}"
        yield _about(log, best, "accuracy-below-target", what)
    elif best.value == laws.TARGET_ACCURACY:
        yield _about(log, best, "accuracy-at-target", f"{best.value}, and none above")
    for record in good[passing[0] + 1 :] if passing else ():
        first = good[passing[0]]
        what = f"at {record.samples_count} samples, after {first.value:.4f} had passed at {first.samples_count}"
        yield _about(log, record, "extra-evaluation", what)
    yield from _gaps(log, good)


def _gaps(log: Log, evaluations: Sequence[LogRecord]) -> Iterator[Finding]:
    size = log.value("global_batch_size")
    if not rules.is_batch_size(size):
        return
    if log.value("submission_division") != "closed":
        for before, record in itertools.pairwise(evaluations):
            if (record.samples_count or 0) <= (before.samples_count or 0):
                what = f"at {record.samples_count} samples, after {before.samples_count}"
                yield _about(log, record, "evaluation-gap", what)
        return
    expected = int(size) * laws.first_evaluation_step(int(size))
    for record in evaluations:
        if record.samples_count != expected:
            yield _about(log, record, "evaluation-gap", f"at {record.samples_count} samples, expected {expected}")
            return
        expected += int(size)


def _seeds(log: Log) -> Iterator[Finding]:
    seeds = log.all("seed")
    if not seeds and log.value("submission_division") == "closed":
        yield Finding(kind="no-seed", file=log.path, key="seed", found="no record of it")
    for record in seeds:
        if not isinstance(record.value, int) or isinstance(record.value, bool):
            yield _about(log, record, "no-seed", f"{record.value!r} is no integer")


def _about(log: Log, record: LogRecord, kind: str, found: str, severity: str = ERROR) -> Finding:
    return Finding(kind=kind, file=log.path, line=record.line, key=record.key, found=found, severity=severity)


def system_fields(path: Path) -> Mapping[str, Any]:
    """Fields of a system's description; none where it cannot be read."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", document) if isinstance(document, dict) else {}
