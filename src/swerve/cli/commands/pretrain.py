"""Make a policy by imitation of demonstrated repairs.

Reads a pre-training recipe, builds the corpus from its lock file, and trains from random weights for hours. Stopped
by Ctrl-C or killed, it goes on with --resume, to the same weights. The finished policy is a directory of Hugging Face
files that `--policy.checkpoint` takes.
"""

from __future__ import annotations

import argparse
import signal
from pathlib import Path

from swerve.cli.recipe_arguments import add_recipe_arguments, dry_run_text, recipe_from
from swerve.config import PretrainRecipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the recipe, its settings and `--resume`."""
    add_recipe_arguments(parser, PretrainRecipe)
    parser.add_argument("--resume", action="store_true", help="go on with this recipe's last run")
    parser.add_argument("--run", type=Path, metavar="DIR", help="with --resume: the run directory to go on with")


def say(line: str) -> None:
    """Shows one line at once."""
    print(line, flush=True)


def run(arguments: argparse.Namespace) -> int:
    """Pre-trains, or prints what would be done."""
    recipe = recipe_from(arguments, PretrainRecipe)
    if arguments.dry_run:
        print(dry_run_text(recipe, as_json=arguments.json))
        return 0
    from swerve.cli.composition import prepare_jax
    from swerve.telemetry import RunDirectory, choose_path, collect_provenance, latest_path

    prepare_jax()
    from swerve.cli.pretraining import read_sources, run_pretraining

    stopping: list[int] = []
    provenance = collect_provenance(recipe=recipe)
    if arguments.resume:
        path = arguments.run or latest_path(recipe, arguments.recipe)
        directory = RunDirectory.resume(path, recipe, provenance)
    else:
        directory = RunDirectory.create(choose_path(recipe, arguments.recipe), recipe, provenance)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda received, _: stopping.append(received))
    try:
        sources = read_sources(recipe, say)
        finished = run_pretraining(recipe, sources, directory, say, lambda: bool(stopping))
    finally:
        directory.close()
    if finished is None:
        print(f"stopped; go on with swerve pretrain {arguments.recipe} --resume --run {directory.path}")
        return 128 + stopping[0]
    print(f"{finished}: the policy; try it with swerve eval recipes/demo.toml --policy.checkpoint {finished}")
    return 0
