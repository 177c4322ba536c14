"""Launch runs on this machine or a cluster, and look after them.

Turns a recipe into jobs that differ in their seed: each trains, and where it is a scored run evaluates its checkpoints
and checks its log. Everything is checked before anything is submitted, and frozen in a folder, so that a job that
starts again finds what it was. `status` says how far jobs are, `cancel` ends them, `run` is what each of them runs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from swerve.cli.launching import LAUNCHERS, Registered
from swerve.cli.recipe_arguments import add_setting_arguments
from swerve.config import TrainRecipe


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the launchers and the actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, launcher in LAUNCHERS.items():
        _add_launcher(actions.add_parser(name, help=launcher.summary), launcher)
    for name, what in (("status", "say how far the jobs of a launch are"), ("cancel", "end the jobs of a launch")):
        action = actions.add_parser(name, help=what)
        action.add_argument("name", metavar="NAME|DIR", help="name of a launch, or its folder")
        action.add_argument("--site", type=Path, metavar="FILE", help="site file, which says where launches are")
        action.add_argument("--json", action="store_true", help="print JSON")
    run = actions.add_parser("run", help="run one job from wherever it stands: what launchers start")
    run.add_argument("folder", type=Path, metavar="DIR", help="folder of the job")


def _add_launcher(action: argparse.ArgumentParser, launcher: Registered) -> None:
    action.usage = "%(prog)s [RECIPE] [options] [--section.key VALUE] ..."
    action.add_argument("recipe", type=Path, nargs="?", metavar="RECIPE", help="recipe file (default: the site's)")
    action.add_argument("--site", type=Path, metavar="FILE", help="site file (default: ~/.config/swerve/site.toml)")
    action.add_argument("--name", default="", metavar="NAME", help="of the launch (default: recipe, date and time)")
    action.add_argument("--replicas", type=int, default=1, metavar="INT", help="jobs (%(default)s)")
    action.add_argument("--seed-base", type=int, metavar="INT", help="seed of the first (default: by chance)")
    action.add_argument("--dry-run", action="store_true", help="print what would be launched, and stop")
    action.add_argument("--json", action="store_true", help="print JSON")
    shorts = action.add_argument_group("settings by name")
    shorts.add_argument("--gbs", type=int, metavar="INT", help="global batch size, with all that follows by law")
    shorts.add_argument("--lr", metavar="NUMBER", help="optimizer.learning_rate")
    shorts.add_argument("--clip", metavar="NUMBER", help="optimizer.max_grad_norm")
    shorts.add_argument("--val-start", metavar="INT", help="mlperf.first_evaluation_step")
    shorts.add_argument("--max-steps", metavar="INT", help="training.num_steps")
    shorts.add_argument("--target", metavar="NUMBER", help="mlperf.target_accuracy")
    for option, what in launcher.options.items():
        action.add_argument(f"--{option}", metavar="TEXT", help=f"{what}; stands above the site file's")
    add_setting_arguments(action, [TrainRecipe])


def run(arguments: argparse.Namespace) -> int:
    """Does one of them."""
    if arguments.action in LAUNCHERS:
        return _launch(arguments)
    return {"status": _status, "cancel": _cancel, "run": _run}[arguments.action](arguments)


def _launch(arguments: argparse.Namespace) -> int:
    from swerve.cli.launching import describe, make_launch, start, statuses, table

    launch = make_launch(arguments, arguments.action)
    if arguments.dry_run:
        print(describe(launch, arguments.json))
        return 0
    start(launch)
    rows = statuses(launch)
    whole = {"name": launch.name, "folder": str(launch.folder), "jobs": rows}
    print(json.dumps(whole, indent=2) if arguments.json else table(rows))
    return int(any(row["phase"] == "failed" for row in rows))


def _status(arguments: argparse.Namespace) -> int:
    from swerve.cli.launching import find_launch, statuses, table

    rows = statuses(find_launch(arguments.name, arguments.site))
    print(json.dumps(rows, indent=2) if arguments.json else table(rows))
    return int(any(row["phase"] == "failed" for row in rows))


def _cancel(arguments: argparse.Namespace) -> int:
    from swerve.cli.launching import LAUNCHERS, find_launch
    from swerve.launch import read_ids

    launch = find_launch(arguments.name, arguments.site)
    if ids := read_ids(launch):
        LAUNCHERS[launch.launcher].make().cancel(launch, ids)
    return _status(arguments)


def _run(arguments: argparse.Namespace) -> int:
    from swerve.launch.run_and_time import run_job

    return run_job(arguments.folder)
