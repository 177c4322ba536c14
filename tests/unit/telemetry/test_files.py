"""What is on the disk is whole: torn lines are cut, failed writes leave nothing, faults are one line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swerve.telemetry import JsonLines, keep_json_lines, read_json_lines, write_atomic, write_json
from swerve.types import MachineError, SwerveError


def test_lines_come_back_in_order(tmp_path):
    path = tmp_path / "m.jsonl"
    with JsonLines(path, durable=True) as file:
        file.append({"a": 1})
        file.append({"b": "ü\n", "c": float("nan"), "d": [float("inf")]})
    assert list(read_json_lines(path)) == [{"a": 1}, {"b": "ü\n", "c": "nan", "d": ["inf"]}]
    assert list(read_json_lines(tmp_path / "none.jsonl")) == []


@given(cut=st.integers(0, 60))
def test_a_file_cut_anywhere_goes_on_after_its_last_whole_line(tmp_path_factory, cut):
    path = tmp_path_factory.mktemp("cut") / "m.jsonl"
    records = [{"step": step, "text": "x" * step} for step in range(3)]
    whole = "".join(json.dumps(record) + "\n" for record in records)
    path.write_text(whole[:cut])
    kept = list(read_json_lines(path))
    assert kept == records[: whole[:cut].count("\n")]
    with JsonLines(path) as file:
        file.append({"step": 9})
    assert list(read_json_lines(path)) == [*kept, {"step": 9}]


def test_a_long_torn_line_is_cut(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"a":1}\n{"b":"' + "x" * 200_000)
    JsonLines(path).close()
    assert path.read_text() == '{"a":1}\n'


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"a":1}\nnonsense\n{"a":2}\n')
    with pytest.raises(SwerveError, match=r"m\.jsonl: line 2 is not a JSON object"):
        list(read_json_lines(path))


def test_records_are_dropped_atomically(tmp_path):
    path = tmp_path / "m.jsonl"
    with JsonLines(path) as file:
        for step in range(5):
            file.append({"step": step})
    assert keep_json_lines(path, lambda record: record["step"] <= 2) == 2
    assert [record["step"] for record in read_json_lines(path)] == [0, 1, 2]
    assert keep_json_lines(tmp_path / "none", lambda record: True) == 0
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"]


def test_atomic_writes_replace_whole_files(tmp_path):
    path = tmp_path / "s.json"
    write_json(path, {"a": (1, float("-inf"))})
    write_json(path, {"b": {"c": None}})
    assert json.loads(path.read_text()) == {"b": {"c": None}}
    write_atomic(path, b"bytes")
    assert path.read_bytes() == b"bytes"
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_one_line_that_names_the_file():
    file = JsonLines(Path("/dev/full"))
    with pytest.raises(MachineError) as caught:
        file.append({"a": 1})
    file.close()
    assert str(caught.value).startswith("/dev/full: cannot be written: No space left on device: free some space")
    assert caught.value.exit_code == 1


def test_a_write_that_fails_half_way_leaves_the_file_as_it_was(tmp_path):
    """A real limit on file sizes makes the kernel write a part of a line, then refuse."""
    code = f"""
import resource
from pathlib import Path
from swerve.telemetry.files import JsonLines, write_atomic
from swerve.types import MachineError
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
file = JsonLines(Path({str(tmp_path / "m.jsonl")!r}))
file.append({{"step": 1}})
text = "x" * 500
for write in (lambda: file.append({{"text": text}}), lambda: write_atomic(Path({str(tmp_path / "s")!r}), text)):
    try:
        write()
    except MachineError as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.count("cannot be written") == 2
    assert (tmp_path / "m.jsonl").read_text() == '{"step":1}\n'
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"]
