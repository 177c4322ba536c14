"""Evaluate a policy on a recipe's held-out tasks.

Plays `evaluation.attempts` episodes per task and reports pass@k with standard errors. The policy is the recipe's, or
a checkpoint of a run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swerve.cli.recipe_arguments import add_recipe_arguments, dry_run_text, recipe_from
from swerve.config import TrainRecipe
from swerve.telemetry import open_progress, write_json

if TYPE_CHECKING:
    from swerve.evaluation import EvalReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the recipe, its settings, and where weights come from and results go."""
    add_recipe_arguments(parser, TrainRecipe)
    parser.add_argument(
        "--weights", type=Path, metavar="DIR", help="checkpoint of a run, in place of the policy's weights"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the summary here as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Evaluates; exits with 1 if attempts are without verdict."""
    from swerve.cli.composition import read_tasks

    recipe = recipe_from(arguments, TrainRecipe)
    tasks = read_tasks(recipe.tasks, recipe.evaluation.num_tasks)
    if arguments.dry_run:
        print(dry_run_text(recipe, num_validation_tasks=len(tasks.validation), as_json=arguments.json))
        return 0
    report = asyncio.run(_evaluate(recipe, tasks.validation, arguments.weights))
    summary = report.summary()
    if arguments.out:
        write_json(arguments.out, summary)
    print(json.dumps(summary, indent=2) if arguments.json else _text(summary))
    return int(not report.complete)


async def _evaluate(recipe: TrainRecipe, tasks: Any, weights: Path | None) -> EvalReport:
    from swerve.cli.commands.checkpoint import read_checkpoint
    from swerve.cli.composition import episode_roles, load_policy, make_engine, prepare_jax
    from swerve.evaluation import evaluate
    from swerve.orchestrator import EVALUATION_SEED, evaluation_settings
    from swerve.rollout import Progress

    prepare_jax()
    policy = load_policy(recipe.policy, recipe.run.seed)
    params = read_checkpoint(weights).params if weights else None
    progress = open_progress(recipe.telemetry.progress, 1, sys.stderr)
    causes: Counter[str] = Counter()

    def watch(done: Progress) -> None:
        progress.waiting("episodes", done.num_done, done.num_total)
        if error := done.trajectory.error:
            causes[error] += 1
            if causes[error] == 1:
                progress.say(f"{done.trajectory.status.value}: {error}")

    try:
        engine = make_engine(policy, recipe.rollout, params=params)
        async with episode_roles(recipe, tasks, policy.tokenizer, engine) as roles:
            return await evaluate(
                tasks,
                recipe.evaluation.attempts,
                roles=roles,
                settings=evaluation_settings(recipe),
                seed=EVALUATION_SEED,
                retries=recipe.rollout.retries,
                on_progress=watch,
            )
    finally:
        progress.close()


def _text(summary: dict[str, Any]) -> str:
    errors = summary["pass_at_k_standard_error"]
    lines = [f"pass@{k}  {value:.3f} +- {errors[k]:.3f}" for k, value in summary["pass_at_k"].items()]
    lines.append(
        f"{summary['completed_attempts']} of {summary['expected_attempts']} attempts at {summary['instances']} tasks: "
        + ", ".join(f"{count} {status}" for status, count in summary["status_counts"].items())
    )
    if not summary["complete"]:
        lines.append("incomplete: attempts without a verdict count as not resolved, and this is no accuracy")
    return "\n".join(lines)
