"""What the rules of `qwen35_397b_grpo` ask of a log: keys, values by law, and what each of them is.

Source: `mlperf-logging` 4.1.68, ruleset 6.1.0; the laws themselves are those of `swerve.config.laws`.
"""

import math
from collections.abc import Mapping

from swerve.config import laws

BENCHMARK = "qwen35_397b_grpo"
"""The benchmark's name, in logs and in submission trees."""
RULESET = "6.1.0"
"""Version of the rules that this package knows."""
NUM_RESULTS = 3
"""Logs that make one result."""
DIVISIONS = ("closed", "open")
INIT_LIMIT_MINUTES = {"closed": 30, "open": 240}
"""Longest time from the first `init_start` to `init_stop`."""
NUM_TRAINING_TASKS = 700
"""Training tasks."""

FIXED_IN_BOTH: Mapping[str, object] = {
    "max_sequence_length": laws.CONTEXT_LENGTH,
    "eval_samples": laws.NUM_EVALUATION_TASKS,
    "init_checkpoint_step": 0,
    "opt_name": "adamw",
}
"""Values that both divisions must log."""
FIXED_IN_CLOSED: Mapping[str, object] = {
    **FIXED_IN_BOTH,
    "opt_adamw_beta_1": 0.9,
    "opt_adamw_beta_2": 0.999,
    "opt_adamw_epsilon": 1e-8,
    "opt_adamw_weight_decay": 0.0,
    "opt_learning_rate_warmup_steps": 0,
    "opt_learning_rate_decay_schedule": "constant",
    "generation_training_rollout_temperature": 1.0,
    "generation_training_rollout_top_p": 1.0,
    "generation_validation_rollout_temperature": 0.1,
    "generation_validation_rollout_top_p": 0.95,
    "num_generations_per_prompt": laws.GENERATIONS_PER_PROMPT,
}
"""Values that the closed division must log, whatever the batch size."""

KEYS: Mapping[str, str] = {
    "submission_benchmark": f"the benchmark: {BENCHMARK}",
    "submission_org": "who submits",
    "submission_division": "closed or open",
    "submission_platform": "the system it ran on",
    "cache_clear": "that caches were cleared before the run",
    "init_start": "when initialisation began",
    "init_stop": "when initialisation ended",
    "run_start": "when the clock started",
    "run_stop": "when the clock stopped, with metadata.status success or aborted",
    "block_start": "the start of a stretch of training",
    "block_stop": "the end of a stretch of training",
    "eval_start": "the start of an evaluation",
    "eval_stop": "the end of an evaluation",
    "eval_accuracy": "pass@4 on the held-out tasks, with metadata.samples_count",
    "train_samples": "how many training tasks there are",
    "eval_samples": "how many held-out tasks there are",
    "lowest_numerical_precision_in_linear": "the lowest precision of products in linear layers, such as bfloat16",
    "lowest_numerical_precision_in_attn": "the lowest precision of products in the attention, such as bfloat16",
    "lowest_numerical_precision_in_comm": "the lowest precision of what devices exchange, such as bfloat16",
    "tensor_parallelism": "over how many devices one product is split",
    "pipeline_parallelism": "over how many devices layers are split",
    "context_parallelism": "over how many devices sequences are split",
    "expert_parallelism": "over how many devices experts are split",
    "micro_batch_size": "sequences or rows of one micro-batch on a device",
    "config_filename": "the file of settings that the run used",
    "gradient_accumulation_steps": "micro-batches of one optimizer step",
    "global_batch_size": "episodes of one optimizer step",
    "max_sequence_length": "the cap of the context, in tokens",
    "init_checkpoint_step": "the step that the weights come from",
    "max_steps": "optimizer steps at most",
    "opt_name": "the optimizer",
    "opt_base_learning_rate": "the learning rate",
    "opt_adamw_beta_1": "the optimizer's beta_1",
    "opt_adamw_beta_2": "the optimizer's beta_2",
    "opt_adamw_epsilon": "the optimizer's epsilon",
    "opt_adamw_weight_decay": "the optimizer's weight decay",
    "opt_gradient_clip_norm": "the bound of the gradient's norm",
    "opt_learning_rate_warmup_steps": "steps in which the learning rate rises",
    "opt_learning_rate_decay_schedule": "how the learning rate falls",
    "generation_training_rollout_temperature": "the temperature of training episodes",
    "generation_training_rollout_top_p": "top-p of training episodes",
    "generation_validation_rollout_temperature": "the temperature of evaluation episodes",
    "generation_validation_rollout_top_p": "top-p of evaluation episodes",
    "num_prompts_per_step": "tasks of one optimizer step",
    "num_generations_per_prompt": "episodes per task",
    "seed": "the run's random seed, an integer",
}
"""What a key tells, by key."""
REQUIRED = tuple(
    key for key in KEYS if key not in ("block_start", "block_stop", "eval_start", "eval_stop", "run_stop", "seed")
)
"""Keys without which a log is refused, whatever else it holds."""

