"""`swerve tasks mint`: makes task files from packages, or a shipped family's files anew."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swerve.telemetry import machine_faults
from swerve.types import SwerveError

if TYPE_CHECKING:
    from swerve.environments.repository.mint import PackageReport
    from swerve.environments.repository.recipe import FactorySettings, LockedPackage
    from swerve.types import Task

FAMILIES = ("functions", "mini")
_SIZES = (("train", 700), ("validation", 251))
_SETTINGS = ("per_package", "per_function", "max_candidates", "max_failing", "seed")


def add_mint_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares what to make tasks of, and how many."""
    what = parser.add_argument_group("repository-level tasks, from source distributions that ship their tests")
    what.add_argument("packages", nargs="*", metavar="PACKAGE[==VERSION]", help="distributions to make tasks of")
    what.add_argument("--recipe", type=Path, metavar="FILE", help="TOML file that names packages and settings")
    what.add_argument(
        "--lock", type=Path, metavar="FILE", help="lock of an earlier minting: makes the same bytes again"
    )
    what.add_argument("--kind", choices=("mutation", "release"), help="only one kind of broken state (both)")
    for name in _SETTINGS:
        what.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="INT", help=f"see `{name}` in docs/tasks.md")
    what.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="INT", help="tried at once (%(default)s)"
    )
    family = parser.add_argument_group("the shipped task files, made anew")
    family.add_argument("--family", choices=FAMILIES, help="the family whose training and held-out files to make")
    family.add_argument("--package", action="append", default=[], metavar="NAME", help="functions: only this package")
    for name, default in _SIZES:
        family.add_argument(f"--num-{name}", type=int, metavar="INT", help=f"tasks ({default})")
    parser.add_argument(
        "--out", type=Path, metavar="PATH", help="task file (tasks.jsonl); of a family, a directory (.)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_mint(arguments: argparse.Namespace) -> int:
    """Makes them."""
    if arguments.family:
        return _mint_family(arguments)
    _refuse(arguments, "package num_train num_validation", "belongs to --family: name packages alone")
    if sum(map(bool, (arguments.packages, arguments.recipe, arguments.lock))) != 1:
        raise SwerveError("tasks mint: name packages, or one of --recipe, --lock, --family")
    if arguments.jobs < 1:
        raise SwerveError(f"--jobs {arguments.jobs}: must be at least 1")
    return _mint_repositories(arguments)


def _refuse(arguments: argparse.Namespace, names: str, why: str) -> None:
    for name in names.split():
        if getattr(arguments, name) not in (None, []):
            raise SwerveError(f"--{name.replace('_', '-')} {why}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _mint_repositories(arguments: argparse.Namespace) -> int:
    from swerve.environments import save_tasks
    from swerve.environments.repository.journal import Journal
    from swerve.environments.repository.mint import mint, summary
    from swerve.environments.repository.recipe import write_lock

    out = arguments.out or Path("tasks.jsonl")
    stem = out.name.removesuffix(".xz").removesuffix(".jsonl")
    settings, packages = _packages(arguments)
    with machine_faults(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    write_lock(out.with_name(f"{stem}.lock.toml"), settings, packages)
    with Journal(out.with_name(f"{stem}.journal.jsonl")) as journal:
        tasks, reports = mint(packages, settings, journal, jobs=arguments.jobs, progress=_say)
        told = summary(reports)
        save_tasks(out, tasks)
        journal.remove()
    if arguments.json:
        print(json.dumps({"file": str(out), **told}, indent=2))
    else:
        _print_reports(reports)
        print(f"{out}: {len(tasks)} tasks of {told['packages']} packages, from {told['tried']} candidates")
    return 0


def _packages(arguments: argparse.Namespace) -> tuple[FactorySettings, list[LockedPackage]]:
    """What to make tasks of, down to digests."""
    from swerve.environments.repository.recipe import (
        FactorySettings,
        check_settings,
        lock_package,
        parse_wanted,
        read_lock,
        read_recipe,
    )

    given = {name: value for name in _SETTINGS if (value := getattr(arguments, name)) is not None}
    if arguments.kind:
        given["kinds"] = (arguments.kind,)
    if arguments.lock:
        if given:
            name = "kind" if "kinds" in given else next(iter(given))
            raise SwerveError(f"--{name.replace('_', '-')}: a lock has settings of its own: leave it out")
        return read_lock(arguments.lock)
    settings, wanted = FactorySettings(), [parse_wanted(text) for text in arguments.packages]
    if arguments.recipe:
        settings, wanted = read_recipe(arguments.recipe)
    settings = dataclasses.replace(settings, **given)
    check_settings(settings, "tasks mint")
    names = [one.name for one in wanted]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise SwerveError(f"package {repeated[0]}: named twice; tasks of two releases of it go into two files")
    packages = []
    for one in wanted:
        packages.append(lock_package(one, settings))
        _say(f"{one.name} {packages[-1].version}: {packages[-1].sha256[:16]}")
    return settings, packages


def _print_reports(reports: Sequence[PackageReport]) -> None:
    print(f"{'package':<28}{'tests':>7}{'usable':>8}{'tried':>7}{'tasks':>7}  not taken")
    for one in reports:
        why = one.error or ", ".join(f"{reason} {number}" for reason, number in sorted(one.dropped.items()))
        name = f"{one.package} {one.version}"
        print(f"{name:<28}{one.num_tests:>7}{one.num_usable_tests:>8}{one.num_tried:>7}{one.num_tasks:>7}  {why}")


def _mint_family(arguments: argparse.Namespace) -> int:
    _refuse(arguments, f"packages recipe lock kind {' '.join(_SETTINGS)}", "has no effect with --family: leave it out")
    sizes = {}
    for split, default in _SIZES:
        number = getattr(arguments, f"num_{split}")
        sizes[split] = default if number is None else number
        if sizes[split] < 1:
            raise SwerveError(f"--num-{split} {number}: must be at least 1: a task file without tasks is none")
    out = arguments.out or Path()
    with machine_faults(out):
        out.mkdir(parents=True, exist_ok=True)
    made = _family_tasks(arguments, sizes)
    save_files({out / f"{arguments.family}_{split}.jsonl.xz": tasks for split, tasks in made.items()}, arguments.json)
    return 0


def save_files(files: Mapping[Path, Sequence[Task]], as_json: bool) -> None:
    """Writes task files, and prints how many tasks each holds."""
    from swerve.environments import save_tasks

    for path, tasks in files.items():
        save_tasks(path, tasks)
    numbers = {str(path): len(tasks) for path, tasks in files.items()}
    if as_json:
        print(json.dumps(numbers, indent=2))
    else:
        print("\n".join(f"{path}: {number} tasks" for path, number in numbers.items()))


def _family_tasks(arguments: argparse.Namespace, sizes: dict[str, int]) -> dict[str, Sequence[Task]]:
    if arguments.family == "functions":
        from swerve.environments.functions.mint import mint
        from swerve.environments.functions.recipe import MintRecipe

        recipe = MintRecipe(
            packages=tuple(arguments.package), num_train=sizes["train"], num_validation=sizes["validation"]
        )
        made = mint(recipe, _say)
        return {"train": made.train, "validation": made.validation}
    if arguments.package:
        raise SwerveError("--package: the mini family is generated; it has no packages")
    from swerve.environments.mini import mint_mini

    train, validation = mint_mini(num_train=sizes["train"], num_validation=sizes["validation"])
    return {"train": train, "validation": validation}
