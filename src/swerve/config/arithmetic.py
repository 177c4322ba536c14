"""What a recipe amounts to before anything runs: episodes, tokens, micro-batches, passes over the tasks."""

import math

from swerve.config.schema import AbRecipe, PretrainRecipe, Recipe, TrainRecipe


def batch_arithmetic(recipe: Recipe, num_train_tasks: int = 0, num_validation_tasks: int = 0) -> dict[str, float]:
    """Counts that follow from a recipe alone.

    Args:
        recipe: Any recipe.
        num_train_tasks: Training tasks there are, 0 where unknown; `tasks.num_train` bounds it.
        num_validation_tasks: Held-out tasks there are, 0 where unknown; `evaluation.num_tasks` bounds it.

    Returns:
        Named counts, in an order fit for reading. Worst cases are upper bounds: every episode fills its context.
    """
    if isinstance(recipe, PretrainRecipe):
        return _pretrain(recipe)
    if isinstance(recipe, AbRecipe):
        given = recipe.input
        return {"optimizer_steps": given.num_steps, "global_batch_size": given.num_groups * given.group_size}
    return _train(recipe, num_train_tasks, num_validation_tasks)


def fitting_rows(longest: int, row_length: int, num_rows: int, least_rows: int = 1) -> tuple[int, int]:
    """Rows that hold the longest sequence of a step: twice as long until they do, and then fewer of them.

    Args:
        longest: Tokens of that sequence.
        row_length: Token slots of a row as a rule.
        num_rows: Rows of a micro-batch as a rule.
        least_rows: Rows below which a micro-batch does not divide over its devices; divides `num_rows`.

    Returns:
        Rows of a micro-batch, a multiple of `least_rows`, and token slots of each.
    """
    shares = num_rows // least_rows
    while row_length < longest:
        row_length, shares = 2 * row_length, max(1, shares // 2)
    return shares * least_rows, row_length


def _train(recipe: TrainRecipe, num_train_tasks: int, num_validation_tasks: int) -> dict[str, float]:
    rollout, packing, steps = recipe.rollout, recipe.packing, recipe.training.num_steps
    batch = rollout.global_batch_size
    mesh = recipe.mesh
    rows, row_length = fitting_rows(
        rollout.context_length, packing.row_length, packing.rows_per_micro_batch, mesh.fsdp * mesh.expert
    )
    num_rows = math.ceil(batch / (row_length // rollout.context_length))
    counts: dict[str, float] = {
        "global_batch_size": batch,
        "optimizer_steps": steps,
        "training_episodes": batch * steps,
        "decode_rounds_per_step": math.ceil(batch / rollout.num_slots),
        "max_turns_per_step": batch * recipe.agent.max_turns,
        "max_tokens_per_step": batch * rollout.context_length,
        "micro_batch_token_slots": packing.row_length * packing.rows_per_micro_batch,
        "max_micro_batches_per_step": math.ceil(num_rows / rows),
    }
    if tasks := _bounded(num_train_tasks, recipe.tasks.num_train):
        counts["training_tasks"] = tasks
        counts["passes_over_training_tasks"] = rollout.prompts_per_step * steps / tasks
    if tasks := _bounded(num_validation_tasks, recipe.evaluation.num_tasks):
        counts["validation_tasks"] = tasks
        counts["episodes_per_evaluation"] = tasks * recipe.evaluation.attempts
    every = recipe.evaluation.every
    between = (steps - 1 if recipe.evaluation.after else steps) // every if every else 0
    counts["evaluations"] = int(recipe.evaluation.before) + between + int(recipe.evaluation.after)
    return counts


def _pretrain(recipe: PretrainRecipe) -> dict[str, float]:
    training = recipe.training
    slots = training.row_length * training.rows_per_micro_batch
    then = recipe.continuation
    steps, tokens = _steps(training.micro_batches, training.num_tokens, slots)
    more_steps, more_tokens = _steps(((0, then.micro_batches),), then.num_tokens, slots)
    return {
        "optimizer_steps": steps + more_steps,
        "token_slots": tokens + more_tokens,
        "micro_batch_token_slots": slots,
        "exports": training.num_tokens // training.export_tokens if training.export_tokens else 1,
    }


def _steps(plan: tuple[tuple[int, ...], ...], num_tokens: int, slots: int) -> tuple[int, int]:
    """Steps and token slots of a phase: `plan` pairs a start with micro-batches a step, each of so many slots."""
    steps = tokens = 0
    ends = [start for start, _ in plan[1:]] + [num_tokens]
    for (_, micro_batches), end in zip(plan, ends, strict=True):
        more = max(0, math.ceil((min(end, num_tokens) - tokens) / (slots * micro_batches)))
        steps += more
        tokens += more * slots * micro_batches
    return steps, tokens


def _bounded(there_are: int, wanted: int) -> int:
    return min(there_are, wanted) if there_are and wanted else there_are or wanted
