"""The programs of a recipe's optimizer step, with what the model itself needs by the usual rule."""

from __future__ import annotations

import math

from jax.sharding import Mesh

from swerve import models
from swerve.config import TrainRecipe, policy_directory
from swerve.models.hf import read_config
from swerve.planning.job import Planned
from swerve.trainer import longest_rows, plan_programs


def recipe_programs(recipe: TrainRecipe, mesh: Mesh) -> dict[str, Planned]:
    """The programs of an optimizer step of a training recipe.

    Args:
        recipe: The recipe.
        mesh: Devices of the shape that it asks for.

    Returns:
        `micro_batch` and `update`. The reference of a micro-batch is six FLOPs for each active parameter and token
        slot: forward and backward, nothing computed again, attention's scores left out.
    """
    section = recipe.policy
    if section.model == "checkpoint":
        config = read_config(policy_directory(section.checkpoint))
    else:
        config = models.PUBLISHED[section.model]
    num_tokens = math.prod(longest_rows(recipe))
    reference = {"micro_batch": 6.0 * models.num_active_parameters(config) * num_tokens}
    return {
        name: Planned(
            jitted=program.jitted,
            arguments=program.arguments,
            kinds=program.kinds,
            reference_flops=reference.get(name, 0.0),
        )
        for name, program in plan_programs(recipe, config, mesh).items()
    }
