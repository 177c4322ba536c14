"""Mint, check and look at tasks.

`mint` makes a family's two task files anew, the same bytes every time; `verify` reads a task file strictly, and with
--run grades every task's broken and mended text in real sandboxes; `show` prints one task; `stats` counts; `baseline`
prints what blind enumeration of plausible edits achieves, which a policy must beat.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swerve.config import cache_directory
from swerve.telemetry import machine_faults
from swerve.types import SwerveError

if TYPE_CHECKING:
    from swerve.types import Task

FAMILIES = ("functions", "mini")
TRIES = (1, 2, 3, 4, 5)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    mint = actions.add_parser("mint", help="make a family's training and held-out task files")
    mint.add_argument("family", choices=FAMILIES)
    mint.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where the files go (here)")
    mint.add_argument("--package", action="append", default=[], metavar="NAME", help="functions: only this package")
    for name, default in (("train", 700), ("validation", 251)):
        mint.add_argument(f"--num-{name}", type=int, default=default, metavar="INT", help="tasks (%(default)s)")
    verify = actions.add_parser("verify", help="check a task file")
    verify.add_argument("--run", action="store_true", help="grade the broken and the mended text of every task")
    show = actions.add_parser("show", help="print one task")
    show.add_argument("task", metavar="TASK_ID", help="id of a task")
    stats = actions.add_parser("stats", help="count tasks by package, kind of change and licence")
    baseline = actions.add_parser("baseline", help="print what blind enumeration achieves")
    baseline.add_argument(
        "--exact", action="store_true", help="grade every candidate, for some resolve besides the fix"
    )
    for action in (verify, show, stats, baseline):
        action.add_argument(
            "--tasks",
            default="functions",
            metavar="FILE",
            help="a task file, or functions, mini: the held-out tasks of a family; functions:train its training tasks",
        )
        action.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Does one of them."""
    if arguments.action == "mint":
        return _mint(arguments)
    tasks = _load(arguments.tasks)
    return {"verify": _verify, "show": _show, "stats": _stats, "baseline": _baseline}[arguments.action](
        arguments, tasks
    )


def _load(name: str) -> list[Task]:
    from swerve.environments import load_tasks, shipped_file

    family, _, split = name.partition(":")
    if family in FAMILIES:
        if split not in ("", "train", "validation"):
            raise SwerveError(f"--tasks {name}: a family's tasks are {family}:train or {family}:validation")
        return load_tasks(shipped_file(family, split or "validation"))
    return load_tasks(name)


def _mint(arguments: argparse.Namespace) -> int:
    from swerve.environments import save_tasks

    for split in ("train", "validation"):
        if (number := getattr(arguments, f"num_{split}")) < 1:
            raise SwerveError(f"--num-{split} {number}: must be at least 1: a task file without tasks is none")
    with machine_faults(arguments.out):
        arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.family == "functions":
        from swerve.environments.functions.mint import mint
        from swerve.environments.functions.recipe import MintRecipe

        recipe = MintRecipe(
            packages=tuple(arguments.package),
            num_train=arguments.num_train,
            num_validation=arguments.num_validation,
        )
        made = mint(recipe, lambda line: print(line, file=sys.stderr, flush=True))
        train, validation = made.train, made.validation
    else:
        if arguments.package:
            raise SwerveError("--package: the mini family is generated; it has no packages")
        from swerve.environments.mini import mint_mini

        train, validation = mint_mini(num_train=arguments.num_train, num_validation=arguments.num_validation)
    for split, tasks in (("train", train), ("validation", validation)):
        path = arguments.out / f"{arguments.family}_{split}.jsonl.xz"
        save_tasks(path, tasks)
        print(f"{path}: {len(tasks)} tasks")
    return 0


def _verify(arguments: argparse.Namespace, tasks: Sequence[Task]) -> int:
    faults: dict[str, str] = asyncio.run(_grade_both(tasks)) if arguments.run else {}
    if arguments.json:
        print(json.dumps({"tasks": len(tasks), "graded": bool(arguments.run), "faults": faults}, indent=2))
    else:
        for task, fault in faults.items():
            print(f"{task}: {fault}")
        graded = ", broken and mended text graded" if arguments.run else ""
        print(f"{len(tasks)} tasks read{graded}, {len(faults)} at fault")
    return 2 if faults else 0


