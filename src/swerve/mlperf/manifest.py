"""`eval_checkpoints.jsonl`: which weights a scored run has saved, when they came to be, and what they have seen.

One JSON line per checkpoint, in the order of steps. Training upserts a line as soon as a checkpoint is whole; the
offline evaluator reads the file and refuses one from which no valid result can come.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast, get_type_hints

from swerve.telemetry import write_atomic
from swerve.types import SwerveError


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalCheckpoint:
    """One line of the manifest.

    Attributes:
        step: Optimizer steps that the weights have had.
        checkpoint_path: Directory of the weights, absolute.
        timestamp_ms: Unix time of their update in milliseconds, taken before they were saved.
        samples_count: Episodes they were trained on: step times global batch size.
        global_batch_size: Episodes of one step.
        batch_size: Prompts of one step.
        num_generations: Episodes per prompt.
        val_start_at: First step whose weights are evaluated.
        max_steps: Steps of the run at most.
        target_accuracy: What an evaluation has to reach.
        seed: Of the run.
        mllog_file: The run's MLPerf log, absolute.
    """

    step: int
    checkpoint_path: str
    timestamp_ms: int
    samples_count: int
    global_batch_size: int
    batch_size: int
    num_generations: int
    val_start_at: int
    max_steps: int
    target_accuracy: float
    seed: int
    mllog_file: str


_TYPES: dict[str, type] = get_type_hints(EvalCheckpoint)
_OF_ONE_RUN = (
    *("global_batch_size", "batch_size", "num_generations", "val_start_at", "max_steps", "target_accuracy", "seed"),
    "mllog_file",
)


def upsert(path: Path, checkpoint: EvalCheckpoint) -> None:
    """Write a checkpoint's line in place of an older one of the same step, atomically.

    Args:
        path: The manifest; made where it is missing.
        checkpoint: What is whole by now.

    Raises:
        SwerveError: The file is not a manifest.
        MachineError: It cannot be written.
    """
    entries = {entry.step: entry for entry in _read(path)} if path.exists() else {}
    entries[checkpoint.step] = checkpoint
    lines = [json.dumps(asdict(entries[step])) for step in sorted(entries)]
    write_atomic(path, "\n".join(lines) + "\n")


def read_manifest(path: Path) -> list[EvalCheckpoint]:
    """Read a manifest that a result can come from.

    Args:
        path: The file.

    Returns:
        Its checkpoints, in the order of steps, from `val_start_at` on without a gap.

    Raises:
        SwerveError: It is missing, empty, torn, or of several runs; a step is missing or there twice; counts or times
            contradict each other. Names the line and what to do.
    """
    entries = _read(path)
    if not entries:
        raise SwerveError(f"{path}: holds no checkpoint: training saves the first one after step val_start_at")
    first = entries[0]
    for number, (entry, expected) in enumerate(zip(entries, range(first.val_start_at, 10**9), strict=False), start=1):
        where = f"{path}: line {number}"
        for key in _OF_ONE_RUN:
            if getattr(entry, key) != getattr(first, key):
                raise SwerveError(
                    f"{where}: {key} = {getattr(entry, key)!r} differs from {getattr(first, key)!r} of the first line: "
                    "the file mixes runs; give each run a manifest of its own"
                )
        if entry.step != expected:
            what = f"step {entry.step} stands there again" if entry.step < expected else f"step {expected} is missing"
            raise SwerveError(f"{where}: {what}: every step from val_start_at = {first.val_start_at} on is evaluated")
        _check(entry, where)
    for before, after in itertools.pairwise(entries):
        if after.timestamp_ms <= before.timestamp_ms:
            raise SwerveError(
                f"{path}: step {after.step} is dated before step {before.step}: the file is of no one run"
            )
    return entries


def _check(entry: EvalCheckpoint, where: str) -> None:
    if entry.global_batch_size != entry.batch_size * entry.num_generations:
        raise SwerveError(
            f"{where}: global_batch_size = {entry.global_batch_size} is not batch_size x num_generations = "
            f"{entry.batch_size} x {entry.num_generations}"
        )
    if entry.samples_count != entry.step * entry.global_batch_size:
        raise SwerveError(
            f"{where}: samples_count = {entry.samples_count} is not step x global_batch_size = "
            f"{entry.step * entry.global_batch_size}"
        )
    if entry.step > entry.max_steps:
        raise SwerveError(f"{where}: step {entry.step} lies beyond max_steps = {entry.max_steps}")
    for key in ("checkpoint_path", "mllog_file"):
        if not Path(getattr(entry, key)).is_absolute():
            raise SwerveError(f"{where}: {key} = {getattr(entry, key)!r} is not absolute")


def _read(path: Path) -> list[EvalCheckpoint]:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SwerveError(f"{path}: cannot be read: {error.strerror}") from error
    entries: list[EvalCheckpoint] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            entries.append(_entry(json.loads(line)))
        except (ValueError, TypeError) as error:
            raise SwerveError(f"{path}: line {number}: {error}: it is torn, or no manifest") from error
    return entries


def _entry(record: object) -> EvalCheckpoint:
    if not isinstance(record, dict):
        raise TypeError("no JSON object")
    given = cast("dict[str, Any]", record)
    if odd := sorted(_TYPES.keys() ^ given.keys()):
        raise TypeError(f"key {odd[0]} is {'missing' if odd[0] in _TYPES else 'unknown'}")
    for name, kind in _TYPES.items():
        right = (int, float) if kind is float else kind
        if isinstance(given[name], bool) or not isinstance(given[name], right):
            raise TypeError(f"{name} = {given[name]!r} is no {kind.__name__}")
    return EvalCheckpoint(**given)
