"""The task factory: breaks short functions of real packages in one place and keeps what their tests notice.

    package --> survey: which test enters which function --> functions with at least two repeatable tests
            --> mutants, each run twice                  --> those that the tests kill, the same way both times
            --> confirmed in real sandboxes: the broken text fails as promised, the right one passes, hidden tests and
                canary included
    all     --> held out by file, no function text in both splits; balanced over packages and kinds of mutation

The result is a function of the recipe and of the vendored archives: no measured time decides, sandboxes have a fixed
hash seed, and tests that read the clock, sleep, fork or draw random numbers are left out.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from swerve.environments.functions.drafts import confirmed, draft_task, few_per_function, structure
from swerve.environments.functions.environment import image_name, package_image
from swerve.environments.functions.mutations import Edit, apply, candidates, sites
from swerve.environments.functions.packages import Package, SourceFunction, functions, packages, source_tree
from swerve.environments.functions.recipe import MintRecipe, rank
from swerve.environments.functions.selection import split
from swerve.sandboxes import Sandbox, SandboxLimits, SandboxPool
from swerve.types import SwerveError, Task

_CALL_TIMEOUT_S = 1800.0
_BATCH = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class PackageReport:
    """What minting one package met, in numbers.

    Attributes:
        package: Its name.
        num_tests: Tests collected.
        num_repeatable_tests: Of these, tests that pass and may be used.
        num_functions: Functions short enough.
        num_covered: Of these, functions with at least two usable tests.
        num_mutants: Mutants run.
        num_killed: Of these, mutants that some test noticed the same way twice.
        num_drafts: Tasks confirmed in sandboxes.
    """

    package: str
    num_tests: int = 0
    num_repeatable_tests: int = 0
    num_functions: int = 0
    num_covered: int = 0
    num_mutants: int = 0
    num_killed: int = 0
    num_drafts: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MintResult:
    """Minted tasks.

    Attributes:
        train: Training tasks, in their order of use.
        validation: Held-out tasks.
        reports: Numbers per package.
    """

    train: tuple[Task, ...]
    validation: tuple[Task, ...]
    reports: tuple[PackageReport, ...] = field(default=())


Progress = Callable[[str], None]


def mint(recipe: MintRecipe, progress: Progress | None = None) -> MintResult:
    """Mint tasks; the same recipe gives the same tasks.

    Args:
        recipe: What to mint.
        progress: Told one line per package.

    Returns:
        Exactly as many tasks as asked for.

    Raises:
        SwerveError: A package is unknown, or the packages do not yield enough.
        MachineError: Sandboxes cannot be started here.
    """
    return asyncio.run(_mint(recipe, progress or (lambda line: None)))


async def _mint(recipe: MintRecipe, progress: Progress) -> MintResult:
    known = packages()
    for name in recipe.packages:
        if name not in known:
            raise SwerveError(f"packages: '{name}' is unknown; known are {', '.join(sorted(known))}")
    chosen = [known[name] for name in sorted(recipe.packages or known)]
    unique = _unique_functions(chosen, recipe)
    drafts: list[Task] = []
    reports: list[PackageReport] = []
    gate = asyncio.Semaphore(2)

    async def one(package: Package) -> tuple[list[Task], PackageReport]:
        async with gate:
            found, report = await _mint_package(package, unique[package.name], recipe)
            progress(
                f"{package.name}: {report.num_covered} functions, {report.num_mutants} mutants, "
                f"{report.num_killed} killed, {report.num_drafts} tasks"
            )
            return found, report

    for found, report in await asyncio.gather(*map(one, chosen)):
        drafts += found
        reports.append(report)
    train, validation = split(drafts, recipe)
    return MintResult(train=tuple(train), validation=tuple(validation), reports=tuple(reports))


# ---------------------------------------------------------------------------------------------------- functions


def _unique_functions(chosen: Sequence[Package], recipe: MintRecipe) -> dict[str, list[SourceFunction]]:
    """Functions of the right size per package; of copies, by text or by structure, only the first counts."""
    seen: set[str] = set()
    result: dict[str, list[SourceFunction]] = {}
    for package in chosen:
        result[package.name] = []
        for function in functions(package, source_tree(package)):
            keys = {"".join(function.source.split()), structure(function.source)}
            fresh = not keys & seen
            seen |= keys
            num_lines = function.source.count("\n")
            fits = recipe.min_lines <= num_lines <= recipe.max_lines and len(function.source) <= recipe.max_characters
            if fresh and fits:
                result[package.name].append(function)
    return result


def _payload(function: SourceFunction) -> dict[str, Any]:
    return {
        "file": function.file,
        "line": function.line,
        "qualname": function.qualname,
        "source": function.source,
    }


# ----------------------------------------------------------------------------------------------------- packages


async def _mint_package(
    package: Package, found: list[SourceFunction], recipe: MintRecipe
) -> tuple[list[Task], PackageReport]:
    async with SandboxPool([package_image(package)], SandboxLimits()) as pool:
        sandbox = await pool.start(image_name(package.name))
        try:
            survey = await sandbox.call(
                "survey",
                {"functions": [_payload(function) for function in found], "max_calls": recipe.max_calls_per_test},
                _CALL_TIMEOUT_S,
            )
            tests = await _sound_tests(sandbox, found, _covering_tests(found, survey, recipe))
            mutants = [
                (index, edit)
                for index, names in sorted(tests.items())
                if len(names) >= 2
                for edit in _chosen_edits(found[index], recipe)
            ]
            killed = await _killed(sandbox, found, tests, mutants)
        finally:
            await sandbox.close()
    drafts = []
    for (index, edit), results in killed:
        draft = draft_task(package, found[index], edit, tests[index], results, recipe)
        if draft is not None:
            drafts.append(draft)
    sound = await confirmed(few_per_function(drafts, recipe))
    report = PackageReport(
        package=package.name,
        num_tests=len(survey),
        num_repeatable_tests=sum(row["status"] == "passed" for row in survey),
        num_functions=len(found),
        num_covered=sum(len(names) >= 2 for names in tests.values()),
        num_mutants=len(mutants),
        num_killed=len(killed),
        num_drafts=len(sound),
    )
    return sound, report


def _covering_tests(
    found: list[SourceFunction], survey: list[dict[str, Any]], recipe: MintRecipe
) -> dict[int, list[str]]:
    """Per function, tests that enter it, within the budgets.

    Those named after the function come first; of parametrised tests, one set of parameters each before the second
    of any; the cheapest before others.
    """
    covering: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in survey:
        if row["status"] == "passed":
            for index in row["functions"]:
                covering[index].append(row)
    result: dict[int, list[str]] = {}
    for index, rows in covering.items():
        name = found[index].qualname.rpartition(".")[2].strip("_").lower()
        turn: Counter[str] = Counter()
        keys: dict[str, tuple[Any, ...]] = {}
        for row in sorted(rows, key=lambda row: rank(recipe, row["id"])):
            test = row["id"].partition("[")[0]
            keys[row["id"]] = (name not in test.lower(), turn[test], row["calls"], row["id"])
            turn[test] += 1
        rows.sort(key=lambda row: keys[row["id"]])
        calls, chosen = 0, []
        for row in rows:
            if len(chosen) < recipe.max_tests and calls + row["calls"] <= recipe.max_calls:
                calls += row["calls"]
                chosen.append(row["id"])
        result[index] = chosen
    return result


async def _run(sandbox: Sandbox, cases: list[dict[str, Any]]) -> list[list[list[str]]]:
    results: list[list[list[str]]] = []
    for start in range(0, len(cases), _BATCH):
        payload = {"cases": cases[start : start + _BATCH]}
        results += await sandbox.call("verdicts", payload, _CALL_TIMEOUT_S)
    return results


def _case(function: SourceFunction, text: str, tests: list[str]) -> dict[str, Any]:
    return {"function": _payload(function), "text": text, "tests": tests, "stop_on_failure": False}


async def _sound_tests(
    sandbox: Sandbox, found: list[SourceFunction], tests: dict[int, list[str]]
) -> dict[int, list[str]]:
    """Keep tests that pass, twice, with the function's own text put in its place."""
    order = sorted(tests)
    cases = [_case(found[index], found[index].source, tests[index]) for index in order]
    first, second = await _run(sandbox, cases), await _run(sandbox, cases)
    result = {}
    for index, once, again in zip(order, first, second, strict=True):
        outcomes = zip(tests[index], once, again, strict=True)
        result[index] = [name for name, a, b in outcomes if a[0] == b[0] == "passed"]
    return result


