"""A scored run's log from its first line to its last, by the real package and past the real checker."""

import dataclasses
import json
import logging
import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from mlperf_logging.compliance_checker import mlp_compliance

from swerve.cli.offline import evaluate_run
from swerve.config import TrainRecipe
from swerve.config.laws import learning_rate, max_grad_norm
from swerve.config.schema import Checkpoint, Engine, Evaluation, Mlperf, Optimizer, Packing, Rollout, Training
from swerve.mlperf.log import MLPerfLog
from swerve.mlperf.manifest import EvalCheckpoint, read_manifest
from swerve.mlperf.offline import EvaluationRecord
from swerve.mlperf.read_log import read_log
from swerve.mlperf.training import TrainingRecord
from swerve.mlperf.values import logged_values
from swerve.types import MachineError, SwerveError

STEPS = (18, 19, 20, 21)
ACCURACIES: dict[int, float] = dict(zip(STEPS, (0.5, 0.6, 0.7, 0.8), strict=True))


def recipe(**mlperf: Any) -> TrainRecipe:
    settings: dict[str, Any] = {"enabled": True, "org": "Us", "platform": "1xPod", "clear_cache": False} | mlperf
    return TrainRecipe(
        rollout=Rollout(
            prompts_per_step=16, generations_per_prompt=16, context_length=65_536, max_new_tokens=1024, num_slots=256
        ),
        optimizer=Optimizer(learning_rate=learning_rate(256), max_grad_norm=max_grad_norm(256)),
        packing=Packing(row_length=65_536, rows_per_micro_batch=8),
        training=Training(num_steps=STEPS[-1]),
        evaluation=Evaluation(num_tasks=251, temperature=0.1, top_p=0.95, before=False, after=False),
        checkpoint=Checkpoint(full=False, keep=0),
        mlperf=Mlperf(**settings),
    )


def numbers(step: int) -> dict[str, float]:
    names = ("loss", "reward", "grad_norm", "entropy", "token_logdiff_absmean", "global_valid_tokens")
    made = dict.fromkeys((*names, "global_valid_seqs"), 0.25) | {"dropped_assignments_used": 0, "dropless_replays": 2}
    return made | {"num_micro_batches": 4, "step_s": 2.0, "phase_s/compute": 1.0, "phase_s/collect": 0.5 + step}


def train(directory: Path) -> Path:
    """What training leaves: a log without `run_stop`, and a manifest."""
    directory.mkdir(exist_ok=True)
    settings = recipe()
    manifest = directory / "eval_checkpoints.jsonl"
    record = TrainingRecord(MLPerfLog(directory / "mlperf.log"), manifest, settings, seed=7)
    record.initialise(int(time.time() * 1000) - 1000, cleared=False)
    record.describe(
        logged_values(settings, seed=7, num_train_tasks=700, num_evaluation_tasks=251, config_name="gbs256.toml")
    )
    record.run_starts()
    for step in range(1, STEPS[-1] + 1):
        record.updated(step)
        record.step_done(step, numbers(step))
        if step >= STEPS[0]:
            record.saved(step, directory / f"weights_{step}")
        time.sleep(0.002)  # timestamps are milliseconds, and no two updates share one
    record.block_ends()
    record.close()
    return manifest


def events(log: Path) -> list[tuple[str, Any, Any]]:
    """What a log says, but for times and places in the source."""
    kept = []
    for one in read_log(log).records:
        value = one.value if not (one.key == "tracked_stats" and "validation_time" in one.value) else "validation_time"
        rest = {name: known for name, known in one.metadata.items() if name not in ("file", "lineno")}
        kept.append((one.key, value, rest))
    return kept


def evaluate(log: Path, checkpoints: list[EvalCheckpoint], accuracies: dict[int, float] = ACCURACIES) -> str:
    """The offline evaluator's half, with accuracies given."""
    record = EvaluationRecord(log, checkpoints)
    try:
        if record.outcome:
            return record.outcome
        for one in checkpoints:
            logged = record.accuracy(one)
            accuracy = accuracies[one.step] if logged is None else logged
            record.add(one, accuracy, began_ms=int(time.time() * 1000), seconds=1.5)
            if accuracy >= one.target_accuracy:
                record.succeed(one)
                return "success"
        record.abort()
        return "aborted"
    finally:
        record.close()


