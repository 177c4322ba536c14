"""Train a policy by reinforcement learning.

Reads a recipe, evaluates the starting policy on held-out tasks, trains it by GRPO on graded episodes, evaluates it
again, and leaves a run directory. A run that was stopped anywhere goes on with --resume, to the same result.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from swerve.cli.recipe_arguments import add_recipe_arguments, dry_run_text, recipe_from
from swerve.config import TrainRecipe, check_startable
from swerve.types import MachineError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the recipe, its settings and `--resume`."""
    add_recipe_arguments(parser, TrainRecipe)
    parser.add_argument("--resume", action="store_true", help="go on with this recipe's last run, or start it")
    parser.add_argument("--run", type=Path, metavar="DIR", help="with --resume: the run directory to go on with")
    parser.add_argument(
        "--profile", nargs="?", const="2:3", metavar="FIRST:LAST",
        help="record these steps into the run directory, for Perfetto and TensorBoard (%(const)s)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    """Trains, or prints what would be trained."""
    recipe = recipe_from(arguments, TrainRecipe)
    from swerve.cli.composition import prepare_jax, read_tasks

    if arguments.dry_run:
        from swerve.cli.training import dry_run_facts

        tasks = read_tasks(recipe.tasks, recipe.evaluation.num_tasks)
        print(
            dry_run_text(
                recipe,
                num_train_tasks=len(tasks.train),
                num_validation_tasks=len(tasks.validation),
                extra=dry_run_facts(recipe),
                as_json=arguments.json,
            )
        )
        return 0
    check_startable(recipe, str(arguments.recipe))
    prepare_jax(recipe.mesh.num_devices)
    from swerve.cli.input_digests import input_digests
    from swerve.cli.profiling import parse_steps
    from swerve.cli.training import closing_lines, read_inputs, train
    from swerve.telemetry import RunDirectory, choose_path, collect_provenance, latest_path

    profiled = parse_steps(arguments.profile, recipe.training.num_steps) if arguments.profile else None
    inputs = read_inputs(recipe)
    provenance = collect_provenance(recipe=recipe, inputs=input_digests(inputs))
    if arguments.resume:
        path = arguments.run or latest_path(recipe, arguments.recipe)
        directory = RunDirectory.resume(path, recipe, provenance)
    else:
        directory = RunDirectory.create(choose_path(recipe, arguments.recipe), recipe, provenance)
    try:
        result = asyncio.run(
            train(
                inputs,
                directory,
                resume=arguments.resume,
                config_name=arguments.recipe.name,
                profiled=profiled,
            )
        )
    except MachineError as error:
        if not recipe.checkpoint.full:
            raise
        again = f"swerve train {directory.recipe} --resume --run {directory.path}"
        raise MachineError(f"{error}: mend that, then go on with {again}") from error
    finally:
        directory.close()
    print("\n".join(closing_lines(result, directory.path, arguments.recipe)))
    if profiled:
        where = directory.profile
        print(f"profile of steps {profiled[0]} to {profiled[1]}: tensorboard --logdir {where}, or open its "
              ".trace.json.gz in https://ui.perfetto.dev")  # fmt: skip
    return 0