def _chosen_edits(function: SourceFunction, recipe: MintRecipe) -> list[Edit]:
    """Mutations to try: in turn one of each kind."""
    by_kind: dict[str, list[Edit]] = defaultdict(list)
    for edit in sites(function.source):
        if len(candidates(apply(function.source, edit))) >= recipe.min_candidates:
            by_kind[edit.kind].append(edit)

    def order(edit: Edit) -> str:
        return rank(recipe, function.package, function.file, function.qualname, *edit)

    queues = [sorted(edits, key=order) for edits in by_kind.values()]
    queues.sort(key=lambda edits: order(edits[0]))
    chosen: list[Edit] = []
    depth = 0
    while len(chosen) < recipe.max_mutants_tried and any(depth < len(queue) for queue in queues):
        chosen += [queue[depth] for queue in queues if depth < len(queue)]
        depth += 1
    return chosen[: recipe.max_mutants_tried]


async def _killed(
    sandbox: Sandbox,
    found: list[SourceFunction],
    tests: dict[int, list[str]],
    mutants: list[tuple[int, Edit]],
) -> list[tuple[tuple[int, Edit], list[list[str]]]]:
    """Mutants that some test notices by failing, in the same way twice, while nothing crashes or hangs."""

    def case(mutant: tuple[int, Edit]) -> dict[str, Any]:
        index, edit = mutant
        return _case(found[index], apply(found[index].source, edit), tests[index])

    first = await _run(sandbox, [case(mutant) for mutant in mutants])
    noticed = [
        (mutant, results)
        for mutant, results in zip(mutants, first, strict=True)
        if {"failed"} <= {status for status, _ in results} <= {"failed", "passed"}
    ]
    second = await _run(sandbox, [case(mutant) for mutant, _ in noticed])
    return [pair for pair, again in zip(noticed, second, strict=True) if pair[1] == again]