def complies(log: Path, caplog: pytest.LogCaptureFixture) -> bool:
    checker = mlp_compliance.make_checker("training", "6.1.0", quiet=False, werror=True)
    with caplog.at_level(logging.WARNING):
        valid, *_ = mlp_compliance.main(str(log), "training_6.1.0/common.yaml", checker)
    return bool(valid)


def test_a_closed_log_passes_the_real_checker(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = read_manifest(train(tmp_path))
    assert evaluate(tmp_path / "mlperf.log", checkpoints) == "success"
    assert complies(tmp_path / "mlperf.log", caplog), caplog.text


def test_training_ends_with_block_stop_at_the_last_update_and_no_run_stop(tmp_path: Path) -> None:
    checkpoints = read_manifest(train(tmp_path))
    log = read_log(tmp_path / "mlperf.log")
    last = log.records[-1]
    assert last.key == "block_stop"
    assert last.time_ms == checkpoints[-1].timestamp_ms
    assert last.metadata["samples_count"] == STEPS[-1] * 256
    assert log.first("run_stop") is None
    between = [one.key for one in log.records if log.first("run_start").line < one.line < last.line]  # pyright: ignore[reportOptionalMemberAccess]
    assert set(between) == {"block_start", "tracked_stats", "gradient_accumulation_steps"}
    assert log.value("gradient_accumulation_steps") == 4


def test_keys_come_in_the_order_that_the_checkers_need() -> None:
    keys = [
        key
        for key, _ in logged_values(recipe(), seed=1, num_train_tasks=700, num_evaluation_tasks=251, config_name="r")
    ]
    assert len(keys) == len(set(keys))
    batch = keys.index("global_batch_size")
    for later in ("opt_base_learning_rate", "opt_gradient_clip_norm", "num_generations_per_prompt"):
        assert batch < keys.index(later)
    assert keys.index("num_prompts_per_step") < keys.index("num_generations_per_prompt")
    reserved = ("global_batch_size", "eval_accuracy", "eval_error", "run_stop", "submission_benchmark")
    for key in keys:
        assert [word for word in reserved if word in key] == ([key] if key in reserved else [])


def test_the_log_says_what_sampled() -> None:
    servers = Engine(kind="vllm", urls=("http://a:1",), weights_directory="w")
    for settings, backend in ((recipe(), "swerve"), (dataclasses.replace(recipe(), engine=servers), "vllm")):
        values = logged_values(settings, seed=1, num_train_tasks=1, num_evaluation_tasks=1, config_name="r")
        assert dict(values)["generation_backend"] == backend


def test_the_run_is_a_success_at_the_moment_of_the_first_passing_update(tmp_path: Path) -> None:
    checkpoints = read_manifest(train(tmp_path))
    assert evaluate(tmp_path / "mlperf.log", checkpoints) == "success"
    log = read_log(tmp_path / "mlperf.log")
    assert [one.value for one in log.all("eval_accuracy")] == [0.5, 0.6, 0.7]  # step 21 is not evaluated
    stop = log.records[-1]
    assert (stop.key, stop.metadata["status"]) == ("run_stop", "success")
    assert stop.time_ms == checkpoints[2].timestamp_ms
    assert stop.metadata["samples_count"] == 20 * 256
    assert evaluate(tmp_path / "mlperf.log", checkpoints) == "success"  # once more changes nothing
    assert len(log.records) == len(read_log(tmp_path / "mlperf.log").records)


def test_a_run_that_never_reaches_its_target_is_aborted(tmp_path: Path) -> None:
    checkpoints = read_manifest(train(tmp_path))
    assert evaluate(tmp_path / "mlperf.log", checkpoints, dict.fromkeys(STEPS, 0.6)) == "aborted"
    log = read_log(tmp_path / "mlperf.log")
    assert len(log.all("eval_accuracy")) == len(STEPS)
    assert log.records[-1].metadata["status"] == "aborted"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (
            {"dropped_assignments_used": 3},
            "step 2: dropped_assignments_used is 3, and must be 0: this run cannot be scored",
        ),
        ({"dropped_assignments_used": math.nan}, "step 2: dropped_assignments_used is nan, and must be 0"),
        ({"dropped_assignments_used": None}, "step 2: dropped_assignments_used is missing: a scored run needs the"),
        ({"dropless_replays": None}, "step 2: dropless_replays is missing: a scored run needs the drop audit"),
    ],
)
def test_a_step_without_a_clean_drop_audit_ends_the_run(tmp_path: Path, change: dict[str, Any], fault: str) -> None:
    record = TrainingRecord(MLPerfLog(tmp_path / "mlperf.log"), tmp_path / "m.jsonl", recipe(), seed=7)
    record.run_starts()
    record.updated(1)
    record.step_done(1, numbers(1))
    record.updated(2)
    changed = {name: value for name, value in (numbers(2) | change).items() if value is not None}
    with pytest.raises(MachineError, match=fault):
        record.step_done(2, changed)
    with pytest.raises(MachineError, match="step 2: dropped_assignments_used is missing"):  # nor does it end well
        record.block_ends()
    record.close()
    log = read_log(tmp_path / "mlperf.log")
    assert {one.metadata["step"] for one in log.all("tracked_stats")} == {1}
    assert log.first("block_stop") is None


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('"dropped_assignments_used": 0', '"dropped_assignments_used": 1', "step 1: dropped_assignments_used is 1"),
        ('"dropped_assignments_used": 0', '"others": 0', "step 1: dropped_assignments_used is missing"),
        (', "dropless_replays": 2', "", "step 1: dropless_replays is missing"),
    ],
)
def test_a_log_without_a_clean_drop_audit_is_not_evaluated(tmp_path: Path, old: str, new: str, fault: str) -> None:
    checkpoints = read_manifest(train(tmp_path))
    log = tmp_path / "mlperf.log"
    changed = log.read_text().replace(old, new, 1)
    log.write_text(changed)
    with pytest.raises(MachineError, match=fault):
        EvaluationRecord(log, checkpoints)
    assert log.read_text() == changed


