"""What the benches of the trainer share: a recipe, a trainer with random weights, synthetic trajectories."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, cast

from swerve.cli.recipe_arguments import add_setting_arguments, overrides_from, recipe_from
from swerve.config import TrainRecipe, parse_recipe, policy_directory
from swerve.types import SwerveError

if TYPE_CHECKING:
    from swerve.models import Qwen35MoeConfig
    from swerve.trainer import GrpoTrainer, Put
    from swerve.types import Group

_DEFAULT = """
kind = "train"

[rollout]
prompts_per_step = 4
generations_per_prompt = 8
context_length = 1024

[algorithm]
importance = "none"
logprob_error_threshold = inf

[packing]
row_length = 1024
rows_per_micro_batch = 4
"""
"""Of the shipped policy's shape; gates are off, since random weights would drop every sequence."""


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares a recipe, which may be left out, and its settings."""
    parser.usage = "%(prog)s [RECIPE] [options] [--section.key VALUE] ..."
    parser.add_argument("recipe", type=Path, nargs="?", metavar="RECIPE", help="recipe (small sizes, one device)")
    parser.add_argument(
        "--seed", type=int, default=0, metavar="INT", help="draws weights and trajectories (%(default)s)"
    )
    add_setting_arguments(parser, [TrainRecipe])


def recipe_of(arguments: argparse.Namespace) -> TrainRecipe:
    """The recipe that the command line asks for, with gates of log-probabilities off.

    Raises:
        SwerveError: It cannot be used, or its gates would drop what is to be measured.
    """
    if arguments.recipe is None:
        return cast("TrainRecipe", parse_recipe(_DEFAULT, "the bench's recipe", overrides_from(arguments)))
    return recipe_from(arguments, TrainRecipe)


def random_trainer(recipe: TrainRecipe, seed: int, put: Put | None = None) -> tuple[GrpoTrainer, Qwen35MoeConfig]:
    """A recipe's trainer, and the shape of its policy; the weights are random, nothing is read but that shape.

    Raises:
        SwerveError: The trainer cannot compute the recipe on this machine.
    """
    from swerve.cli.composition import prepare_jax

    prepare_jax(recipe.mesh.num_devices)
    import jax

    from swerve import models
    from swerve.cli.training import check_computable, make_trainer
    from swerve.models.hf import read_config

    check_computable(recipe)
    section = recipe.policy
    published = section.model != "checkpoint"
    config = models.PUBLISHED[section.model] if published else read_config(policy_directory(section.checkpoint))
    return make_trainer(recipe, config, models.initialise(config, jax.random.key(seed)), put), config


def groups_of_step(recipe: TrainRecipe, config: Qwen35MoeConfig, seed: int, step: int) -> list[Group]:
    """Synthetic groups of a step, as many as the recipe asks for, sampled by the weights of the step before it."""
    from swerve.trainer import SyntheticShape, synthetic_groups

    rollout = recipe.rollout
    return synthetic_groups(
        SyntheticShape(context_length=rollout.context_length),
        rollout.prompts_per_step,
        rollout.generations_per_prompt,
        vocab_size=config.vocab_size,
        seed=seed * 1_000_003 + step,
        version=max(step - 2, 0),
    )


def check_steps(name: str, given: int, least: int) -> None:
    """Refuse too few steps to measure."""
    if given < least:
        raise SwerveError(f"--{name} {given}: must be at least {least}")
