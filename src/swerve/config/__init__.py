"""Recipes: this package owns the schema of every setting, its reader, and what follows from the settings alone.

A recipe is a TOML file read into frozen dataclasses; the file first, then the command line, and nothing else, sets a
value. Importing it costs little and brings in no array library.
"""

from swerve.config.arithmetic import batch_arithmetic, fitting_rows
from swerve.config.describe import Setting, flatten, settings
from swerve.config.directories import TINY_POLICY, cache_directory, policy_directory
from swerve.config.reader import (
    RecipeError,
    arm_recipe,
    check_recipe,
    check_startable,
    parse_recipe,
    read_layered,
    read_recipe,
    read_recipe_as,
    read_settings,
    settings_by_law,
    stated_values,
)
from swerve.config.render import Difference, diff, digest, render, render_value
from swerve.config.schema import SCHEMAS, AbRecipe, PretrainRecipe, Recipe, RunRecipe, TrainRecipe

__all__ = [
    "SCHEMAS",
    "TINY_POLICY",
    "AbRecipe",
    "Difference",
    "PretrainRecipe",
    "Recipe",
    "RecipeError",
    "RunRecipe",
    "Setting",
    "TrainRecipe",
    "arm_recipe",
    "batch_arithmetic",
    "cache_directory",
    "check_recipe",
    "check_startable",
    "diff",
    "digest",
    "fitting_rows",
    "flatten",
    "parse_recipe",
    "policy_directory",
    "read_layered",
    "read_recipe",
    "read_recipe_as",
    "read_settings",
    "render",
    "render_value",
    "settings",
    "settings_by_law",
    "stated_values",
]