class Killed(BaseException):
    """The process is gone."""


def test_killed_before_any_line_it_goes_on_without_a_duplicate_or_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints = read_manifest(train(tmp_path))
    log = tmp_path / "mlperf.log"
    trained = log.read_bytes()
    evaluate(log, checkpoints)
    whole = events(log)
    num_lines = log.read_bytes().count(b"\n") - trained.count(b"\n")
    assert num_lines == 3 * 4 + 1
    for kill in range(num_lines):
        log.write_bytes(trained)
        left = kill
        original = EvaluationRecord._once, EvaluationRecord._end

        def counted(self: Any, *arguments: Any, which: int, kept: Any = original) -> None:
            nonlocal left
            if left == 0:
                raise Killed
            left -= 1
            kept[which](self, *arguments)

        monkeypatch.setattr(EvaluationRecord, "_once", lambda self, *a, c=counted: c(self, *a, which=0))
        monkeypatch.setattr(EvaluationRecord, "_end", lambda self, *a, c=counted: c(self, *a, which=1))
        with pytest.raises(Killed):
            evaluate(log, checkpoints)
        monkeypatch.undo()
        with log.open("ab") as file:
            file.write(b':::MLLOG {"namespace": "", "time_ms": 17')  # and in the middle of the next line
        evaluate(log, checkpoints)
        assert events(log) == whole, kill


def test_a_log_of_another_run_or_of_training_that_goes_on_is_refused(tmp_path: Path) -> None:
    checkpoints = read_manifest(train(tmp_path))
    log = tmp_path / "mlperf.log"
    others = [dataclasses.replace(one, seed=8) for one in checkpoints]
    with pytest.raises(SwerveError, match="seed is 7, the manifest says 8: the log is of another run"):
        EvaluationRecord(log, others)
    *lines, _ = log.read_text().splitlines()
    log.write_text("\n".join(lines) + "\n")
    with pytest.raises(SwerveError, match="training has not ended"):
        EvaluationRecord(log, checkpoints)


def test_without_the_package_it_fails_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlperf_logging.mllog.mllog", None)
    with pytest.raises(MachineError, match=r"pip install 'swerve\[mlperf\]'"):
        MLPerfLog(tmp_path / "x.log")
    assert not (tmp_path / "x.log").exists()


# ------------------------------------------------------------------------------------------------- the evaluator

