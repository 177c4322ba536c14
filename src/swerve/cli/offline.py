"""Evaluates the checkpoints of a scored run after training, and finishes its MLPerf log.

    manifest --> worker: step 18 --> DIR/step_00000018/summary.json --+
             --> worker: step 19 --> DIR/step_00000019/summary.json --+--> in order of steps --> the log
             ...                                                      |        first that reaches the target: run_stop
                                                                      +--- the workers beyond it are ended

A worker is a process that evaluates one checkpoint and keeps every attempt, so whatever is killed, worker or this
process, goes on from there when it is started again. Nothing is logged of an evaluation that is not complete.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swerve.cli.evaluation import ATTEMPTS, SUMMARY
from swerve.mlperf.manifest import EvalCheckpoint
from swerve.mlperf.offline import EvaluationRecord
from swerve.telemetry import write_json
from swerve.types import MachineError

_POLL_S = 0.2
_SAY_EVERY_S = 15.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What came of a scored run.

    Attributes:
        status: `success` or `aborted`.
        accuracies: By step, of all that were evaluated and logged.
        step: First step that reached the target, or `None`.
        log: The log that says so.
    """

    status: str
    accuracies: Mapping[int, float]
    step: int | None
    log: Path


def evaluate_run(
    checkpoints: Sequence[EvalCheckpoint],
    out: Path,
    worker: Sequence[str],
    *,
    num_workers: int,
    num_attempts: int,
    mock: Sequence[float] | None = None,
) -> Outcome:
    """Evaluate a run's checkpoints in the order of steps until one reaches the target.

    Args:
        checkpoints: From `read_manifest`.
        out: Where each step's attempts and summary go.
        worker: Command that evaluates a checkpoint; `--step N --out DIR` are added.
        num_workers: Checkpoints evaluated at once.
        num_attempts: Of one evaluation, for the estimate.
        mock: Accuracies in place of evaluations, for a rehearsal: the log is a copy that says so in its name.

    Raises:
        SwerveError: The log is not of the run, or training has not ended.
        MachineError: An evaluation is incomplete.
    """
    log = Path(checkpoints[0].mllog_file)
    if mock is not None:
        rehearsal = log.with_name(f"{log.name}.mock")
        log = Path(shutil.copyfile(log, rehearsal))
    record = EvaluationRecord(log, checkpoints)
    try:
        accuracies: dict[int, float] = {}
        left = [one for one in checkpoints if not record.outcome or record.accuracy(one) is not None]
        with contextlib.closing(_Workers(left, out, worker, num_workers, num_attempts)) as workers:
            for place, checkpoint in enumerate(left):
                logged = record.accuracy(checkpoint)
                accuracy = logged if logged is not None else _accuracy(checkpoint, place, workers, mock)
                record.add(checkpoint, accuracy, **_times(out, checkpoint, mock))
                accuracies[checkpoint.step] = accuracy
                _say(f"step {checkpoint.step}: {accuracy:.4f}, target {checkpoint.target_accuracy}")
                if accuracy >= checkpoint.target_accuracy:
                    record.succeed(checkpoint)
                    return Outcome(status="success", accuracies=accuracies, step=checkpoint.step, log=log)
        record.abort()
        return Outcome(status="aborted", accuracies=accuracies, step=None, log=log)
    finally:
        record.close()
        _mark_logged(out, record, checkpoints)


def directory_of(out: Path, step: int) -> Path:
    """Where a step's attempts and summary are."""
    return out / f"step_{step:08d}"


def _accuracy(checkpoint: EvalCheckpoint, place: int, workers: _Workers, mock: Sequence[float] | None) -> float:
    if mock is not None:
        if place >= len(mock):
            raise MachineError(f"--mock: {len(mock)} accuracies, and step {checkpoint.step} needs one more")
        return mock[place]
    summary = workers.summary(checkpoint)
    return float(summary["pass_at_k"][str(summary["attempts_per_instance"])])


