"""Reading and writing task files: one JSON object per line, plain or xz-compressed, strict both ways.

A file is read whole or refused whole. Every complaint names the file, the line and the key. Bytes are a function of
the tasks alone: keys are sorted, mappings keep no order, and compression settings are fixed.
"""

from __future__ import annotations

import difflib
import json
import lzma
import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from swerve.telemetry import write_atomic
from swerve.types import Limits, Mutation, Provenance, SwerveError, Task

SPLITS = ("train", "validation")
_WHOLE_TEXT_FAMILIES = ("functions", "mini")
"""Families whose records hold all that an agent starts from; others name an image that does."""
REPAIR_FILE = "repair.py"
"""The workspace file that holds the function to repair."""

_LIMIT_TYPES: Mapping[str, type] = {
    "max_turns": int,
    "episode_timeout_s": float,
    "command_timeout_s": float,
    "test_timeout_s": float,
}
_MUTATION_TYPES: Mapping[str, type] = {"kind": str, "line": int, "before": str, "after": str}
_PROVENANCE_TYPES: Mapping[str, type] = {
    "package": str,
    "version": str,
    "archive_sha256": str,
    "license": str,
    "file": str,
    "line": int,
    "qualname": str,
    "mutation": dict,
    "previous_version": str,
    "requires": list,
}
_OPTIONAL_PROVENANCE = ("mutation", "previous_version", "requires")
_TASK_TYPES: Mapping[str, type] = {
    "id": str,
    "family": str,
    "split": str,
    "image": str,
    "base_commit": str,
    "problem_statement": str,
    "workspace": dict,
    "visible_tests": list,
    "hidden_tests": list,
    "fail_to_pass": list,
    "pass_to_pass": list,
    "gold_patch": str,
    "limits": dict,
    "provenance": dict,
    "expected_statuses": dict,
}
_OPTIONAL = ("provenance", "limits", "expected_statuses")
_JSON_NAMES = {int: "an integer", float: "a number", str: "a string", dict: "an object", list: "a list of strings"}


class _Fault(Exception):
    """What is wrong with one record; the reader adds the file and the line."""


def shipped_file(family: str, split: str) -> Path:
    """The task file that ships with Swerve for a family (`functions`, `mini`) and a split (`train`, `validation`)."""
    return Path(__file__).parent / "data" / f"{family}_{split}.jsonl.xz"


