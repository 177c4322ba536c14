"""Hold two ways to train against each other, by their gradients and updates.

Arms start from the same weights, take the same synthetic trajectories with random advantages, and make real optimizer
steps, one after the other in this process. The reference runs twice, which shows the noise. Each metric's largest
relative difference is judged by the recipe's [bounds]. Exit code 0: PASS; 1: FAIL; 3: INCONCLUSIVE; 2: the input is
at fault. --break spoils the candidate on purpose, which must give FAIL.
"""

from __future__ import annotations

import argparse
import json
import sys
import time

from swerve.cli.ab.breaks import BREAKS, check_break
from swerve.cli.recipe_arguments import add_recipe_arguments, recipe_from
from swerve.config import AbRecipe, arm_recipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the recipe, its settings and the fault."""
    add_recipe_arguments(parser, AbRecipe, dry_run=False)
    parser.add_argument("--json", action="store_true", help="print JSON")
    faults = "; ".join(f"{name}: {(fault.__doc__ or '').rstrip('.')}" for name, fault in BREAKS.items())
    parser.add_argument(
        "--break",
        dest="broken",
        choices=list(BREAKS),
        default="",
        metavar="NAME",
        help=f"spoil the candidate. {faults}",
    )


def run(arguments: argparse.Namespace) -> int:
    """Compares and prints; the exit code is the verdict."""
    recipe = recipe_from(arguments, AbRecipe)
    arms = arm_recipe(recipe, "reference"), arm_recipe(recipe, "candidate")
    if arguments.broken:
        check_break(arguments.broken, arms[1])
    from swerve.cli.composition import load_policy, prepare_jax

    prepare_jax(max(arm.mesh.num_devices for arm in arms))
    from swerve.cli.ab import report, verdicts
    from swerve.cli.ab.arms import run_candidate, run_reference, trainer_of
    from swerve.cli.training import check_computable

    for arm in arms:
        check_computable(arm)
    for line in report.opening_lines(recipe, arguments.recipe, arguments.broken):
        _say(line)
    began = time.monotonic()
    policy = load_policy(recipe.policy, recipe.input.seed)
    reference = run_reference(recipe, arms[0], policy, _say)
    trainer = trainer_of(arms[1], policy)
    candidate = run_candidate(reference, arms[1], trainer, _say, BREAKS.get(arguments.broken))
    comparisons = verdicts.compare(reference, candidate, recipe.bounds)
    if arguments.json:
        seconds = time.monotonic() - began
        print(json.dumps(report.as_json(recipe, arguments.recipe, comparisons, arguments.broken, seconds), indent=2))
    else:
        print("\n".join(report.table(comparisons)))
    return verdicts.EXIT_CODES[verdicts.overall(comparisons)]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