def _times(out: Path, checkpoint: EvalCheckpoint, mock: Sequence[float] | None) -> dict[str, Any]:
    path = directory_of(out, checkpoint.step) / SUMMARY
    if mock is not None or not path.exists():
        return {"began_ms": time.time_ns() // 1_000_000, "seconds": 0.0}
    summary = json.loads(path.read_text(encoding="utf-8"))
    return {"began_ms": summary["began_ms"], "seconds": summary["seconds"]}


def _mark_logged(out: Path, record: EvaluationRecord, checkpoints: Sequence[EvalCheckpoint]) -> None:
    """Say in each summary whether its accuracy is in the log."""
    for checkpoint in checkpoints:
        path = directory_of(out, checkpoint.step) / SUMMARY
        if path.exists() and record.accuracy(checkpoint) is not None:
            summary = json.loads(path.read_text(encoding="utf-8"))
            if not summary["rcp_logged"]:
                write_json(path, {**summary, "rcp_logged": True})


class _Workers:
    """Processes that evaluate checkpoints, the earliest ones first, a number of them at a time."""

    def __init__(
        self, checkpoints: Sequence[EvalCheckpoint], out: Path, command: Sequence[str], num: int, num_attempts: int
    ) -> None:
        self._waiting = list(checkpoints)
        self._out = out
        self._command = command
        self._num = num
        self._num_attempts = num_attempts
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._began = time.monotonic()
        self._found = 0

    def summary(self, checkpoint: EvalCheckpoint) -> dict[str, Any]:
        """The summary of a checkpoint's evaluation, waited for.

        Raises:
            MachineError: It ended without a verdict on every attempt.
        """
        said = time.monotonic()
        while True:
            if (summary := self._complete(checkpoint.step)) is not None and checkpoint.step not in self._running:
                self._waiting = [one for one in self._waiting if one.step > checkpoint.step]
                return summary
            self._start(checkpoint)
            process = self._running[checkpoint.step]
            if process.poll() is not None:
                del self._running[checkpoint.step]
                if self._complete(checkpoint.step) is None:
                    raise MachineError(self._cause(checkpoint.step, process.returncode))
                continue
            if time.monotonic() - said >= _SAY_EVERY_S:
                said = time.monotonic()
                _say(self._progress(checkpoint))
            time.sleep(_POLL_S)

    def close(self) -> None:
        """Ends the workers that are left; their attempts are kept."""
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, first: EvalCheckpoint) -> None:
        """Have as many workers at work as may be, the one for `first` among them."""
        for checkpoint in self._waiting:
            over = sum(process.poll() is None for process in self._running.values()) >= self._num
            if checkpoint.step < first.step or checkpoint.step in self._running or (over and checkpoint is not first):
                continue
            if self._complete(checkpoint.step) is None:
                directory = directory_of(self._out, checkpoint.step)
                directory.parent.mkdir(parents=True, exist_ok=True)
                words = [*self._command, "--step", str(checkpoint.step), "--out", str(directory)]
                with directory.with_suffix(".log").open("ab") as log:
                    self._running[checkpoint.step] = subprocess.Popen(
                        words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
                    )

    def _complete(self, step: int) -> dict[str, Any] | None:
        path = directory_of(self._out, step) / SUMMARY
        if not path.exists():
            return None
        summary = json.loads(path.read_text(encoding="utf-8"))
        return summary if summary["complete"] else None

    def _cause(self, step: int, code: int) -> str:
        path = directory_of(self._out, step) / SUMMARY
        again = "nothing was logged of it; mend the cause and start the evaluation again, which goes on from here"
        if path.exists():
            summary = json.loads(path.read_text(encoding="utf-8"))
            lost = summary["error_attempts"] + summary["missing_attempts"]
            return f"step {step}: {lost} of {summary['expected_attempts']} attempts are without a verdict: {again}"
        log = directory_of(self._out, step).with_suffix(".log")
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"step {step}: its worker ended with {code}: {lines[-1] if lines else 'it said nothing'}: {again}"

    def _progress(self, checkpoint: EvalCheckpoint) -> str:
        done = {step: _num_lines(directory_of(self._out, step) / ATTEMPTS) for step in self._running}
        behind = len([one for one in self._waiting if one.step not in self._running and one.step > checkpoint.step])
        total = sum(done.values())
        if not self._found:
            self._found = total
            self._began = time.monotonic()
        rate = (total - self._found) / max(time.monotonic() - self._began, 1e-9)
        left = len(done) * self._num_attempts - total
        estimate = f"about {left / rate:.0f} s left of them" if rate > 0 else "no estimate yet"
        steps = ", ".join(f"step {step} {count}/{self._num_attempts}" for step, count in sorted(done.items()))
        return f"attempts: {steps}; {estimate}; {behind} more checkpoints at most"


def _num_lines(path: Path) -> int:
    return sum(1 for _ in _lines(path))


def _lines(path: Path) -> Iterator[bytes]:
    if path.exists():
        with path.open("rb") as file:
            yield from file


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