WORKER = """
import json, pathlib, random, sys, time
out = pathlib.Path(sys.argv[sys.argv.index("--out") + 1])
step = int(sys.argv[sys.argv.index("--step") + 1])
out.mkdir(exist_ok=True)
time.sleep(random.random() * 0.05)
accuracy = {18: 0.5, 19: 0.6, 20: 0.7, 21: 0.8}[step]
complete = "--lossy" not in sys.argv
(out / "summary.json").write_text(json.dumps({
    "pass_at_k": {"4": accuracy}, "attempts_per_instance": 4, "complete": complete, "began_ms": 5, "seconds": 2.5,
    "rcp_logged": False, "error_attempts": 3, "missing_attempts": 0, "expected_attempts": 1004}))
"""
MANAGER = """
import sys, pathlib
from swerve.cli.offline import evaluate_run
from swerve.mlperf.manifest import read_manifest
here = pathlib.Path(sys.argv[1])
worker = [sys.executable, "-c", (here / "worker.py").read_text()]
evaluate_run(read_manifest(here / "eval_checkpoints.jsonl"), here / "evaluation", worker, num_workers=2, num_attempts=4)
"""


def manage(directory: Path, **options: Any) -> Any:
    settings: dict[str, Any] = {"num_workers": 2, "num_attempts": 4} | options
    worker = [sys.executable, "-c", WORKER, *settings.pop("words", ())]
    checkpoints = read_manifest(directory / "eval_checkpoints.jsonl")
    return evaluate_run(checkpoints, directory / "evaluation", worker, **settings)


def test_workers_run_side_by_side_and_the_log_is_in_order(tmp_path: Path) -> None:
    train(tmp_path)
    outcome = manage(tmp_path)
    assert (outcome.status, outcome.step) == ("success", 20)
    assert outcome.accuracies == {18: 0.5, 19: 0.6, 20: 0.7}
    log = read_log(tmp_path / "mlperf.log")
    assert [one.samples_count for one in log.all("eval_accuracy")] == [step * 256 for step in (18, 19, 20)]
    assert [one.value for one in log.all("tracked_stats") if "validation_time" in one.value] == [
        {"validation_time": 2.5}
    ] * 3
    summary = json.loads((tmp_path / "evaluation" / "step_00000019" / "summary.json").read_text())
    assert summary["rcp_logged"]
    assert manage(tmp_path) == outcome  # it is done, and stays as it is


def test_an_incomplete_evaluation_is_never_logged(tmp_path: Path) -> None:
    train(tmp_path)
    before = (tmp_path / "mlperf.log").read_bytes()
    with pytest.raises(MachineError, match="step 18: 3 of 1004 attempts are without a verdict: nothing was logged"):
        manage(tmp_path, words=["--lossy"])
    assert (tmp_path / "mlperf.log").read_bytes() == before


def test_a_rehearsal_leaves_the_log_alone(tmp_path: Path) -> None:
    train(tmp_path)
    before = (tmp_path / "mlperf.log").read_bytes()
    outcome = manage(tmp_path, mock=[0.1, 0.69])
    assert (outcome.status, outcome.step) == ("success", 19)
    assert outcome.log.name == "mlperf.log.mock"
    assert (tmp_path / "mlperf.log").read_bytes() == before
    with pytest.raises(MachineError, match="2 accuracies, and step 20 needs one more"):
        manage(tmp_path, mock=[0.1, 0.2])


@pytest.mark.timeout(240)
def test_killed_ten_times_at_random_it_leaves_the_log_of_an_undisturbed_one(tmp_path: Path) -> None:
    train(tmp_path / "whole")
    manage(tmp_path / "whole")
    train(tmp_path / "killed")
    (tmp_path / "killed" / "worker.py").write_text(WORKER)
    words = [sys.executable, "-c", MANAGER, str(tmp_path / "killed")]
    rng = random.Random(3)
    for _ in range(10):
        with subprocess.Popen(words, stderr=subprocess.DEVNULL, start_new_session=True) as process:
            time.sleep(0.1 + rng.random() * 0.6)
            os.killpg(process.pid, signal.SIGKILL)
    subprocess.run(words, check=True, capture_output=True, timeout=120)
    assert events(tmp_path / "killed" / "mlperf.log") == events(tmp_path / "whole" / "mlperf.log")