def load_tasks(path: str | Path) -> list[Task]:
    """Read a task file.

    Args:
        path: A `.jsonl` or `.jsonl.xz` file.

    Returns:
        Its tasks, in file order.

    Raises:
        SwerveError: The file is missing, is no JSON lines, or holds an invalid or repeated record.
    """
    path = Path(path)
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(_read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            task = _read_line(line)
        except (_Fault, SwerveError) as fault:
            raise SwerveError(f"{path}:{number}: {fault}") from None
        if task.id in seen:
            raise SwerveError(f"{path}:{number}: key id: '{task.id}' is already the id of line {seen[task.id]}")
        seen[task.id] = number
        tasks.append(task)
    if not tasks:
        raise SwerveError(f"{path}: holds no tasks")
    return tasks


def load_split(train_path: str | Path, validation_path: str | Path) -> tuple[list[Task], list[Task]]:
    """Read the training and the held-out tasks of a run, and check that they are disjoint.

    Returns:
        Training tasks and validation tasks, each in file order.

    Raises:
        SwerveError: Either file is invalid, an id is in both, or a task says it belongs to the other split.
    """
    splits = []
    for split, path in zip(SPLITS, (train_path, validation_path), strict=True):
        tasks = load_tasks(path)
        for task in tasks:
            if task.split != split:
                raise SwerveError(f"{path}: key split: task '{task.id}' is of split '{task.split}', expected '{split}'")
        splits.append(tasks)
    train, validation = splits
    known = {task.id for task in train}
    for task in validation:
        if task.id in known:
            raise SwerveError(f"{validation_path}: key id: '{task.id}' is also a training task of {train_path}")
    return train, validation


def save_tasks(path: str | Path, tasks: Iterable[Task]) -> None:
    """Write a task file atomically; the same tasks always give the same bytes.

    Args:
        path: Where to; a name that ends in `.xz` is compressed.
        tasks: What to write, in this order. Ids must be unique.

    Raises:
        SwerveError: An id occurs twice.
        MachineError: The file cannot be written.
    """
    path = Path(path)
    seen: set[str] = set()
    lines = []
    for task in tasks:
        if task.id in seen:
            raise SwerveError(f"{path}: key id: '{task.id}' occurs twice")
        seen.add(task.id)
        lines.append(json.dumps(task_to_json(task), sort_keys=True, ensure_ascii=True, separators=(",", ":")))
    data = ("\n".join(lines) + "\n").encode()
    if path.name.endswith(".xz"):
        data = lzma.compress(data, format=lzma.FORMAT_XZ, check=lzma.CHECK_SHA256, preset=9)
    write_atomic(path, data)


def find_task(tasks: Iterable[Task], wanted: str, where: str) -> Task:
    """The task of an id.

    Args:
        tasks: Among which.
        wanted: The id.
        where: Named in the complaint.

    Raises:
        SwerveError: There is none; the closest ids are named.
    """
    by_id = {task.id: task for task in tasks}
    if wanted in by_id:
        return by_id[wanted]
    near = difflib.get_close_matches(wanted, by_id, n=3, cutoff=0.6) or list(by_id)[:1]
    raise SwerveError(f"no task {wanted} in {where}; there is, for example, {', '.join(near)}")


def gold_text(task: Task) -> str:
    """The right text of a task's file: its workspace with the gold patch, of one hunk, applied.

    Raises:
        SwerveError: The patch does not apply.
    """
    lines, broken = task.gold_patch.splitlines(keepends=True), task.workspace.get(REPAIR_FILE, "")
    hunk = re.match(r"@@ -(\d+)(?:,(\d+))? ", lines[2]) if len(lines) > 2 else None
    if hunk is None:
        raise SwerveError(f"task {task.id}: key gold_patch: not a unified diff of one hunk")
    start, count = int(hunk[1]) - 1, int(hunk[2] or 1)
    kept = broken.splitlines(keepends=True)
    before = [line[1:] for line in lines[3:] if line[:1] in (" ", "-")]
    if kept[start : start + count] != before:
        raise SwerveError(f"task {task.id}: key gold_patch: does not fit the text of {REPAIR_FILE}")
    after = [line[1:] for line in lines[3:] if line[:1] in (" ", "+")]
    return "".join([*kept[:start], *after, *kept[start + count :]])


def task_to_json(task: Task) -> dict[str, Any]:
    """The JSON object that stands for a task in a task file."""
    record: dict[str, Any] = {}
    for key, kind in _TASK_TYPES.items():
        value = getattr(task, key)
        record[key] = list(value) if kind is list else value
    record["workspace"] = dict(task.workspace)
    record["limits"] = {key: getattr(task.limits, key) for key in _LIMIT_TYPES}
    record["expected_statuses"] = dict(task.expected_statuses)
    if task.provenance is None:
        del record["provenance"]
    else:
        record["provenance"] = _provenance_to_json(task.provenance)
    return {key: value for key, value in record.items() if key != "expected_statuses" or value}


def _provenance_to_json(provenance: Provenance) -> dict[str, Any]:
    record = {key: getattr(provenance, key) for key in _PROVENANCE_TYPES}
    record["requires"] = list(provenance.requires)
    if provenance.mutation is not None:
        record["mutation"] = {key: getattr(provenance.mutation, key) for key in _MUTATION_TYPES}
    return {key: value for key, value in record.items() if key not in _OPTIONAL_PROVENANCE or value}


def task_from_json(record: Mapping[str, Any]) -> Task:
    """The task that a JSON object of a task file stands for.

    Raises:
        SwerveError: A key is missing, unknown, of the wrong type or contradicts another one.
    """
    try:
        return _task(dict(record))
    except _Fault as fault:
        raise SwerveError(f"task record: {fault}") from None


def _parse(line: str) -> dict[str, Any]:
    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        record: dict[str, Any] = {}
        for key, value in items:
            if key in record:
                raise _Fault(f"key {key}: given twice")
            record[key] = value
        return record

    try:
        record = json.loads(line, object_pairs_hook=pairs)
    except ValueError as error:
        raise _Fault(f"not a JSON object: {error}") from None
    if not isinstance(record, dict):
        raise _Fault("not a JSON object")
    return record


def _read_line(line: str) -> Task:
    """The task of one line: a record of this module's, or one of the benchmark's shape."""
    record = _parse(line)
    if "responses_create_params" not in record:
        return _task(record)
    from swerve.environments.r2egym.reference import read_reference

    task = read_reference(record)
    _check(task)
    return task


def _fields(
    record: Mapping[str, Any], types: Mapping[str, type[Any]], prefix: str, optional: tuple[str, ...] = ()
) -> dict[str, Any]:
    """Check one object's keys and the types of its values; integers stand for floats, too."""
    for key in record:
        if key not in types:
            raise _Fault(f"key {prefix}{key}: unknown; known are {', '.join(types)}")
    values: dict[str, Any] = {}
    for key, kind in types.items():
        if key not in record:
            if key in optional:
                continue
            raise _Fault(f"key {prefix}{key}: missing")
        value = record[key]
        if kind is float and type(value) is int:
            value = float(value)
        right = type(value) is kind
        if isinstance(value, list):
            right = right and all(type(item) is str for item in value)
        if not right:
            raise _Fault(f"key {prefix}{key}: expected {_JSON_NAMES[kind]}, found {json.dumps(value)[:60]}")
        values[key] = value
    return values


def _task(record: dict[str, Any]) -> Task:
    values = _fields(record, _TASK_TYPES, "", optional=_OPTIONAL)
    limits = _fields(values.get("limits", {}), _LIMIT_TYPES, "limits.", optional=tuple(_LIMIT_TYPES))
    values["limits"] = Limits(**limits)
    for key in _LIMIT_TYPES:
        if not getattr(values["limits"], key) > 0:
            raise _Fault(f"key limits.{key}: must be above 0")
    provenance = values.pop("provenance", None)
    if provenance is not None:
        values["provenance"] = _provenance(provenance)
    for key, kind in _TASK_TYPES.items():
        if kind is list:
            values[key] = tuple(values[key])
    task = Task(**values)
    _check(task)
    return task


def _provenance(record: dict[str, Any]) -> Provenance:
    fields = _fields(record, _PROVENANCE_TYPES, "provenance.", optional=_OPTIONAL_PROVENANCE)
    if "mutation" in fields:
        fields["mutation"] = Mutation(**_fields(fields["mutation"], _MUTATION_TYPES, "provenance.mutation."))
    elif not fields.get("previous_version"):
        raise _Fault("key provenance.mutation: missing, and there is no provenance.previous_version either")
    fields["requires"] = tuple(fields.get("requires", ()))
    return Provenance(**fields)


def _check(task: Task) -> None:
    """Rules between the keys of one record."""
    if not task.id:
        raise _Fault("key id: empty")
    if task.split not in SPLITS:
        raise _Fault(f"key split: '{task.split}' is none of {', '.join(SPLITS)}")
    if not task.workspace and task.family in _WHOLE_TEXT_FAMILIES:
        raise _Fault("key workspace: holds no file")
    for name, text in task.workspace.items():
        pure = PurePosixPath(name)
        if not name or pure.is_absolute() or ".." in pure.parts or str(pure) != name:
            raise _Fault(f"key workspace: '{name}' is no plain relative path")
        if not isinstance(text, str):
            raise _Fault(f"key workspace.{name}: expected a string")
    for key in ("visible_tests", "hidden_tests", "fail_to_pass", "pass_to_pass"):
        names = getattr(task, key)
        if len(set(names)) != len(names):
            raise _Fault(f"key {key}: names a test twice")
    visible, hidden = set(task.visible_tests), set(task.hidden_tests)
    failing, passing = set(task.fail_to_pass), set(task.pass_to_pass)
    for left, right, names in (
        ("hidden_tests", "visible_tests", visible & hidden),
        ("pass_to_pass", "fail_to_pass", failing & passing),
    ):
        if names:
            raise _Fault(f"key {left}: '{min(names)}' is in {right}, too")
    stray = (visible | hidden) ^ (failing | passing)
    if stray:
        raise _Fault(
            f"key fail_to_pass: test '{min(stray)}' must be in exactly one of visible_tests, hidden_tests and in "
            "exactly one of fail_to_pass, pass_to_pass"
        )
    if not visible & failing and task.family in _WHOLE_TEXT_FAMILIES:
        raise _Fault("key visible_tests: none of them is in fail_to_pass")
    if not failing:
        raise _Fault("key fail_to_pass: names no test")
    for name, status in task.expected_statuses.items():
        if name not in failing | passing:
            raise _Fault(f"key expected_statuses: '{name}' is in neither fail_to_pass nor pass_to_pass")
        if not isinstance(status, str):
            raise _Fault(f"key expected_statuses.{name}: expected a string")


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise SwerveError(f"{path}: no such task file") from None
    except OSError as error:
        raise SwerveError(f"{path}: cannot be read: {error.strerror}") from None
    try:
        if path.name.endswith(".xz"):
            data = lzma.decompress(data, format=lzma.FORMAT_XZ)
        return data.decode("utf-8")
    except (lzma.LZMAError, EOFError):
        raise SwerveError(f"{path}: not a whole xz file; fetch or write it again") from None
    except UnicodeDecodeError as error:
        raise SwerveError(f"{path}: not UTF-8 at byte {error.start}") from None
