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

import ast
import asyncio
import difflib
import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from swerve.environments.functions.environment import (
    FAMILY,
    REPAIR_FILE,
    FunctionsEnvironment,
    function_payload,
    image_name,
    package_image,
)
from swerve.environments.functions.harness import display_name
from swerve.environments.functions.mutations import Edit, apply, candidates, line_of, sites
from swerve.environments.functions.packages import (
    Package,
    SourceFunction,
    functions,
    packages,
    source_tree,
    test_source,
)
from swerve.environments.grading import Grader
from swerve.sandboxes import Sandbox, SandboxLimits, SandboxPool
from swerve.types import Limits, Mutation, Provenance, SwerveError, Task

VISIBLE_FILE = "test_visible.py"
_CALL_TIMEOUT_S = 1800.0
_BATCH = 32


@dataclass(frozen=True, kw_only=True, slots=True)
class MintRecipe:
    """What to mint.

    Attributes:
        packages: Names of packages; empty for all of the lock file.
        num_train: Training tasks.
        num_validation: Held-out tasks.
        seed: Decides which mutants and files are taken.
        min_lines: Lines of a function at least, its `def` included.
        max_lines: Lines of a function at most.
        max_characters: Characters of a function at most.
        max_calls_per_test: Function calls one test may make; a repeatable measure of its time.
        max_calls: Function calls all tests of one task may make together.
        max_tests: Tests of one task at most.
        max_mutants_tried: Mutants of one function that are run.
        max_mutants_kept: Mutants of one function that become tasks.
        min_candidates: Plausible repairs a broken function must offer to a blind search.
        max_package_share: Largest share of a split that one package may have.
        max_visible_characters: Size of the visible tests' source.
    """

    packages: tuple[str, ...] = ()
    num_train: int = 700
    num_validation: int = 251
    seed: int = 1
    min_lines: int = 3
    max_lines: int = 20
    max_characters: int = 420
    max_calls_per_test: int = 20_000
    max_calls: int = 60_000
    max_tests: int = 10
    max_mutants_tried: int = 8
    max_mutants_kept: int = 3
    min_candidates: int = 8
    max_package_share: float = 0.25
    max_visible_characters: int = 1500


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


def _rank(recipe: MintRecipe, *parts: object) -> str:
    """A repeatable random order: sorts equally everywhere."""
    return hashlib.sha256(json.dumps([recipe.seed, *map(str, parts)]).encode()).hexdigest()


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


def structure(source: str) -> str:
    """What a function does irrespective of its name and its formatting: equal for vendored and renamed copies."""
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    return ast.dump(node.args) + "".join(ast.dump(statement) for statement in node.body)


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
        draft = _draft(package, found[index], edit, tests[index], results, recipe)
        if draft is not None:
            drafts.append(draft)
    confirmed = await _confirmed(_capped(drafts, recipe))
    report = PackageReport(
        package=package.name,
        num_tests=len(survey),
        num_repeatable_tests=sum(row["status"] == "passed" for row in survey),
        num_functions=len(found),
        num_covered=sum(len(names) >= 2 for names in tests.values()),
        num_mutants=len(mutants),
        num_killed=len(killed),
        num_drafts=len(confirmed),
    )
    return confirmed, report


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
        for row in sorted(rows, key=lambda row: _rank(recipe, row["id"])):
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

    def rank(edit: Edit) -> str:
        return _rank(recipe, function.package, function.file, function.qualname, *edit)

    queues = [sorted(edits, key=rank) for edits in by_kind.values()]
    queues.sort(key=lambda edits: rank(edits[0]))
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


# ------------------------------------------------------------------------------------------------------- drafts


