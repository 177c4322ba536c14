"""Build images, attack the grader, and sweep what killed runs have left behind.

`cheats` plays attacks on the grading of a task in real sandboxes, and the right repair; it exits with 1 unless every
attack earned nothing and the repair earned 1. `reap` kills and removes what sandboxes of killed launchers left. `build`
makes SIF files, `images` verifies them.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
from typing import TYPE_CHECKING

from swerve.cli import image_building
from swerve.types import SwerveError

if TYPE_CHECKING:
    from swerve.environments.cheats import Outcome


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    cheats = actions.add_parser("cheats", help="play attacks on the grader")
    cheats.add_argument("--tasks", default="functions", metavar="FILE", help="task file or family (%(default)s)")
    cheats.add_argument("--task", default="", metavar="TASK_ID", help="one of its tasks (default: the first)")
    reap = actions.add_parser("reap", help="sweep what killed runs have left behind")
    for action in (cheats, reap):
        action.add_argument("--json", action="store_true", help="print JSON")
    image_building.add_arguments(actions)


def run(arguments: argparse.Namespace) -> int:
    """Does one of them."""
    known = {"cheats": _cheats, "reap": _reap, "build": image_building.run_build, "images": image_building.run_images}
    return known[arguments.action](arguments)


def _cheats(arguments: argparse.Namespace) -> int:
    outcomes = asyncio.run(_play(arguments.tasks, arguments.task))
    num_caught = sum(outcome.caught for outcome in outcomes)
    if arguments.json:
        rows = [dataclasses.asdict(outcome) for outcome in outcomes]
        print(json.dumps({"attacks": len(outcomes) - 1, "all_caught": num_caught == len(outcomes), "outcomes": rows}))
    else:
        for outcome in outcomes:
            mark = "ok" if outcome.caught else "FAILED"
            print(f"{outcome.name:<56}{mark:<8}reward {outcome.reward}  {outcome.detail[:80]}")
        print(f"{len(outcomes) - 1} attacks and the right repair: {num_caught} of {len(outcomes)} as they should be")
    return int(num_caught < len(outcomes))


async def _play(source: str, wanted: str) -> list[Outcome]:
    from swerve.cli.composition import environment_of, tasks_named
    from swerve.environments import find_task
    from swerve.environments.cheats import play_all
    from swerve.sandboxes import SandboxPool

    tasks = [
        task for task in tasks_named(source) if task.provenance is not None and task.provenance.mutation is not None
    ]
    if not tasks or tasks[0].family == "mini":
        raise SwerveError(f"--tasks {source}: attacks need tasks of functions or of packages broken in one place")
    task = find_task(tasks, wanted, f"--tasks {source}") if wanted else tasks[0]
    environment = environment_of([task])
    async with SandboxPool(environment.images()) as pool:
        return await play_all(task, pool, environment)


def _reap(arguments: argparse.Namespace) -> int:
    from swerve.sandboxes.reaper import reap

    num_swept = reap()
    print(json.dumps({"swept": num_swept}) if arguments.json else f"{num_swept} sandboxes of killed runs swept")
    return 0
