"""Rows of R2E-Gym-Subset: read from JSON lines or parquet, one at a time, and checked key by key."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swerve.environments.r2egym.fields import Key, check, optional, parse, text
from swerve.environments.r2egym.harness import STATUSES, summary_statuses
from swerve.types import SwerveError

_KEYS: Mapping[str, Key] = {
    "repo_name": text(),
    "docker_image": text(),
    "commit_hash": text(),
    "parsed_commit_content": text(),
    "execution_result_content": text(),
    "expected_output_json": text(),
    "problem_statement": text(),
    "prompt": optional(str),
    "modified_files": optional(list, str),
    "relevant_files": optional(list, str),
    "modified_entity_summaries": optional(list, dict, str),
    "num_non_test_files": optional(int, float),
    "num_non_test_func_methods": optional(int, float),
    "num_non_test_lines": optional(int, float),
    # What task files that were made of such rows add.
    "instance_id": optional(str),
    "base_commit": optional(str),
    "repo": optional(str),
    "dataset_name": optional(str),
    "split": optional(str),
    "version": optional(str),
    "patch": optional(str),
    "test_patch": optional(str),
    "hints_text": optional(str),
    "created_at": optional(str),
    "environment_setup_commit": optional(str),
    "FAIL_TO_PASS": optional(str, list),
    "PASS_TO_PASS": optional(str, list),
}
_COMMIT_KEYS: Mapping[str, Key] = {"old_commit_hash": text(), "file_diffs": Key((list,))}
_HASH = re.compile(r"[0-9a-f]{7,40}")
_COLOUR = re.compile(r"(?:\x1b|\\u001b)\[\d+m")
_PARQUET_BATCH_ROWS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A row whose keys are as they should be; what they hold is read when it is asked for.

    Attributes:
        record: The row as it stands.
    """

    record: Mapping[str, Any]

    def names(self) -> list[str]:
        """Ids that the row answers to, in lower case; `ORGANISATION__` before one of them changes nothing.

        The dataset has no column of ids. In use are its images' names, and names of repository and commit.
        """
        repository, commit = self.record["repo_name"], self.record["commit_hash"]
        image, _, tag = self.record["docker_image"].rpartition("/")[2].partition(":")
        names = [self.record.get("instance_id") or "", f"{repository}__{commit}", f"{repository}-{commit}"]
        names += [f"{image}_{tag}", f"{image}-{tag}"] if tag else []
        return sorted({name.lower() for name in names if name})

    def base_commit(self) -> str:
        """The commit that the repository is at: as recorded, which may be `COMMIT^` of the one that holds the fix."""
        return self.record.get("base_commit") or self.commit()["old_commit_hash"]

    def commit(self) -> dict[str, Any]:
        """The commit that holds the fix, file by file.

        Raises:
            SwerveError: A key is at fault.
        """
        key = "parsed_commit_content"
        return check(parse(self.record[key], key), _COMMIT_KEYS, f"{key}.", strict=False)

    def expected(self) -> dict[str, str]:
        """Status per test once the fault is mended.

        Raises:
            SwerveError: The key is at fault.
        """
        key = "expected_output_json"
        told = parse(self.record[key], key)
        if not isinstance(told, dict) or not told:
            raise SwerveError(f"key {key}: expected an object with a status per test")
        statuses = {}
        for name in sorted(told):
            if told[name] not in STATUSES:
                raise SwerveError(f"key {key}.{name}: {json.dumps(told[name])[:60]} is none of {', '.join(STATUSES)}")
            statuses[_COLOUR.sub("", name).split(" - ")[0].strip()] = STATUSES[told[name]]
        return statuses

    def before(self) -> dict[str, str]:
        """Status per test in the recorded run without the fix; empty where that run came to no summary.

        Raises:
            SwerveError: The key is at fault.
        """
        key = "execution_result_content"
        keys = {"old_commit_res_stdout": Key((str, type(None)))}
        told = check(parse(self.record[key], key), keys, f"{key}.", strict=False)
        return summary_statuses(told["old_commit_res_stdout"] or "")


def read_row(record: Any, prefix: str = "") -> Row:
    """Check one row.

    Args:
        record: A JSON object.
        prefix: Put before keys in complaints.

    Raises:
        SwerveError: A key is missing, unknown or of a wrong type.
    """
    check(record, _KEYS, prefix)
    if not _HASH.fullmatch(record["commit_hash"]):
        raise SwerveError(f"key {prefix}commit_hash: '{record['commit_hash'][:60]}' is no commit")
    for key in ("repo_name", "docker_image", "problem_statement"):
        if not record[key].strip():
            raise SwerveError(f"key {prefix}{key}: empty")
    return Row(record=record)


def read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Go through a file of rows without holding it in memory.

    Args:
        path: `.parquet`, or JSON lines; a line may also be one of a task file that holds a row.

    Yields:
        Number of the line, or of the row, from 1, and the JSON object.

    Raises:
        SwerveError: The file is missing or is none.
    """
    if not path.is_file():
        raise SwerveError(f"{path}: no such file of rows")
    yield from _parquet(path) if path.suffix == ".parquet" else _json_lines(path)


def _json_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise SwerveError(f"{path}:{number}: not a JSON object: {error}") from None
            if not isinstance(record, dict):
                raise SwerveError(f"{path}:{number}: not a JSON object")
            yield number, record


def _parquet(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise SwerveError(f"{path}: needs pyarrow to be read: pip install 'swerve[parquet]'") from None
    number = 0
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=_PARQUET_BATCH_ROWS):
            for record in batch.to_pylist():
                number += 1
                yield number, record
    except (OSError, ValueError) as error:  # pyarrow's own faults are of these kinds
        raise SwerveError(f"{path}: is no parquet file: {' '.join(str(error).split())[:200]}") from None
