"""The manifest of a scored run: whole lines, one per step, of one run."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from swerve.mlperf.manifest import EvalCheckpoint, read_manifest, upsert
from swerve.types import SwerveError


def checkpoint(step: int, **changes: object) -> EvalCheckpoint:
    made = EvalCheckpoint(
        step=step,
        checkpoint_path=f"/runs/one/checkpoints/weights_{step:08d}",
        timestamp_ms=1_000_000 + 60_000 * step,
        samples_count=step * 256,
        global_batch_size=256,
        batch_size=16,
        num_generations=16,
        val_start_at=18,
        max_steps=30,
        target_accuracy=0.69,
        seed=7,
        mllog_file="/runs/one/mlperf.log",
    )
    return dataclasses.replace(made, **changes)  # pyright: ignore[reportArgumentType]


def write(path: Path, *checkpoints: EvalCheckpoint) -> Path:
    path.write_text("".join(json.dumps(dataclasses.asdict(one)) + "\n" for one in checkpoints))
    return path


def test_a_checkpoint_is_listed_once_and_in_order_of_steps(tmp_path: Path) -> None:
    path = tmp_path / "eval_checkpoints.jsonl"
    for step in (19, 18, 20, 19):
        upsert(path, checkpoint(step, timestamp_ms=1_000_000 + step))
    assert [one.step for one in read_manifest(path)] == [18, 19, 20]
    upsert(path, checkpoint(19, timestamp_ms=1_000_019, checkpoint_path="/elsewhere"))
    assert read_manifest(path)[1].checkpoint_path == "/elsewhere"
    assert set(json.loads(path.read_text().splitlines()[0])) == {
        *("step", "checkpoint_path", "timestamp_ms", "samples_count", "global_batch_size", "batch_size"),
        *("num_generations", "val_start_at", "max_steps", "target_accuracy", "seed", "mllog_file"),
    }


FAULTS: dict[str, tuple[list[EvalCheckpoint], str]] = {
    "a gap": ([checkpoint(18), checkpoint(20)], "line 2: step 19 is missing"),
    "a late start": ([checkpoint(19)], "line 1: step 18 is missing"),
    "a duplicate": ([checkpoint(18), checkpoint(18)], "line 2: step 18 stands there again"),
    "wrong samples": (
        [checkpoint(18, samples_count=4607)],
        "samples_count = 4607 is not step x global_batch_size = 4608",
    ),
    "another seed": ([checkpoint(18), checkpoint(19, seed=8)], "line 2: seed = 8 differs from 7"),
    "another log": ([checkpoint(18), checkpoint(19, mllog_file="/x")], "mllog_file = '/x' differs"),
    "no product": ([checkpoint(18, batch_size=15)], "global_batch_size = 256 is not batch_size x num_generations"),
    "too late": ([checkpoint(18, max_steps=17)], "step 18 lies beyond max_steps = 17"),
    "a relative path": ([checkpoint(18, checkpoint_path="here")], "checkpoint_path = 'here' is not absolute"),
    "time that goes back": ([checkpoint(18), checkpoint(19, timestamp_ms=1)], "step 19 is dated before step 18"),
    "nothing": ([], "holds no checkpoint"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_manifest_without_a_valid_result_is_refused(tmp_path: Path, fault: str) -> None:
    checkpoints, complaint = FAULTS[fault]
    with pytest.raises(SwerveError) as caught:
        read_manifest(write(tmp_path / "m.jsonl", *checkpoints))
    assert complaint in str(caught.value)


def torn(line: str) -> str:
    return line[: len(line) // 2]


def without_seed(line: str) -> str:
    record = json.loads(line)
    del record["seed"]
    return json.dumps(record)


def with_more(line: str) -> str:
    return json.dumps({**json.loads(line), "extra": 1})


def with_text(line: str) -> str:
    return json.dumps({**json.loads(line), "seed": "7"})


@pytest.mark.parametrize(
    ("bend", "complaint"),
    [
        (torn, "it is torn, or no manifest"),
        (without_seed, "key seed is missing"),
        (with_more, "key extra is unknown"),
        (with_text, "seed = '7' is no int"),
        (lambda line: "3", "no JSON object"),
    ],
)
def test_a_line_that_is_no_checkpoint_is_named(tmp_path: Path, bend: Callable[[str], str], complaint: str) -> None:
    path = write(tmp_path / "m.jsonl", checkpoint(18), checkpoint(19))
    first, second = path.read_text().splitlines()
    path.write_text(f"{first}\n{bend(second)}\n")
    with pytest.raises(SwerveError, match="line 2: ") as caught:
        read_manifest(path)
    assert complaint in str(caught.value)


def test_a_missing_manifest_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SwerveError, match="cannot be read: No such file"):
        read_manifest(tmp_path / "none.jsonl")
