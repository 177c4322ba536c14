"""The benchmark's laws: what follows from the global batch size, derived in one place.

The global batch size (GBS) is the number of episodes of one optimizer step, prompts times 16 generations.
Source: MLPerf Training, `qwen35_397b_grpo`, hyperparameter rules.
"""

import math

GENERATIONS_PER_PROMPT = 16
"""Episodes per training prompt."""
BATCH_SIZES = (256, 512, 1024, 1152)
"""Global batch sizes of the benchmark's published settings."""
MAX_STEPS = {256: 30, 512: 20, 1024: 10, 1152: 10}
"""Optimizer steps at most, for each of `BATCH_SIZES`."""
CONTEXT_LENGTH = 65_536
"""Tokens of one episode at most."""
NUM_EVALUATION_TASKS = 251
"""Held-out tasks of an evaluation."""
TARGET_ACCURACY = 0.69
"""pass@4 on the held-out tasks at which a run has reached the benchmark's quality."""


def num_prompts(global_batch_size: int) -> int:
    """Prompts of one step.

    Args:
        global_batch_size: Episodes of one step, a multiple of 16.

    Returns:
        GBS / 16.

    Raises:
        ValueError: GBS is not a positive multiple of 16.
    """
    prompts, rest = divmod(global_batch_size, GENERATIONS_PER_PROMPT)
    if rest or prompts < 1:
        raise ValueError(f"a global batch size is a positive multiple of 16, not {global_batch_size}")
    return prompts


def learning_rate(global_batch_size: int) -> float:
    """Constant learning rate: 1e-6 * sqrt(GBS / 256)."""
    return 1e-6 * math.sqrt(global_batch_size / 256)


def max_grad_norm(global_batch_size: int) -> float:
    """Bound of the gradient's global norm: 0.125 * sqrt(256 / GBS)."""
    return 0.125 * math.sqrt(256 / global_batch_size)


def first_evaluation_step(global_batch_size: int) -> int:
    """First step after which the policy is evaluated: ceil(2.5 + 3840 / GBS)."""
    return math.ceil(2.5 + 3840 / global_batch_size)


def settings(global_batch_size: int) -> dict[str, int | float]:
    """Every setting of a recipe that follows from the global batch size, by its dotted name.

    Args:
        global_batch_size: Episodes of one step, a multiple of 16.

    Returns:
        The batch itself, the learning rate, the clip, and, for one of `BATCH_SIZES`, the number of steps; the first
        evaluation follows of itself where a recipe leaves `mlperf.first_evaluation_step` at 0.

    Raises:
        ValueError: GBS is not a positive multiple of 16.
    """
    found: dict[str, int | float] = {
        "rollout.prompts_per_step": num_prompts(global_batch_size),
        "rollout.generations_per_prompt": GENERATIONS_PER_PROMPT,
        "optimizer.learning_rate": learning_rate(global_batch_size),
        "optimizer.max_grad_norm": max_grad_norm(global_batch_size),
    }
    if global_batch_size in MAX_STEPS:
        found["training.num_steps"] = MAX_STEPS[global_batch_size]
    return found
