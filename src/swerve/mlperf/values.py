"""What a scored run logs about itself before it starts: every key of the rules, each value read from the recipe.

Order matters to the checkers: the global batch size comes before learning rate, clip and generations, prompts come
before generations. No key of ours contains a reserved word, since readers of reference convergence match substrings.
Source: `mlperf-logging`, ruleset 6.1.0, common, closed_common and closed_qwen35_397b_grpo.
"""

from __future__ import annotations

from collections.abc import Iterator

from swerve.config import TrainRecipe
from swerve.mlperf.rules import BENCHMARK

_PRECISIONS = {"float32": "fp32", "bfloat16": "bfloat16"}


def logged_values(
    recipe: TrainRecipe, *, seed: int, num_train_tasks: int, num_evaluation_tasks: int, config_name: str
) -> Iterator[tuple[str, object]]:
    """Keys and values, in the order in which they are logged.

    Args:
        recipe: Of a scored run.
        seed: Of the run.
        num_train_tasks: Tasks trained on.
        num_evaluation_tasks: Held-out tasks.
        config_name: Name of the recipe's file.
    """
    rollout, optimizer, evaluation, mesh = recipe.rollout, recipe.optimizer, recipe.evaluation, recipe.mesh
    yield "submission_benchmark", BENCHMARK
    yield "submission_org", recipe.mlperf.org
    yield "submission_division", recipe.mlperf.division
    yield "submission_status", recipe.mlperf.status
    yield "submission_platform", recipe.mlperf.platform
    yield "seed", seed
    yield "max_steps", recipe.training.num_steps
    yield "global_batch_size", rollout.global_batch_size
    yield "micro_batch_size", recipe.packing.rows_per_micro_batch // (mesh.fsdp * mesh.expert)
    yield "max_sequence_length", rollout.context_length
    yield "train_samples", num_train_tasks
    yield "eval_samples", num_evaluation_tasks
    yield "init_checkpoint_step", 0
    yield "opt_name", "adamw"
    yield "opt_base_learning_rate", optimizer.learning_rate
    yield "opt_end_learning_rate", optimizer.learning_rate
    yield "opt_adamw_beta_1", optimizer.beta1
    yield "opt_adamw_beta_2", optimizer.beta2
    yield "opt_adamw_epsilon", optimizer.eps
    yield "opt_adamw_weight_decay", optimizer.weight_decay
    yield "opt_gradient_clip_norm", optimizer.max_grad_norm
    yield "opt_learning_rate_warmup_steps", optimizer.warmup_steps
    yield "opt_learning_rate_decay_schedule", "constant"
    yield "lowest_numerical_precision_in_linear", _lowest(recipe)
    yield "lowest_numerical_precision_in_attn", _PRECISIONS[recipe.execution.activation_dtype]
    yield "lowest_numerical_precision_in_comm", _lowest(recipe)
    yield "tensor_parallelism", mesh.tensor
    yield "pipeline_parallelism", 1
    yield "context_parallelism", mesh.context
    yield "expert_parallelism", mesh.expert
    yield "config_filename", config_name
    yield "generation_backend", "swerve" if recipe.engine.kind == "embedded" else recipe.engine.kind
    yield "generation_training_rollout_temperature", rollout.temperature
    yield "generation_training_rollout_top_p", rollout.top_p
    yield "generation_validation_rollout_temperature", evaluation.temperature
    yield "generation_validation_rollout_top_p", evaluation.top_p
    yield "num_prompts_per_step", rollout.prompts_per_step
    yield "num_generations_per_prompt", rollout.generations_per_prompt
    if recipe.algorithm.importance == "sequence_mask":
        yield "truncated_importance_sampling_ratio_min", recipe.algorithm.sequence_gate_low
        yield "truncated_importance_sampling_ratio", recipe.algorithm.sequence_gate_high
        yield "truncated_importance_sampling_type", "seq-mask-tis"
    yield "max_trajectory_age", recipe.training.max_trajectory_age
    yield "target_accuracy", recipe.mlperf.target_accuracy


def _lowest(recipe: TrainRecipe) -> str:
    """The narrower of the types of weights and activations: both enter products and cross between devices."""
    types = (recipe.execution.parameter_dtype, recipe.execution.activation_dtype)
    return _PRECISIONS["bfloat16" if "bfloat16" in types else "float32"]
