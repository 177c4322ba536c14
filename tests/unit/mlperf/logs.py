"""Small logs of runs that never were, line by line what a scored run logs."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from swerve.config import laws

START_MS = 1_700_000_000_000
STEP_MS = 60_000
"""A step's wall time in these logs; its logged time is 50 s."""


def head(division: str, gbs: int, seed: int) -> dict[str, object]:
    """Keys before the clock starts, in order."""
    return {
        "submission_benchmark": "qwen35_397b_grpo",
        "submission_org": "Example",
        "submission_division": division,
        "submission_status": "onprem",
        "submission_platform": "laptop",
        "seed": seed,
        "max_steps": 30,
        "global_batch_size": gbs,
        "micro_batch_size": 1,
        "max_sequence_length": 65_536,
        "train_samples": 700,
        "eval_samples": 251,
        "init_checkpoint_step": 0,
        "opt_name": "adamw",
        "opt_base_learning_rate": laws.learning_rate(gbs),
        "opt_adamw_beta_1": 0.9,
        "opt_adamw_beta_2": 0.999,
        "opt_adamw_epsilon": 1e-8,
        "opt_adamw_weight_decay": 0.0,
        "opt_gradient_clip_norm": laws.max_grad_norm(gbs),
        "opt_learning_rate_warmup_steps": 0,
        "opt_learning_rate_decay_schedule": "constant",
        "tensor_parallelism": 1,
        "pipeline_parallelism": 1,
        "context_parallelism": 1,
        "expert_parallelism": 1,
        "generation_training_rollout_temperature": 1.0,
        "generation_training_rollout_top_p": 1.0,
        "generation_validation_rollout_temperature": 0.1,
        "generation_validation_rollout_top_p": 0.95,
        "num_prompts_per_step": gbs // 16,
        "num_generations_per_prompt": 16,
        "lowest_numerical_precision_in_linear": "bfloat16",
        "lowest_numerical_precision_in_attn": "bfloat16",
        "lowest_numerical_precision_in_comm": "bfloat16",
        "config_filename": "recipe.toml",
        "gradient_accumulation_steps": 16,
    }


def line(
    key: str, value: object = None, time_ms: object = START_MS, event: object = "POINT_IN_TIME", **metadata
) -> str:
    """One line of a log."""
    fields = {"namespace": "", "time_ms": time_ms, "event_type": event, "key": key, "value": value}
    return ":::MLLOG " + json.dumps({**fields, "metadata": {"file": "log.py", "lineno": 1, **metadata}})


def write_log(
    path: Path,
    *,
    division: str = "open",
    gbs: int = 256,
    seed: int = 1,
    accuracies: Sequence[float] = (0.6, 0.7),
    status: str | None = "success",
    init_minutes: float = 1,
    changes: Mapping[str, object] | None = None,
    insert: Sequence[str] = (),
    backdated: bool = True,
) -> Path:
    """Writes the log of a run whose evaluations start at the step by law and gave these accuracies.

    `changes` replaces values of the head, and leaves keys out where the value is `None`; `insert` goes before
    `run_stop`. The clock stops at the weight update of the last checkpoint, or after its evaluation.
    """
    values = {**head(division, gbs, seed), **(changes or {})}
    ready = START_MS + int(init_minutes * 60_000)
    lines = [line("cache_clear", True), line("init_start", event="INTERVAL_START")]
    lines += [line(key, value) for key, value in values.items() if value is not None]
    lines += [line("init_stop", time_ms=ready, event="INTERVAL_END")]
    lines += [line("run_start", time_ms=ready, event="INTERVAL_START")]
    lines += [line("block_start", time_ms=ready, event="INTERVAL_START", samples_count=0, step=0)]
    first = laws.first_evaluation_step(gbs)
    num_steps = first + len(accuracies) - 1
    for step in range(1, num_steps + 1):
        now = ready + step * STEP_MS
        loss = {"reward": 0.2 + 0.02 * step, "reduced_train_loss": -0.05, "grad_norm": 0.1 / step}
        times = {"train_step_time": 50.0, "policy_training_time": 20.0, "exposed_generation_time": 25.0}
        lines += [line("tracked_stats", loss, now, samples_count=step * gbs, step=step)]
        lines += [line("tracked_stats", {**times, "weight_sync_time": 2.0}, now, samples_count=step * gbs, step=step)]
    end = ready + num_steps * STEP_MS
    lines += [line("block_stop", None, end, "INTERVAL_END", samples_count=num_steps * gbs, step=num_steps)]
    now = end
    for place, accuracy in enumerate(accuracies):
        at = {"samples_count": (first + place) * gbs, "step": first + place}
        lines += [line("eval_start", None, now, "INTERVAL_START", **at)]
        now += 30_000
        lines += [line("tracked_stats", {"validation_time": 30.0}, now, step=first + place)]
        lines += [line("eval_accuracy", accuracy, now, **at), line("eval_stop", None, now, "INTERVAL_END", **at)]
    lines += insert
    if status is not None:
        lines += [line("run_stop", None, end if backdated else now, "INTERVAL_END", status=status)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")
    return path
