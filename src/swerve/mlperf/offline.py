"""The evaluation half of a scored run's log: each checkpoint's events once, in the order of steps, then `run_stop`.

    eval_start, tracked_stats{validation_time}, eval_accuracy, eval_stop     of each checkpoint, step by step
    run_stop success     at the first that reaches the target, dated at its update of the weights
    run_stop aborted     after the last one, if none did

What is in the log already is not written again, so whoever writes it can be killed at any point and start over: the
log becomes the same, but for times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

from swerve.mlperf.log import MLPerfLog
from swerve.mlperf.manifest import EvalCheckpoint
from swerve.mlperf.read_log import Log, LogRecord, read_log
from swerve.mlperf.training import DROP_AUDIT, check_drop_audit
from swerve.types import SwerveError


class EvaluationRecord:
    """Adds evaluations to the log that training ended with `block_stop`.

    Args:
        path: The log.
        checkpoints: From `read_manifest`.

    Raises:
        SwerveError: The log is not of the run, or training has not ended.
        MachineError: The drop audit of a step is missing or not 0, the log cannot be written, or `mlperf-logging` is
            missing.
    """

    def __init__(self, path: Path, checkpoints: Sequence[EvalCheckpoint]) -> None:
        if not path.is_file():
            raise SwerveError(f"{path}: no such log, though the manifest names it: restore it")
        _check(read_log(path), checkpoints[0])
        self._log = MLPerfLog(path)  # which cuts a torn line off
        self._checkpoints = checkpoints
        self._written: set[tuple[str, int]] = set()
        self._accuracies: dict[int, float] = {}
        self._stop: LogRecord | None = None
        for record in read_log(path).records:
            if record.key == "run_stop":
                self._stop = record
            elif record.key in ("eval_start", "eval_accuracy", "eval_stop") or "validation_time" in _stats(record):
                self._written.add((record.key, record.samples_count or 0))
            if record.key == "eval_accuracy":
                self._accuracies[record.samples_count or 0] = float(record.value)

    @property
    def outcome(self) -> str:
        """Status of `run_stop`; empty where there is none yet."""
        return str(self._stop.metadata["status"]) if self._stop else ""

    def accuracy(self, checkpoint: EvalCheckpoint) -> float | None:
        """What the log says of a checkpoint, or `None`."""
        return self._accuracies.get(checkpoint.samples_count)

    def add(self, checkpoint: EvalCheckpoint, accuracy: float, *, began_ms: int, seconds: float) -> None:
        """Write what is not there yet of a checkpoint's evaluation.

        Args:
            checkpoint: The next one by step.
            accuracy: pass@k of a complete evaluation.
            began_ms: Unix time in milliseconds at its start.
            seconds: That it took.
        """
        at = {"samples_count": checkpoint.samples_count, "step": checkpoint.step}
        self._once("eval_start", checkpoint, lambda: self._log.start("eval_start", time_ms=began_ms, **at))
        self._once(
            "tracked_stats", checkpoint, lambda: self._log.event("tracked_stats", {"validation_time": seconds}, **at)
        )
        self._once("eval_accuracy", checkpoint, lambda: self._log.event("eval_accuracy", accuracy, **at))
        self._once("eval_stop", checkpoint, lambda: self._log.end("eval_stop", **at))
        self._accuracies[checkpoint.samples_count] = accuracy

    def succeed(self, checkpoint: EvalCheckpoint) -> None:
        """End the run: this checkpoint was the first to reach the target, at the moment of its update."""
        self._end(checkpoint, "success", checkpoint.timestamp_ms)

    def abort(self) -> None:
        """End the run: no checkpoint has reached the target."""
        self._end(self._checkpoints[-1], "aborted", None)

    def close(self) -> None:
        """Closes the log; idempotent."""
        self._log.close()

    def _once(self, key: str, checkpoint: EvalCheckpoint, write: Callable[[], None]) -> None:
        if (key, checkpoint.samples_count) not in self._written:
            write()

    def _end(self, checkpoint: EvalCheckpoint, status: str, time_ms: int | None) -> None:
        if self._stop is None:
            self._log.end(
                "run_stop", time_ms=time_ms, status=status, samples_count=checkpoint.samples_count, step=checkpoint.step
            )


def _stats(record: LogRecord) -> dict[str, object]:
    is_stats = record.key == "tracked_stats" and isinstance(record.value, dict)
    return cast("dict[str, object]", record.value) if is_stats else {}


def _check(log: Log, checkpoint: EvalCheckpoint) -> None:
    """Refuse a log that is not of the checkpoint's run, or whose run cannot be scored."""
    for key, expected in (
        ("seed", checkpoint.seed),
        ("global_batch_size", checkpoint.global_batch_size),
        ("num_prompts_per_step", checkpoint.batch_size),
        ("num_generations_per_prompt", checkpoint.num_generations),
        ("max_steps", checkpoint.max_steps),
    ):
        if log.value(key) != expected:
            raise SwerveError(
                f"{log.path}: {key} is {log.value(key)}, the manifest says {expected}: the log is of another run"
            )
    end = log.first("block_stop")
    if end is None:
        raise SwerveError(f"{log.path}: training has not ended, for there is no block_stop: evaluate afterwards")
    audits = {
        record.metadata.get("step"): _stats(record)
        for record in log.all("tracked_stats")
        if DROP_AUDIT[0] in _stats(record)
    }
    for step in range(1, end.metadata["step"] + 1):
        check_drop_audit(f"{log.path}: step {step}", audits.get(step, {}))
