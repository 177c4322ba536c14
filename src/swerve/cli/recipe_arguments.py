"""A recipe on the command line: its file, then any setting as `--section.key VALUE`, with help from the schema."""

import argparse
import itertools
import json
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, TypeVar

from swerve.config import (
    AbRecipe,
    PretrainRecipe,
    Recipe,
    Setting,
    TrainRecipe,
    batch_arithmetic,
    digest,
    read_recipe,
    read_recipe_as,
    render,
    render_value,
    settings,
    settings_by_law,
)
from swerve.config.describe import is_union

R = TypeVar("R", TrainRecipe, PretrainRecipe, AbRecipe)

_METAVARS = {bool: "{true,false}", int: "INT", float: "NUMBER", str: "TEXT"}
_PREFIX = "setting "
_BY_LAW = "global batch size"


def add_recipe_arguments(parser: argparse.ArgumentParser, *schemas: type, dry_run: bool = True) -> None:
    """Adds the recipe's file and every setting of it.

    Args:
        parser: Of the command.
        schemas: Kinds of recipe that the command takes.
        dry_run: Also add `--dry-run`.
    """
    parser.usage = "%(prog)s RECIPE [options] [--section.key VALUE] ..."
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="recipe file (TOML)")
    if dry_run:
        parser.add_argument("--dry-run", action="store_true", help="print what would run, and stop")
        parser.add_argument("--json", action="store_true", help="with --dry-run: print JSON")
    if TrainRecipe in schemas:
        parser.add_argument(
            "--gbs", type=int, metavar="N", dest=_BY_LAW,
            help="global batch size of the benchmark: sets prompts, generations, learning rate, clip and, where it is "
            "published, the number of steps; a setting given by its own name stands above it",
        )  # fmt: skip
    add_setting_arguments(parser, schemas)


def add_setting_arguments(parser: argparse.ArgumentParser, schemas: Sequence[type]) -> None:
    """Adds every setting of the schemas as an option that overrides the recipe's file.

    Args:
        parser: Of the command.
        schemas: Kinds of recipe; a key that several have appears once.
    """
    unique = {setting.key: setting for schema in schemas for setting in settings(schema) if setting.key != "kind"}
    for section, members in itertools.groupby(unique.values(), key=lambda setting: setting.key.rpartition(".")[0]):
        group = parser.add_argument_group(f"[{section}]" if section else "recipe")
        for setting in members:
            group.add_argument(
                f"--{setting.key}",
                dest=_PREFIX + setting.key,
                default=argparse.SUPPRESS,
                metavar=_metavar(setting),
                help=f"{setting.help} (default {render_value(setting.default)})".replace("%", "%%"),
            )


def _metavar(setting: Setting) -> str:
    if typing.get_origin(setting.type) is Literal:
        return "{" + ",".join(map(str, typing.get_args(setting.type))) + "}"
    if is_union(setting.type):
        return "NUMBER|" + "|".join(map(str, typing.get_args(typing.get_args(setting.type)[1])))
    return _METAVARS.get(setting.type, "LIST")


def overrides_from(arguments: argparse.Namespace) -> dict[str, str]:
    """Settings given on the command line, as text by key: those that follow from `--gbs`, then those named.

    Raises:
        SwerveError: The global batch size is none of the benchmark, or is given twice.
    """
    words = vars(arguments)
    named = {name.removeprefix(_PREFIX): value for name, value in words.items() if name.startswith(_PREFIX)}
    batch = words.get(_BY_LAW)
    if batch is None:
        return named
    return settings_by_law(batch, named) | named


def recipe_from(arguments: argparse.Namespace, schema: type[R]) -> R:
    """The recipe that the command line asks for.

    Args:
        arguments: Parsed, with those of `add_recipe_arguments`.
        schema: Kind of recipe that the command needs.

    Returns:
        The recipe, checked.

    Raises:
        RecipeError: It cannot be used.
    """
    return read_recipe_as(schema, arguments.recipe, overrides_from(arguments))


def any_recipe_from(arguments: argparse.Namespace, path: Path | None = None) -> Recipe:
    """As `recipe_from`, of any kind, and from another file where `path` names one."""
    return read_recipe(path or arguments.recipe, overrides_from(arguments))


def dry_run_text(
    recipe: Recipe,
    *,
    num_train_tasks: int = 0,
    num_validation_tasks: int = 0,
    extra: Mapping[str, float | str] | None = None,
    as_json: bool = False,
) -> str:
    """What `--dry-run` prints: the resolved recipe and what it amounts to.

    Args:
        recipe: Checked recipe.
        num_train_tasks: Training tasks there are, 0 where unknown.
        num_validation_tasks: Held-out tasks there are, 0 where unknown.
        extra: Further lines, for example a memory estimate.
        as_json: One JSON object instead of text.

    Returns:
        Text without a final newline.
    """
    counts = {**batch_arithmetic(recipe, num_train_tasks, num_validation_tasks), **(extra or {})}
    if as_json:
        return json.dumps({"recipe": render(recipe), "digest": digest(recipe), **counts}, indent=2)
    width = max(map(len, counts))
    lines = [f"# {name:<{width}}  {_plain(value)}" for name, value in counts.items()]
    return "\n".join([render(recipe), f"# {'recipe digest':<{width}}  {digest(recipe)}", *lines])


def _plain(value: float | str) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) or value == int(value) else f"{value:,.3g}"