def _draft(
    package: Package,
    function: SourceFunction,
    edit: Edit,
    tests: list[str],
    results: list[list[str]],
    recipe: MintRecipe,
) -> Task | None:
    """The task a killed mutant makes, in no split yet; `None` if its tests cannot be shown."""
    failing = [name for name, (status, _) in zip(tests, results, strict=True) if status == "failed"]
    passing = [name for name, (status, _) in zip(tests, results, strict=True) if status == "passed"]
    errors = dict(zip(tests, (error for _, error in results), strict=True))
    visible, text = _visible(package, failing, passing, recipe)
    hidden = [name for name in tests if name not in visible]
    shown = [name for name in visible if name in failing]
    if not shown or not hidden:
        return None
    broken = apply(function.source, edit)
    workspace = {REPAIR_FILE: broken, VISIBLE_FILE: text}
    name = function.qualname.rpartition(".")[2]
    identity = json.dumps([package.sha256, function.file, function.line, list(edit)])
    return Task(
        id=f"{package.name}.{function.qualname}.{hashlib.sha256(identity.encode()).hexdigest()[:6]}",
        family=FAMILY,
        split="train",
        image=image_name(package.name),
        base_commit=hashlib.sha256(json.dumps(workspace, sort_keys=True).encode()).hexdigest(),
        problem_statement=f"Fix the function {name} in {REPAIR_FILE}. ./run_tests fails with {errors[shown[0]]}.",
        workspace=workspace,
        visible_tests=tuple(visible),
        hidden_tests=tuple(hidden),
        fail_to_pass=tuple(failing),
        pass_to_pass=tuple(passing),
        gold_patch=_diff(broken, function.source),
        limits=Limits(max_turns=5, episode_timeout_s=120.0, command_timeout_s=20.0, test_timeout_s=20.0),
        provenance=Provenance(
            package=package.name,
            version=package.version,
            archive_sha256=package.sha256,
            license=package.license,
            file=function.file,
            line=function.line,
            qualname=function.qualname,
            mutation=Mutation(
                kind=edit.kind,
                line=line_of(function.source, edit),
                before=function.source[edit.start : edit.end],
                after=edit.text,
            ),
        ),
    )


def _visible(package: Package, failing: list[str], passing: list[str], recipe: MintRecipe) -> tuple[list[str], str]:
    """Choose one to three tests to show: one that fails, then, while enough stay hidden, others of both sorts."""
    num_tests = len(failing) + len(passing)
    wanted = 1 if num_tests < 4 else 2 if num_tests < 8 else 3
    order = [failing[:1], passing[:1], failing[2:3], passing[1:2], failing[3:4]]
    tree = source_tree(package)
    chosen: list[str] = []
    names: set[str] = set()
    text = ""
    for identifier in [name for part in order for name in part]:
        source = test_source(tree, identifier)
        parameters = identifier.partition("[")[2]
        shown = (f"# [{parameters}\n" if parameters else "") + source
        fits = bool(source) and shown.isascii() and len(text) + len(shown) <= recipe.max_visible_characters
        if len(chosen) < wanted and fits and display_name(identifier) not in names:
            chosen.append(identifier)
            names.add(display_name(identifier))
            text += ("\n\n" if text else "") + shown
    return chosen, text


def _diff(before: str, after: str) -> str:
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{REPAIR_FILE}", f"b/{REPAIR_FILE}"
    )
    return "".join(lines)


def gold_text(task: Task) -> str:
    """The right text of a task's function: its workspace with the gold patch applied."""
    patched = [line[1:] for line in task.gold_patch.splitlines(keepends=True)[2:] if line[0] in " +"]
    broken = task.workspace[REPAIR_FILE].splitlines(keepends=True)
    header = next(line for line in task.gold_patch.splitlines() if line.startswith("@@"))
    first, _, count = header.split()[1][1:].partition(",")
    start = int(first) - 1
    return "".join([*broken[:start], *patched, *broken[start + int(count or 1) :]])


def _capped(drafts: list[Task], recipe: MintRecipe) -> list[Task]:
    """Keep few tasks of one function: of different kinds, and preferably with failing tests among the hidden."""
    by_function: dict[tuple[str, int], list[Task]] = defaultdict(list)
    for draft in drafts:
        assert draft.provenance is not None
        by_function[draft.provenance.file, draft.provenance.line].append(draft)
    kept: list[Task] = []
    for group in by_function.values():
        kinds: Counter[str] = Counter()
        for _ in range(min(len(group), recipe.max_mutants_kept)):
            best = min(group, key=lambda task: (kinds[_kind(task)], _hides_nothing(task), _rank(recipe, task.id)))
            group.remove(best)
            kinds[_kind(best)] += 1
            kept.append(best)
    return kept


def _kind(task: Task) -> str:
    assert task.provenance is not None
    return task.provenance.mutation.kind


def _hides_nothing(task: Task) -> bool:
    """Whether all failing tests are visible."""
    return set(task.fail_to_pass) <= set(task.visible_tests)


# ------------------------------------------------------------------------------------------------- confirmation


async def _confirmed(drafts: list[Task]) -> list[Task]:
    """Keep drafts that behave as promised in sandboxes set up as for episodes."""
    if not drafts:
        return []
    environment = FunctionsEnvironment(drafts)
    async with SandboxPool(environment.images(), SandboxLimits()) as pool:
        gate = asyncio.Semaphore(2)

        async def one(draft: Task) -> bool:
            async with gate:
                return await confirm(draft, pool, environment) == ""

        verdicts = await asyncio.gather(*map(one, drafts))
    return [draft for draft, good in zip(drafts, verdicts, strict=True) if good]


