"""Evaluate a policy on a recipe's held-out tasks.

Plays `evaluation.attempts` episodes per task and reports pass@k with standard errors. The policy is the recipe's, or
a checkpoint of a run. With --manifest it is the offline evaluation of a scored run: every checkpoint in the order of
steps, until one reaches the target, into the run's MLPerf log; it can be stopped at any time and started again.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from swerve.cli.recipe_arguments import add_recipe_arguments, dry_run_text, overrides_from, recipe_from
from swerve.config import TrainRecipe
from swerve.telemetry import die_with_parent
from swerve.types import SwerveError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the recipe, its settings, and where weights come from and results go."""
    add_recipe_arguments(parser, TrainRecipe)
    parser.add_argument(
        "--weights", type=Path, metavar="DIR", help="checkpoint of a run, in place of the policy's weights"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="keep attempts and summary here, and go on from what is there"
    )
    offline = parser.add_argument_group("scored runs")
    offline.add_argument(
        "--manifest", type=Path, metavar="FILE", help="eval_checkpoints.jsonl of a scored run, to evaluate and log all"
    )
    offline.add_argument("--step", type=int, metavar="INT", help="with --manifest: this step alone, without logging it")
    offline.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)  # ends with whoever started it
    offline.add_argument("--workers", type=int, default=1, metavar="INT", help="checkpoints at once (%(default)s)")
    offline.add_argument(
        "--mock", metavar="ACCURACIES", help="rehearse with these, for example 0.5,0.7, in a copy of the log"
    )


def run(arguments: argparse.Namespace) -> int:
    """Evaluates; exits with 1 if attempts are without verdict."""
    from swerve.cli.composition import engine_words, read_tasks

    _check_options(arguments)
    recipe = recipe_from(arguments, TrainRecipe)
    if arguments.workers != 1 and recipe.engine.kind != "embedded":
        raise SwerveError(
            f"--workers {arguments.workers}: the servers of engine.urls hold one policy at a time: remove it"
        )
    tasks = read_tasks(recipe.tasks, recipe.evaluation.num_tasks)
    if arguments.dry_run:
        extra = {"engine": engine_words(recipe), "sandboxes": f"on this machine, {recipe.sandbox.backend}"}
        print(dry_run_text(recipe, num_validation_tasks=len(tasks.validation), extra=extra, as_json=arguments.json))
        return 0
    if arguments.manifest and arguments.step is None:
        return _evaluate_run(recipe, len(tasks.validation), arguments)
    from swerve.cli.evaluation import Evaluated, evaluate_policy

    if arguments.worker:
        die_with_parent()
    checkpoint = _checkpoint_of(arguments.manifest, arguments.step) if arguments.manifest else None
    evaluated = Evaluated(
        recipe=recipe, tasks=tasks.validation, checkpoint=checkpoint, weights=arguments.weights, out=arguments.out
    )
    report = asyncio.run(evaluate_policy(evaluated))
    summary = report.summary()
    print(json.dumps(summary, indent=2) if arguments.json else _text(summary))
    return int(not report.complete)


def _check_options(arguments: argparse.Namespace) -> None:
    """Refuse options that contradict each other or would do nothing."""
    if arguments.manifest and arguments.weights:
        raise SwerveError("--manifest and --weights both name weights: give one of them")
    for option in ("step", "mock"):
        if getattr(arguments, option) is not None and not arguments.manifest:
            raise SwerveError(f"--{option} has no effect without --manifest: remove it")
    if arguments.workers != 1 and (not arguments.manifest or arguments.step is not None):
        raise SwerveError("--workers is for all checkpoints of --manifest: remove it")
    if arguments.workers < 1:
        raise SwerveError(f"--workers {arguments.workers}: must be at least 1")
    for option, default in (("step", None), ("workers", 1)):
        if arguments.mock is not None and getattr(arguments, option) != default:
            raise SwerveError(f"--mock rehearses all checkpoints, and evaluates none: remove --{option}")


def _checkpoint_of(manifest: Path, step: int) -> Any:
    from swerve.mlperf.manifest import read_manifest

    checkpoints = {one.step: one for one in read_manifest(manifest)}
    if step not in checkpoints:
        raise SwerveError(f"--step {step}: {manifest} holds steps {min(checkpoints)} to {max(checkpoints)}")
    return checkpoints[step]


def _evaluate_run(recipe: TrainRecipe, num_tasks: int, arguments: argparse.Namespace) -> int:
    """Evaluates a scored run; exits with 0 once its log is finished, whether the target was reached or not."""
    from swerve.cli.offline import evaluate_run
    from swerve.mlperf.log import require_package
    from swerve.mlperf.manifest import read_manifest

    require_package()
    mock = _accuracies(arguments.mock) if arguments.mock is not None else None
    out = arguments.out or arguments.manifest.parent / "evaluation"
    settings = [word for key, value in overrides_from(arguments).items() for word in (f"--{key}", value)]
    command = [sys.executable, "-m", "swerve.cli", "eval", str(arguments.recipe), *settings]
    outcome = evaluate_run(
        read_manifest(arguments.manifest),
        out,
        [*command, "--manifest", str(arguments.manifest), "--worker", "--telemetry.progress", "none"],
        num_workers=arguments.workers,
        num_attempts=num_tasks * recipe.evaluation.attempts,
        mock=mock,
    )
    if arguments.json:
        print(json.dumps({**dataclasses.asdict(outcome), "log": str(outcome.log)}, indent=2))
    else:
        reached = f"reached at step {outcome.step}" if outcome.step is not None else "not reached"
        print(f"target {reached}: run_stop {outcome.status} is in {outcome.log}")
    return 0


def _accuracies(text: str) -> list[float]:
    try:
        found = [float(word) for word in text.split(",")]
    except ValueError:
        found = [-1.0]
    if not all(0 <= one <= 1 for one in found):
        raise SwerveError(f"--mock {text}: expected accuracies from 0 to 1, separated by commas")
    return found


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