SYSTEM_FIELDS: Mapping[str, str] = {
    "submitter": "organisation that submits",
    "division": "closed or open",
    "status": "one of: Available on-premise; Available cloud; Research, Development, or Internal (RDI); Preview",
    "system_name": "name of the system",
    "number_of_nodes": "nodes that took part",
    "host_processors_per_node": "processor sockets of a node",
    "host_processor_model_name": "model of the processor",
    "host_processor_core_count": "cores of one processor",
    "host_processor_vcpu_count": "hardware threads of one processor",
    "host_processor_frequency": "clock of the processor",
    "host_processor_caches": "caches of one processor",
    "host_processor_interconnect": "what joins the processors of a node",
    "host_memory_capacity": "memory of a node",
    "host_storage_type": "kind of storage",
    "host_storage_capacity": "size of the storage",
    "host_networking": "network between nodes",
    "host_networking_topology": "how that network is laid out",
    "host_memory_configuration": "memory modules of a node",
    "accelerators_per_node": "accelerators of a node",
    "accelerator_model_name": "model of the accelerator",
    "accelerator_host_interconnect": "what joins accelerator and host",
    "accelerator_frequency": "clock of the accelerator",
    "accelerator_on-chip_memories": "memories on the chip",
    "accelerator_memory_configuration": "kind of the accelerator's memory",
    "accelerator_memory_capacity": "size of the accelerator's memory",
    "accelerator_interconnect": "what joins accelerators",
    "accelerator_interconnect_topology": "how that is laid out",
    "cooling": "how the system is cooled",
    "hw_notes": "notes on the hardware",
    "framework": "framework and its version",
    "other_software_stack": "other software that matters, with versions",
    "operating_system": "operating system and its version",
    "sw_notes": "notes on the software",
}
"""The 33 fields of a system's description, and what each is."""
SYSTEM_STATUSES = (
    "Available on-premise",
    "Available cloud",
    "Research, Development, or Internal (RDI)",
    "Preview",
)
"""What `status` may say."""


def expected_value(key: str, division: object, global_batch_size: object) -> object | None:
    """The value that the rules ask for.

    Args:
        key: A log key.
        division: `closed` or `open`, as logged.
        global_batch_size: As logged.

    Returns:
        The value; `None` where the rules leave it open.
    """
    if division != "closed":
        return FIXED_IN_BOTH.get(key)
    if key in FIXED_IN_CLOSED:
        return FIXED_IN_CLOSED[key]
    if not is_batch_size(global_batch_size):
        return None
    size = int(global_batch_size)  # pyright: ignore[reportArgumentType]
    match key:
        case "opt_base_learning_rate":
            return laws.learning_rate(size)
        case "opt_gradient_clip_norm":
            return laws.max_grad_norm(size)
        case "num_prompts_per_step":
            return size // laws.GENERATIONS_PER_PROMPT
        case _:
            return None


def is_expected(value: object, expected: object) -> bool:
    """Whether a logged value is the expected one, to the checkers' tolerance of 1e-9."""
    if isinstance(value, bool) or isinstance(expected, str):
        return value == expected
    if isinstance(value, int | float) and isinstance(expected, int | float):
        return abs(value - expected) < 1e-9
    return value == expected


def is_batch_size(value: object) -> bool:
    """Whether a logged global batch size is a positive whole number."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return False
    return value > 0 and value == int(value)
