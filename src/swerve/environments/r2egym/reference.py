"""Task files of the benchmark's shape: a row of the dataset per line, a JSON string among the line's metadata.

`{"responses_create_params": {"input": [], "metadata": {...}}, "agent_ref": {"type", "name"}}`, where the metadata are
`instance_id`, `base_commit`, `dataset_name`, `split`, `problem_statement` and `instance_dict`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from swerve.environments.r2egym.fields import Key, check, optional, parse, text
from swerve.environments.r2egym.gold import gold_patch
from swerve.environments.r2egym.rows import Row, read_row
from swerve.types import Limits, SwerveError, Task

FAMILY = "r2egym"
DATASET = "R2E-Gym/R2E-Gym-Subset"
LIMITS = Limits(max_turns=30, episode_timeout_s=1800.0, command_timeout_s=60.0, test_timeout_s=60.0)
"""Of the benchmark; the record has no place for limits."""
PARAMETERS = "responses_create_params"
"""The key by which a line of such a file is known."""

_AGENT = {"type": "responses_api_agents", "name": "swe_agents"}
_SPLITS = {"train": "train", "validation": "validation", "val": "validation", "dev": "validation", "test": "validation"}
_LINE_KEYS: Mapping[str, Key] = {PARAMETERS: Key((dict,)), "agent_ref": Key((dict,), required=False)}
_AGENT_KEYS: Mapping[str, Key] = {"type": text(required=False), "name": text()}
_METADATA_KEYS: Mapping[str, Key] = {
    "instance_id": text(),
    "base_commit": text(),
    "dataset_name": text(),
    "split": text(),
    "problem_statement": text(),
    "instance_dict": text(),
}
_PARAMETER_KEYS: Mapping[str, Key] = {
    "metadata": Key((dict,)),
    "input": optional(list, str),
    "instructions": optional(str),
    "model": optional(str),
    "temperature": optional(int, float),
    "top_p": optional(int, float),
    "max_output_tokens": optional(int),
    "max_tool_calls": optional(int),
    "parallel_tool_calls": optional(bool),
    "tool_choice": optional(str, dict),
    "tools": optional(list),
}
_INSTANCE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]*")


def reference_line(row: Row, instance_id: str, split: str) -> dict[str, Any]:
    """The object that stands for a row in a task file.

    Args:
        row: Of the dataset.
        instance_id: Its id in the lists of the benchmark.
        split: `train` or `validation`.
    """
    record = {key: value for key, value in row.record.items() if key not in ("dataset_name", "split")}
    instance = record | {"instance_id": instance_id}
    metadata = {
        "instance_id": instance_id,
        "base_commit": row.base_commit(),
        "dataset_name": DATASET,
        "split": split,
        "problem_statement": row.record["problem_statement"],
        "instance_dict": json.dumps(instance, sort_keys=True),
    }
    return {PARAMETERS: {"input": [], "metadata": metadata}, "agent_ref": dict(_AGENT)}


def metadata_of(line: Mapping[str, Any]) -> dict[str, Any]:
    """The metadata of a line, checked.

    Raises:
        SwerveError: A key is missing, unknown or of a wrong type.
    """
    own = {key: value for key, value in line.items() if not key.startswith("_")}
    check(own, _LINE_KEYS)
    if "agent_ref" in line:
        check(line["agent_ref"], _AGENT_KEYS, "agent_ref.")
    check(line[PARAMETERS], _PARAMETER_KEYS, f"{PARAMETERS}.")
    return check(line[PARAMETERS]["metadata"], _METADATA_KEYS, f"{PARAMETERS}.metadata.")


def row_of(metadata: Mapping[str, Any]) -> Row:
    """The row that metadata holds.

    Raises:
        SwerveError: A key of it is at fault.
    """
    key = f"{PARAMETERS}.metadata.instance_dict"
    return read_row(parse(metadata["instance_dict"], key), f"{key}.")


def read_reference(line: Mapping[str, Any]) -> Task:
    """The task that a line of a task file stands for.

    Raises:
        SwerveError: A key is missing, unknown, of a wrong type, or contradicts another one; names no file.
    """
    metadata = metadata_of(line)
    row = row_of(metadata)
    prefix = f"key {PARAMETERS}.metadata."
    if metadata["split"] not in _SPLITS:
        raise SwerveError(f"{prefix}split: '{metadata['split'][:60]}' is none of {', '.join(_SPLITS)}")
    if "R2E-Gym" not in metadata["dataset_name"]:
        raise SwerveError(f"{prefix}dataset_name: '{metadata['dataset_name'][:60]}': only R2E-Gym's can be played")
    if row.record.get("instance_id") not in (None, metadata["instance_id"]):
        raise SwerveError(f"{prefix}instance_dict.instance_id: is not {metadata['instance_id']}")
    return task_of(
        row, metadata["instance_id"], _SPLITS[metadata["split"]], metadata["base_commit"], metadata["problem_statement"]
    )


def task_of(row: Row, instance_id: str, split: str, base_commit: str, problem_statement: str) -> Task:
    """The task that a row makes.

    Args:
        row: Of the dataset.
        instance_id: Becomes the task's id and its image's name.
        split: `train` or `validation`.
        base_commit: What the repository is at.
        problem_statement: What the agent is told.

    Raises:
        SwerveError: The id cannot name a file, or a key of the row is at fault.
    """
    if not _INSTANCE_ID.fullmatch(instance_id):
        raise SwerveError(
            f"key instance_id: '{instance_id[:60]}': names its image's file, so it may hold letters, digits, dots, "
            "dashes and underscores only"
        )
    expected, before = row.expected(), row.before()
    passing = [name for name, status in expected.items() if status == "passed"]
    if not passing:
        raise SwerveError("key expected_output_json: no test passes once the fault is mended")
    # Where the recorded run does not tell which tests the fix turns, none is known to have passed without it.
    turned = [name for name in passing if before.get(name) != "passed"] or passing
    return Task(
        id=instance_id,
        family=FAMILY,
        split=split,
        image=instance_id,
        base_commit=base_commit,
        problem_statement=problem_statement,
        workspace={},
        visible_tests=(),
        hidden_tests=tuple(expected),
        fail_to_pass=tuple(turned),
        pass_to_pass=tuple(name for name in expected if name not in set(turned)),
        gold_patch=gold_patch(row.commit()),
        limits=LIMITS,
        expected_statuses={name: status for name, status in expected.items() if status != "passed"},
    )
