"""Show, check and compare recipes."""

import argparse
import json
from pathlib import Path

from swerve.cli.recipe_arguments import add_recipe_arguments, add_setting_arguments, any_recipe_from
from swerve.config import SCHEMAS, RecipeError, diff, digest, flatten, read_recipe, render


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares `show`, `check` and `diff`."""
    actions = parser.add_subparsers(required=True, dest="action", metavar="{show,check,diff}")
    schemas = list(SCHEMAS.values())

    show = actions.add_parser("show", help="print a recipe with every setting resolved")
    show.add_argument("--comments", action="store_true", help="say what each setting does")
    show.add_argument("--json", action="store_true", help="print JSON")
    add_recipe_arguments(show, *schemas, dry_run=False)

    check = actions.add_parser("check", help="say what is wrong with recipes")
    check.add_argument("recipes", type=Path, nargs="+", metavar="RECIPE", help="recipe files (TOML)")

    compare = actions.add_parser("diff", help="list the settings in which two recipes differ")
    compare.usage = "%(prog)s LEFT RIGHT [options] [--section.key VALUE] ..."
    compare.add_argument("left", type=Path, metavar="LEFT", help="recipe file (TOML)")
    compare.add_argument("right", type=Path, metavar="RIGHT", help="recipe file (TOML)")
    compare.add_argument("--json", action="store_true", help="print JSON")
    add_setting_arguments(compare, schemas)


def run(arguments: argparse.Namespace) -> int:
    """Does one of them; `check` and `diff` exit with 2 and 1 where there is something to say."""
    return {"show": _show, "check": _check, "diff": _diff}[arguments.action](arguments)


def _show(arguments: argparse.Namespace) -> int:
    recipe = any_recipe_from(arguments)
    if arguments.json:
        print(json.dumps({"digest": digest(recipe), **flatten(recipe)}, indent=2))
    else:
        print(render(recipe, comments=arguments.comments), end="")
    return 0


def _check(arguments: argparse.Namespace) -> int:
    problems: list[str] = []
    for path in arguments.recipes:
        try:
            recipe = read_recipe(path)
            print(f"{path}: ok, {recipe.kind}, digest {digest(recipe)[:12]}")
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)
    return 0


def _diff(arguments: argparse.Namespace) -> int:
    differences = diff(any_recipe_from(arguments, arguments.left), any_recipe_from(arguments, arguments.right))
    if arguments.json:
        print(json.dumps({line.key: [line.left, line.right] for line in differences}, indent=2))
    else:
        print("\n".join(map(str, differences)) or "the same settings")
    return int(bool(differences))
