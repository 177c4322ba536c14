"""A log as a run: its steps, its evaluations, and how long it took by which definition.

- **Score**: `run_stop` - `run_start`, as MLPerf scores a run; only where `run_stop` says success. An offline evaluation
  dates `run_stop` back to the weight update of the passing checkpoint, so its score holds no evaluation; an inline one
  does.
- **Training to target**: from `run_start` to the weight update of the first checkpoint whose accuracy passes: a
  `run_stop` that was dated back to it, else the `block_stop` or the last `tracked_stats` of that step.
- **Logged step time**: the sum of `train_step_time`. **Wall time**: from `run_start` to the last `block_stop`. Their
  difference is the gap, which is split into what precedes or fills the first step beyond its logged time, what lies
  between later steps, and what follows the last step that logged its time; the last part is negative where that step
  went on after the weight update at which `block_stop` is dated.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from swerve.config import laws
from swerve.mlperf.own_checks import is_accuracy
from swerve.mlperf.read_log import Log, LogRecord

PARTS = ("policy_training_time", "exposed_generation_time", "weight_sync_time")
"""Parts of a step that logs name, in seconds; the rest of `train_step_time` has no name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One optimizer step, as far as it was logged.

    Attributes:
        step: Its number, from 1.
        samples: Training samples seen after it.
        end_s: When its statistics were logged, in seconds since `run_start`.
        wall_s: Seconds since those of the step before, or since `run_start`.
        reward: Mean reward of its episodes.
        loss: Training loss.
        grad_norm: Norm of the gradient.
        step_time_s: `train_step_time`.
        parts_s: Those of `PARTS` that were logged.
    """

    step: int
    samples: int
    end_s: float
    wall_s: float
    reward: float | None
    loss: float | None
    grad_norm: float | None
    step_time_s: float | None
    parts_s: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One accuracy.

    Attributes:
        samples: Training samples the policy had seen.
        accuracy: pass@4.
    """

    samples: int
    accuracy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Wall time beside logged step time, in seconds.

    Attributes:
        wall_s: From `run_start` to the last `block_stop`, or to the last statistics where there is none.
        logged_s: Sum of `train_step_time`.
        first_step_s: First step: wall beyond its logged time.
        between_s: Later steps: wall beyond their logged times.
        after_s: From the last step that logged its time to `block_stop`.
        num_logged_steps: Steps that logged their time.
    """

    wall_s: float
    logged_s: float
    first_step_s: float
    between_s: float
    after_s: float
    num_logged_steps: int

    @property
    def gap_s(self) -> float:
        """Wall time that no step logged."""
        return self.wall_s - self.logged_s

    @property
    def share(self) -> float:
        """The same as a share of the wall time."""
        return self.gap_s / self.wall_s if self.wall_s else 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSummary:
    """What a log says of its run.

    Attributes:
        path: The log.
        outcome: `converged`, `aborted`, `unfinished` (no `run_stop`) or `no run` (no `run_start`).
        notes: What else a reader should know, such as a torn last line.
        global_batch_size: As logged.
        division: As logged.
        seed: As logged.
        platform: As logged.
        num_steps: Optimizer steps made, by the last `block_stop` or the last step that logged statistics.
        steps: Steps that logged statistics, in order.
        evaluations: Accuracies in the order of the file.
        score_s: The score; see the module.
        train_to_target_s: Training to target; see the module.
        samples_to_target: Samples seen by the first checkpoint that passes.
        evaluation_s: Sum of `validation_time`.
        evaluation_in_score_s: What of the score follows the last `block_stop`.
        gap: Wall time beside logged step time; `None` where no step logged its time.
    """

    path: Path
    outcome: str
    notes: tuple[str, ...]
    global_batch_size: int | None
    division: str
    seed: int | None
    platform: str
    num_steps: int
    steps: tuple[Step, ...]
    evaluations: tuple[Evaluation, ...]
    score_s: float | None
    train_to_target_s: float | None
    samples_to_target: int | None
    evaluation_s: float
    evaluation_in_score_s: float | None
    gap: Gap | None

    def to_json(self) -> dict[str, object]:
        """The summary as JSON values."""
        fields: dict[str, object] = {**asdict(self), "path": str(self.path)}
        if self.gap is not None:
            fields["gap"] = {**asdict(self.gap), "gap_s": self.gap.gap_s, "share": self.gap.share}
        return fields


def summarize(log: Log) -> RunSummary:
    """Reads a run off its log.

    Args:
        log: The log, whole or not.

    Returns:
        The run.
    """
    start, stop, end = log.first("run_start"), log.last("run_stop"), log.last("block_stop")
    steps = _steps(log, start.time_ms) if start is not None else ()
    evaluations = tuple(
        Evaluation(samples=cast("int", record.samples_count), accuracy=float(record.value))
        for record in log.all("eval_accuracy")
        if is_accuracy(record)
    )
    passing = next((found for found in evaluations if found.accuracy >= laws.TARGET_ACCURACY), None)
    outcome = _outcome(start, stop)
    score = (stop.time_ms - start.time_ms) / 1000 if start and stop and outcome == "converged" else None
    return RunSummary(
        path=log.path,
        outcome=outcome,
        notes=tuple(_notes(log, outcome, passing)),
        global_batch_size=_whole(log.value("global_batch_size")),
        division=str(log.value("submission_division", "")),
        seed=_whole(log.value("seed")),
        platform=str(log.value("submission_platform", "")),
        num_steps=_num_steps(log, steps),
        steps=steps,
        evaluations=evaluations,
        score_s=score,
        train_to_target_s=_update_s(log, steps, passing),
        samples_to_target=passing.samples if passing else None,
        evaluation_s=sum(_numbers(record).get("validation_time", 0.0) for record in log.all("tracked_stats")),
        evaluation_in_score_s=max(0.0, (stop.time_ms - end.time_ms) / 1000) if score and stop and end else None,
        gap=_gap(log, steps),
    )


def olympic_mean(scores: Sequence[float | None]) -> float | None:
    """Mean of scores without the best and the worst, as a set of runs is scored.

    Args:
        scores: Seconds; `None` for a run that did not converge, which is slower than any other.

    Returns:
        The mean; `None` with fewer than three runs, or where more than one did not converge.
    """
    if len(scores) < 3:
        return None
    kept = sorted(math.inf if score is None else score for score in scores)[1:-1]
    return None if math.inf in kept else fmean(kept)


# ---------------------------------------------------------------------------------------------------- parts


def _outcome(start: LogRecord | None, stop: LogRecord | None) -> str:
    if start is None:
        return "no run"
    if stop is None:
        return "unfinished"
    return "converged" if stop.metadata.get("status") == "success" else "aborted"


def _notes(log: Log, outcome: str, passing: Evaluation | None) -> list[str]:
    notes: list[str] = []
    if log.torn is not None:
        notes.append(f"last line (line {log.torn.line}) is torn")
    others = [fault.line for fault in log.faults if fault is not log.torn]
    if others:
        notes.append(f"cannot be read: lines {', '.join(map(str, others[:5]))}{' and more' if len(others) > 5 else ''}")
    if outcome == "converged" and passing is None:
        notes.append(f"says success, and no accuracy reaches {laws.TARGET_ACCURACY}")
    if outcome == "unfinished" and log.first("block_stop") is not None:
        notes.append("trained, not evaluated to the end")
    return notes


def _steps(log: Log, start_ms: float) -> tuple[Step, ...]:
    size = _whole(log.value("global_batch_size")) or 0
    merged: dict[int, dict[str, float]] = {}
    ended: dict[int, float] = {}
    samples: dict[int, int] = {}
    for record in log.all("tracked_stats"):
        numbers, number = _numbers(record), _whole(record.metadata.get("step"))
        if number is None and record.samples_count and size:
            number = record.samples_count // size
        if number is None or "validation_time" in numbers:
            continue
        merged.setdefault(number, {}).update(numbers)
        ended[number] = (record.time_ms - start_ms) / 1000
        samples[number] = record.samples_count or number * size
    order = sorted(merged)
    before = dict(itertools.pairwise(order))
    before = {later: ended[earlier] for earlier, later in before.items()}
    return tuple(
        Step(
            step=number,
            samples=samples[number],
            end_s=ended[number],
            wall_s=ended[number] - before.get(number, 0.0),
            reward=merged[number].get("reward"),
            loss=merged[number].get("reduced_train_loss", merged[number].get("loss")),
            grad_norm=merged[number].get("grad_norm"),
            step_time_s=merged[number].get("train_step_time"),
            parts_s={part: merged[number][part] for part in PARTS if part in merged[number]},
        )
        for number in order
    )


def _num_steps(log: Log, steps: Sequence[Step]) -> int:
    size, end = _whole(log.value("global_batch_size")), log.last("block_stop")
    trained = (end.samples_count or 0) // size if end is not None and size and size > 0 else 0
    return max(trained, steps[-1].step if steps else 0)


def _update_s(log: Log, steps: Sequence[Step], passing: Evaluation | None) -> float | None:
    start = log.first("run_start")
    if passing is None or start is None:
        return None
    stop, end = log.last("run_stop"), log.last("block_stop")
    if stop and end and stop.samples_count == passing.samples and stop.time_ms <= end.time_ms:
        return (stop.time_ms - start.time_ms) / 1000  # dated back to it
    for record in log.all("block_stop"):
        if record.samples_count == passing.samples:
            return (record.time_ms - start.time_ms) / 1000
    return next((step.end_s for step in steps if step.samples == passing.samples), None)


def _gap(log: Log, steps: Sequence[Step]) -> Gap | None:
    start, end = log.first("run_start"), log.last("block_stop")
    timed = [step for step in steps if step.step_time_s is not None]
    if start is None or not timed:
        return None
    wall = steps[-1].end_s if end is None else (end.time_ms - start.time_ms) / 1000
    logged = [step.step_time_s or 0.0 for step in timed]
    first = timed[0].end_s - logged[0]
    return Gap(
        wall_s=wall,
        logged_s=sum(logged),
        first_step_s=first,
        between_s=timed[-1].end_s - timed[0].end_s - sum(logged[1:]),
        after_s=wall - timed[-1].end_s,
        num_logged_steps=len(timed),
    )


def _numbers(record: LogRecord) -> dict[str, float]:
    """Numbers of a `tracked_stats` record, by name."""
    if not isinstance(record.value, dict):
        return {}
    values = cast("dict[str, Any]", record.value)
    return {
        name: float(value)
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


def _whole(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return int(value)