async def confirm(task: Task, pool: SandboxPool, environment: FunctionsEnvironment) -> str:
    """Check a task in real sandboxes.

    Returns:
        Empty if the broken text fails the visible tests as the problem statement says and earns 0, and the gold text
        passes them and earns 1; else what is wrong.
    """
    grader = Grader(pool, environment)
    gold = gold_text(task)
    sandbox = await pool.start(environment.image_for(task), environment.prepare_payload(task))
    try:
        before = await sandbox.exec("./run_tests", task.limits.command_timeout_s)
        await sandbox.write_file(REPAIR_FILE, gold)
        after = await sandbox.exec("./run_tests", task.limits.command_timeout_s)
    finally:
        await sandbox.close()
    error = task.problem_statement.rpartition(" ")[2].rstrip(".")
    if f" FAILED {error}\n" not in before.output:
        return f"the visible tests of the broken text print {before.output!r}"
    if not after.output.endswith("all passed\n"):
        return f"the visible tests of the gold text print {after.output!r}"
    for text, reward in ((task.workspace[REPAIR_FILE], 0.0), (gold, 1.0)):
        result = await grader.grade(task, {REPAIR_FILE: text})
        if result.reward != reward:
            statuses = dict(result.test_statuses)
            return f"reward is {result.reward}, expected {reward}: {result.error or statuses}"
    return ""


# -------------------------------------------------------------------------------------------------------- split


def split(drafts: Iterable[Task], recipe: MintRecipe) -> tuple[list[Task], list[Task]]:
    """Hold out whole files, then take as many tasks as wanted, evenly over packages and kinds.

    Raises:
        SwerveError: There are too few.
    """
    by_file: dict[tuple[str, str], list[Task]] = defaultdict(list)
    for draft in drafts:
        assert draft.provenance is not None
        by_file[draft.provenance.package, draft.provenance.file].append(draft)
    total = sum(map(len, by_file.values()))
    share = recipe.num_validation / max(1, recipe.num_train + recipe.num_validation)
    wanted = {"train": recipe.num_train, "validation": recipe.num_validation}
    largest_share = max(recipe.max_package_share, 1 / max(1, len({package for package, _ in by_file})))
    package_cap = {name: math.ceil(number * largest_share) for name, number in wanted.items()}
    pools: dict[str, list[Task]] = {"train": [], "validation": []}
    usable: Counter[str] = Counter()
    for file in sorted(by_file, key=lambda file: _rank(recipe, *file)):
        group = by_file[file]
        room = package_cap["validation"] - usable[file[0]]
        gain = min(len(group), room)
        held_out = sum(usable.values()) < recipe.num_validation and len(group) <= 2 * gain
        held_out = held_out and len(pools["validation"]) + len(group) <= 1.5 * share * total
        if held_out:
            usable[file[0]] += gain
        pools["validation" if held_out else "train"] += group
    result = {}
    for name, pool in pools.items():
        chosen = _evenly(pool, wanted[name], package_cap[name], recipe)
        if len(chosen) < wanted[name]:
            raise SwerveError(
                f"only {len(chosen)} of {wanted[name]} {name} tasks could be minted ({total} confirmed in all); "
                "ask for fewer, or add packages"
            )
        result[name] = [replace(task, split=name) for task in chosen]
    return result["train"], result["validation"]


def _evenly(pool: list[Task], wanted: int, cap: int, recipe: MintRecipe) -> list[Task]:
    """Take tasks package by package, in each the one whose function and kind are rarest so far; then mix them."""
    queues: dict[str, list[Task]] = defaultdict(list)
    for task in pool:
        assert task.provenance is not None
        queues[task.provenance.package].append(task)
    taken: Counter[str] = Counter()
    functions_taken: Counter[tuple[str, int]] = Counter()
    kinds: Counter[str] = Counter()
    chosen: list[Task] = []
    while len(chosen) < wanted:
        open_packages = [name for name, queue in sorted(queues.items()) if queue and taken[name] < cap]
        if not open_packages:
            break
        for name in open_packages[: wanted - len(chosen)]:
            best = min(
                queues[name],
                key=lambda task: (functions_taken[_place(task)], kinds[_kind(task)], _rank(recipe, task.id)),
            )
            queues[name].remove(best)
            chosen.append(best)
            taken[name] += 1
            functions_taken[_place(best)] += 1
            kinds[_kind(best)] += 1
    return sorted(chosen, key=lambda task: _rank(recipe, "order", task.id))


def _place(task: Task) -> tuple[str, int]:
    assert task.provenance is not None
    return f"{task.provenance.package}/{task.provenance.file}", task.provenance.line


__all__ = ["MintRecipe", "MintResult", "PackageReport", "confirm", "function_payload", "gold_text", "mint", "split"]
