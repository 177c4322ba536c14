"""Task files: strict reading, deterministic writing, disjoint splits."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from swerve.environments import load_split, load_tasks, save_tasks, task_from_json, task_to_json
from swerve.types import Limits, Mutation, Provenance, SwerveError, Task


def make_task(identifier: str = "a", **changes: Any) -> Task:
    task = Task(
        id=identifier,
        family="functions",
        split="train",
        image="functions/example",
        base_commit="0" * 64,
        problem_statement="Fix the function f in repair.py.",
        workspace={"repair.py": "def f(x):\n    return x - 1\n"},
        visible_tests=("t1",),
        hidden_tests=("t2", "t3"),
        fail_to_pass=("t1", "t2"),
        pass_to_pass=("t3",),
        gold_patch="--- a/repair.py\n+++ b/repair.py\n",
        limits=Limits(max_turns=5),
        provenance=Provenance(
            package="example",
            version="1.0",
            archive_sha256="1" * 64,
            license="MIT",
            file="example.py",
            line=3,
            qualname="f",
            mutation=Mutation(kind="arithmetic", line=2, before="+", after="-"),
        ),
    )
    return dataclasses.replace(task, **changes)


@pytest.mark.parametrize("name", ["tasks.jsonl", "tasks.jsonl.xz"])
def test_round_trip_and_equal_bytes(tmp_path: Path, name: str) -> None:
    provenance = make_task().provenance
    assert provenance is not None
    undone = dataclasses.replace(provenance, mutation=None, previous_version="0.9", requires=("other==1.2",))
    tasks = [
        make_task("b"),
        make_task("a", provenance=None, problem_statement="café"),
        make_task("c", family="other", workspace={}, provenance=undone, expected_statuses={"t3": "failed"}),
    ]
    save_tasks(tmp_path / name, tasks)
    assert load_tasks(tmp_path / name) == tasks
    again = tmp_path / ("again_" + name)
    save_tasks(again, load_tasks(tmp_path / name))
    assert again.read_bytes() == (tmp_path / name).read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, again.name])


def with_change(**changes: Any) -> dict[str, Any]:
    record = task_to_json(make_task())
    for key, value in changes.items():
        if value is None:
            del record[key]
        else:
            record[key] = value
    return record


@pytest.mark.parametrize(
    ("record", "words"),
    [
        (with_change(image=None), ["key image", "missing"]),
        (with_change(colour="red"), ["key colour", "unknown"]),
        (with_change(id=3), ["key id", "expected a string", "3"]),
        (with_change(id=""), ["key id"]),
        (with_change(split="test"), ["key split", "test", "train"]),
        (with_change(visible_tests=["t1", 2]), ["key visible_tests", "list of strings"]),
        (with_change(visible_tests=["t1", "t1"]), ["key visible_tests", "twice"]),
        (with_change(visible_tests=["t1", "t2"]), ["key hidden_tests", "t2"]),
        (with_change(pass_to_pass=["t3", "t1"]), ["key pass_to_pass", "t1"]),
        (with_change(pass_to_pass=["t4"]), ["t3"]),
        (with_change(fail_to_pass=["t2"], pass_to_pass=["t1", "t3"]), ["visible_tests", "fail_to_pass"]),
        (with_change(workspace={}), ["key workspace"]),
        (with_change(workspace={"../x.py": ""}), ["key workspace", "../x.py"]),
        (with_change(workspace={"/x.py": ""}), ["key workspace", "/x.py"]),
        (with_change(limits={"max_turn": 3}), ["key limits.max_turn", "unknown"]),
        (with_change(limits={"max_turns": 0}), ["key limits.max_turns"]),
        (with_change(limits={"max_turns": True}), ["key limits.max_turns"]),
        (with_change(provenance={}), ["key provenance.package", "missing"]),
        (with_change(fail_to_pass=[], visible_tests=[], hidden_tests=["t3"], family="other"), ["key fail_to_pass"]),
        (with_change(expected_statuses={"t9": "failed"}), ["key expected_statuses", "t9"]),
        (with_change(expected_statuses={"t3": 1}), ["key expected_statuses.t3"]),
    ],
)
def test_every_fault_names_file_line_and_key(tmp_path: Path, record: dict[str, Any], words: list[str]) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(json.dumps(task_to_json(make_task("ok"))) + "\n" + json.dumps(record) + "\n")
    with pytest.raises(SwerveError) as caught:
        load_tasks(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:2: ") and "\n" not in message
    assert all(word in message for word in words), message
    assert caught.value.exit_code == 2


def test_duplicated_id_names_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(2 * (json.dumps(task_to_json(make_task())) + "\n"))
    with pytest.raises(SwerveError, match=r"tasks\.jsonl:2: key id: 'a' .* line 1"):
        load_tasks(path)
    with pytest.raises(SwerveError, match="'a' occurs twice"):
        save_tasks(tmp_path / "out.jsonl", [make_task(), make_task()])
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize("text", ["{", "[]", "3", '{"id":"a","id":"b"}'])
def test_broken_lines(tmp_path: Path, text: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(SwerveError, match=r"tasks\.jsonl:1: "):
        load_tasks(path)


def test_missing_empty_and_torn_files(tmp_path: Path) -> None:
    with pytest.raises(SwerveError, match="no such task file"):
        load_tasks(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(SwerveError, match="holds no tasks"):
        load_tasks(tmp_path / "empty.jsonl")
    save_tasks(tmp_path / "t.jsonl.xz", [make_task()])
    data = (tmp_path / "t.jsonl.xz").read_bytes()
    (tmp_path / "t.jsonl.xz").write_bytes(data[:-20])
    with pytest.raises(SwerveError, match="not a whole xz file"):
        load_tasks(tmp_path / "t.jsonl.xz")


def test_splits_must_be_disjoint_and_labelled(tmp_path: Path) -> None:
    train, validation = tmp_path / "train.jsonl", tmp_path / "validation.jsonl"
    save_tasks(train, [make_task("a")])
    save_tasks(validation, [make_task("b", split="validation")])
    assert [len(tasks) for tasks in load_split(train, validation)] == [1, 1]
    save_tasks(validation, [make_task("b")])
    with pytest.raises(SwerveError, match=r"validation\.jsonl: key split: task 'b'"):
        load_split(train, validation)
    save_tasks(validation, [make_task("a", split="validation")])
    with pytest.raises(SwerveError, match=r"validation\.jsonl: key id: 'a'"):
        load_split(train, validation)


def test_record_round_trip_in_memory() -> None:
    task = make_task()
    assert task_from_json(task_to_json(task)) == task
    with pytest.raises(SwerveError, match="key id: missing"):
        task_from_json({})
