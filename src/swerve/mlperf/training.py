"""The training half of a scored run on record: from `cache_clear` to `block_stop`, and the manifest of its checkpoints.

    cache_clear, init_start, values | init_stop, run_start, block_start | tracked_stats of each step ... | block_stop
    before anything is loaded         once everything is compiled         after each update                at the end

There is no `run_stop`: whether the run succeeded is found by the offline evaluator, which writes it. `block_stop` is
dated at the last update of the weights. A step without a clean drop audit ends the run: its statistics are not
logged, no `block_stop` follows, and the offline evaluator refuses the log.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

from swerve.config import TrainRecipe
from swerve.mlperf.log import MLPerfLog
from swerve.mlperf.manifest import EvalCheckpoint, upsert
from swerve.types import MachineError

DROP_AUDIT = ("dropped_assignments_used", "dropless_replays")
"""The drop audit of a step: (token, expert) pairs left out, always 0, and micro-batches computed again for that."""
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")


def clear_caches() -> bool:
    """Have the kernel drop its caches of files; False where it may not be asked."""
    os.sync()
    try:
        _DROP_CACHES.write_text("3\n")
    except OSError:
        return False
    return True


def check_drop_audit(place: str, numbers: Mapping[str, object]) -> None:
    """Refuse a step of a scored run of which it is not known that every token reached all of its experts.

    Args:
        place: Of the step, in words.
        numbers: Its metrics by name.

    Raises:
        MachineError: The audit is missing, or counts a (token, expert) pair that was dropped.
    """
    missing = [name for name in DROP_AUDIT if name not in numbers]
    if missing:
        raise MachineError(f"{place}: {missing[0]} is missing: a scored run needs the drop audit of every step")
    dropped = numbers[DROP_AUDIT[0]]
    if dropped != 0:
        raise MachineError(f"{place}: {DROP_AUDIT[0]} is {dropped}, and must be 0: this run cannot be scored")


class TrainingRecord:
    """Logs a scored run's training; implements `swerve.orchestrator.RunRecord`.

    Args:
        log: The MLPerf log, open.
        manifest: Where checkpoints are listed.
        recipe: Of the run.
        seed: Of the run.
    """

    def __init__(self, log: MLPerfLog, manifest: Path, recipe: TrainRecipe, seed: int) -> None:
        self._log = log
        self._manifest = manifest
        self._recipe = recipe
        self._seed = seed
        self._updated_ms: dict[int, int] = {}
        self._micro_batches: Counter[int] = Counter()
        self._audited: set[int] = set()

    def initialise(self, began_ms: int, *, cleared: bool) -> None:
        """Log the beginning of initialisation.

        Args:
            began_ms: Unix time in milliseconds, before anything was loaded.
            cleared: Whether caches were cleared just then.
        """
        self._log.event("cache_clear", cleared, time_ms=began_ms)
        self._log.start("init_start", time_ms=began_ms)

    def describe(self, values: Iterable[tuple[str, object]]) -> None:
        """Log what the run is.

        Args:
            values: From `logged_values`.
        """
        for key, value in values:
            self._log.event(key, value)

    def run_starts(self) -> None:
        """Call when everything is compiled and the first step is next."""
        self._log.end("init_stop")
        self._log.start("run_start")
        self._log.start("block_start", samples_count=0, step=0)

    def updated(self, step: int) -> None:
        """Call right after the update of the weights: their moment counts, not that of the checkpoint."""
        self._updated_ms[step] = time.time_ns() // 1_000_000

    def step_done(self, step: int, numbers: Mapping[str, float]) -> None:
        """Log a step.

        Args:
            step: Number of the update, from 1.
            numbers: Its metrics by name, with seconds as `step_s` and `phase_s/...`.

        Raises:
            MachineError: Its drop audit is missing or is not 0.
        """
        check_drop_audit(f"step {step}", numbers)
        self._audited.add(step)
        self._micro_batches[int(numbers["num_micro_batches"])] += 1
        at = {"samples_count": self._samples(step), "step": step}
        learnt = {
            "reduced_train_loss": numbers["loss"],
            "reward": numbers["reward"],
            "grad_norm": numbers["grad_norm"],
            "entropy": numbers["entropy"],
            "token_logdiff_absmean": numbers["token_logdiff_absmean"],
            "global_valid_toks": numbers["global_valid_tokens"],
            "global_valid_seqs": numbers["global_valid_seqs"],
            **{name: numbers[name] for name in DROP_AUDIT},
        }
        spent = {name.removeprefix("phase_s/"): value for name, value in numbers.items() if name.startswith("phase_s/")}
        training = ("pack", "copy", "send", "compute", "update")
        times = {
            "train_step_time": numbers["step_s"],
            "policy_training_time": sum(spent.get(name, 0.0) for name in training),
            "exposed_generation_time": spent.get("collect", 0.0),
            "weight_sync_time": spent.get("hand_over", 0.0),
            "checkpoint_time": spent.get("checkpoint", 0.0),
        }
        self._log.event("tracked_stats", learnt, **at)
        self._log.event("tracked_stats", times, **at)

    def saved(self, step: int, path: Path) -> None:
        """Call when a checkpoint of weights is whole, from any thread.

        Args:
            step: Updates the weights have had.
            path: Its directory.
        """
        rollout, recipe = self._recipe.rollout, self._recipe
        checkpoint = EvalCheckpoint(
            step=step,
            checkpoint_path=str(path.resolve()),
            timestamp_ms=self._updated_ms[step],
            samples_count=self._samples(step),
            global_batch_size=rollout.global_batch_size,
            batch_size=rollout.prompts_per_step,
            num_generations=rollout.generations_per_prompt,
            val_start_at=recipe.first_evaluation_step,
            max_steps=recipe.training.num_steps,
            target_accuracy=recipe.mlperf.target_accuracy,
            seed=self._seed,
            mllog_file=str(self._log.path.resolve()),
        )
        upsert(self._manifest, checkpoint)

    def block_ends(self) -> None:
        """Call when no update follows; the checkpoints may still be being written.

        Raises:
            MachineError: A step was not audited.
        """
        for step in sorted(self._updated_ms.keys() - self._audited):
            check_drop_audit(f"step {step}", {})
        last = max(self._updated_ms)
        ((micro_batches, _),) = self._micro_batches.most_common(1)
        # How many there are follows from how a step's sequences pack; most steps have this many.
        self._log.event("gradient_accumulation_steps", max(micro_batches, 1))
        self._log.end("block_stop", time_ms=self._updated_ms[last], samples_count=self._samples(last), step=last)

    def close(self) -> None:
        """Closes the log; idempotent."""
        self._log.close()

    def _samples(self, step: int) -> int:
        return step * self._recipe.rollout.global_batch_size