async def _grade_both(tasks: Sequence[Task]) -> dict[str, str]:
    from swerve.cli.composition import environment_of
    from swerve.environments import REPAIR_FILE, Grader, gold_text
    from swerve.sandboxes import SandboxPool

    environment = environment_of(tasks)
    faults: dict[str, str] = {}
    async with SandboxPool(environment.images()) as pool:
        grader, gate = Grader(pool, environment), asyncio.Semaphore(2)

        async def one(task: Task) -> None:
            async with gate:
                for what, text, wanted in (
                    ("broken", task.workspace[REPAIR_FILE], 0.0),
                    ("mended", gold_text(task), 1.0),
                ):
                    grade = await grader.grade(task, {REPAIR_FILE: text})
                    if grade.reward != wanted:
                        faults[task.id] = f"the {what} text earns {grade.reward}, expected {wanted}; {grade.error}"

        await asyncio.gather(*map(one, tasks))
    return faults


def _show(arguments: argparse.Namespace, tasks: Sequence[Task]) -> int:
    from swerve.environments import find_task, task_to_json

    task = find_task(tasks, arguments.task, f"--tasks {arguments.tasks}")
    if arguments.json:
        print(json.dumps(task_to_json(task), indent=2))
        return 0
    print(f"{task.id}  ({task.family}, {task.split})\n\n{task.problem_statement}\n")
    for path, text in sorted(task.workspace.items()):
        print(f"--- {path}\n{text.rstrip()}\n")
    print(f"visible tests: {', '.join(task.visible_tests)}\nhidden tests: {', '.join(task.hidden_tests)}")
    if task.provenance is not None:
        where = task.provenance
        print(f"from {where.package} {where.version} ({where.license}), {where.file}:{where.line} {where.qualname}")
    print(f"\n{task.gold_patch}")
    return 0


def _stats(arguments: argparse.Namespace, tasks: Sequence[Task]) -> int:
    known = [task.provenance for task in tasks if task.provenance is not None]
    counts: dict[str, Any] = {
        "tasks": len(tasks),
        "functions": len({(where.package, where.file, where.qualname, where.line) for where in known}),
        "files": len({(where.package, where.file) for where in known}),
        "package": dict(Counter(where.package for where in known).most_common()),
        "kind": dict(Counter(where.mutation.kind if where.mutation else "release" for where in known).most_common()),
        "license": dict(Counter(where.license for where in known).most_common()),
        "hidden_tests_per_task": sum(len(task.hidden_tests) for task in tasks) / max(1, len(tasks)),
    }
    if arguments.json:
        print(json.dumps(counts, indent=2))
        return 0
    for name, value in counts.items():
        if isinstance(value, dict):
            print(f"{name}: " + ", ".join(f"{key} {number}" for key, number in value.items()))
        else:
            print(f"{name}: {value:g}")
    return 0


def _baseline(arguments: argparse.Namespace, tasks: Sequence[Task]) -> int:
    from swerve.environments.functions.baseline import baseline, count_passing

    passing = None
    if arguments.exact:
        passing = count_passing(tasks, cache_directory() / "baseline.json")
    rows = [baseline(tasks, tries, passing) for tries in TRIES]
    if arguments.json:
        print(json.dumps([dataclasses.asdict(row) for row in rows], indent=2))
        return 0
    first = rows[0]
    print(
        f"blind enumeration over {first.num_tasks} tasks: {first.mean_candidates:.1f} candidates per task (median "
        f"{first.median_candidates:g}), the fix is among them for {first.gold_share:.0%}"
    )
    print("tries  pass@1  pass@4")
    for row in rows:
        print(f"{row.num_tries:>5}  {row.pass_at_1:6.3f}  {row.pass_at_4:6.3f}")
    return 0
