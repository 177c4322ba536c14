"""Mint, check and look at tasks.

`mint` makes tasks of packages, the same bytes every time; `verify` reads a task file strictly and grades, in real
sandboxes, the work of an agent that does nothing and of one that makes the gold patch; `show` prints one task; `stats`
counts; `split` holds whole packages or files out; `baseline` prints what blind enumeration of plausible edits achieves,
which a policy must beat. `download` fetches a dataset's files at a pinned revision, `import` makes task files of them.
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

from swerve.cli.benchmark_data import add_import_arguments, check_identity, run_import, verification_pool
from swerve.cli.downloading import add_download_arguments, run_download
from swerve.cli.minting import add_mint_arguments, run_mint, save_files
from swerve.config import cache_directory
from swerve.telemetry import machine_faults
from swerve.types import SwerveError

if TYPE_CHECKING:
    from swerve.types import Task

TRIES = (1, 2, 3, 4, 5)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the actions."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    add_mint_arguments(actions.add_parser("mint", help="make tasks of packages"))
    add_import_arguments(actions)
    add_download_arguments(actions, "datasets")
    verify = actions.add_parser("verify", help="check a task file, and that its tasks hold")
    verify.add_argument("--read-only", action="store_true", help="read the file, and grade nothing")
    verify.add_argument("--jobs", type=int, default=2, metavar="INT", help="tasks graded at once (%(default)s)")
    verify.add_argument(
        "--identity",
        nargs="?",
        const="",
        metavar="FILE",
        help="hold the file against its rows, bytes and SHA-256 first (default: <file>.identity.json)",
    )
    verify.add_argument("--images", default="", metavar="DIR", help="SIF files of tasks that have images of their own")
    show = actions.add_parser("show", help="print one task")
    show.add_argument("task", metavar="TASK_ID", help="id of a task")
    stats = actions.add_parser("stats", help="count tasks by package, kind of change and licence")
    split = actions.add_parser("split", help="hold whole packages or files out")
    split.add_argument("--by", choices=("package", "file"), default="package", help="what stays together (%(default)s)")
    split.add_argument("--validation-share", type=float, default=0.25, metavar="FLOAT", help="held out (%(default)s)")
    split.add_argument("--seed", type=int, default=1, metavar="INT", help="decides what is held out (%(default)s)")
    split.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where the two files go (here)")
    baseline = actions.add_parser("baseline", help="print what blind enumeration achieves")
    baseline.add_argument(
        "--exact", action="store_true", help="grade every candidate, for some resolve besides the fix"
    )
    told = "a task file, or functions, mini: the held-out tasks of a family; functions:train its training tasks"
    for action in (verify, stats, split, baseline):
        action.add_argument("tasks", nargs="?", default="functions", metavar="FILE", help=told)
    show.add_argument("--tasks", default="functions", metavar="FILE", help=told)
    for action in (verify, show, stats, split, baseline):
        action.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Does one of them."""
    if arguments.action == "mint":
        return run_mint(arguments)
    if arguments.action == "import":
        return run_import(arguments)
    if arguments.action == "download":
        return run_download(arguments, "datasets")
    if getattr(arguments, "identity", None) is not None:
        check_identity(Path(arguments.tasks), Path(arguments.identity) if arguments.identity else None)
    from swerve.cli.composition import tasks_named

    tasks = tasks_named(arguments.tasks)
    actions = {"verify": _verify, "show": _show, "stats": _stats, "split": _split, "baseline": _baseline}
    return actions[arguments.action](arguments, tasks)


def _verify(arguments: argparse.Namespace, tasks: Sequence[Task]) -> int:
    if arguments.jobs < 1:
        raise SwerveError(f"--jobs {arguments.jobs}: must be at least 1")
    faults = {} if arguments.read_only else asyncio.run(_grade_both(tasks, arguments.jobs, arguments.images))
    if arguments.json:
        print(json.dumps({"tasks": len(tasks), "graded": not arguments.read_only, "faults": faults}, indent=2))
    else:
        for task, fault in faults.items():
            print(f"{task}: {fault}")
        graded = "" if arguments.read_only else ", no work and the gold patch graded"
        print(f"{len(tasks)} tasks read{graded}, {len(faults)} at fault")
    return 2 if faults else 0


async def _grade_both(tasks: Sequence[Task], jobs: int, images: str) -> dict[str, str]:
    """What is wrong, by task: doing nothing must earn 0, the gold patch 1."""
    from swerve.cli.composition import environment_of
    from swerve.environments import Grader

    environment = environment_of(tasks)
    faults: dict[str, str] = {}
    num_done = 0
    async with verification_pool(environment.images(), images) as pool:
        grader, gate = Grader(pool, environment), asyncio.Semaphore(jobs)

        async def one(task: Task) -> None:
            nonlocal num_done
            async with gate:
                for what, work, wanted in (
                    ("doing nothing", environment.no_work(task), 0.0),
                    ("the gold patch", environment.gold_work(task), 1.0),
                ):
                    grade = await grader.grade(task, work)
                    if grade.reward != wanted:
                        faults[task.id] = f"{what} earns {grade.reward}, expected {wanted}; {grade.error}".rstrip("; ")
            num_done += 1
            if num_done % 50 == 0:
                print(f"{num_done} of {len(tasks)} graded, {len(faults)} at fault", file=sys.stderr, flush=True)

        await asyncio.gather(*map(one, tasks))
    return {task.id: faults[task.id] for task in tasks if task.id in faults}


def _split(arguments: argparse.Namespace, tasks: Sequence[Task]) -> int:
    from swerve.environments import hold_out

    if not Path(arguments.tasks).is_file():
        raise SwerveError(f"tasks split {arguments.tasks}: name a task file; the shipped families are split already")
    train, validation = hold_out(
        tasks, by=arguments.by, share=arguments.validation_share, seed=arguments.seed, where=arguments.tasks
    )
    with machine_faults(arguments.out):
        arguments.out.mkdir(parents=True, exist_ok=True)
    name = Path(arguments.tasks).name
    stem, suffix = name.removesuffix(".xz").removesuffix(".jsonl"), ".jsonl.xz" if name.endswith(".xz") else ".jsonl"
    splits = {"train": train, "validation": validation}
    files = {arguments.out / f"{stem}_{split}{suffix}": group for split, group in splits.items()}
    save_files(files, arguments.json)
    return 0


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
