"""Tasks in the making: a killed mutant written down as a task, and the proof in sandboxes that it is one."""

from __future__ import annotations

import ast
import asyncio
import difflib
import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

from swerve.environments.functions.environment import FAMILY, FunctionsEnvironment, image_name
from swerve.environments.functions.mutations import Edit, apply, line_of, parse
from swerve.environments.functions.packages import Package, SourceFunction, source_tree, test_source
from swerve.environments.functions.recipe import MintRecipe, rank
from swerve.environments.grading import Grader
from swerve.environments.guest.pytest_runner import display_name
from swerve.environments.tasks import REPAIR_FILE, gold_text
from swerve.sandboxes import SandboxLimits, SandboxPool
from swerve.types import Limits, Mutation, Provenance, Task

VISIBLE_FILE = "test_visible.py"
_NUM_CONCURRENT = 2


def structure(source: str) -> str:
    """What a function does irrespective of its name and its formatting: equal for vendored and renamed copies."""
    node = parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    return ast.dump(node.args) + "".join(ast.dump(statement) for statement in node.body)


def draft_task(
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


def few_per_function(drafts: list[Task], recipe: MintRecipe) -> list[Task]:
    """Keep few tasks of one function: of different kinds, and preferably with failing tests among the hidden."""
    by_function: dict[tuple[str, int], list[Task]] = defaultdict(list)
    for draft in drafts:
        assert draft.provenance is not None
        by_function[draft.provenance.file, draft.provenance.line].append(draft)
    kept: list[Task] = []
    for group in by_function.values():
        kinds: Counter[str] = Counter()
        for _ in range(min(len(group), recipe.max_mutants_kept)):
            best = min(group, key=lambda task: (kinds[kind_of(task)], _hides_nothing(task), rank(recipe, task.id)))
            group.remove(best)
            kinds[kind_of(best)] += 1
            kept.append(best)
    return kept


def kind_of(task: Task) -> str:
    """Operator family of a task's mutation."""
    assert task.provenance is not None and task.provenance.mutation is not None
    return task.provenance.mutation.kind


def _hides_nothing(task: Task) -> bool:
    """Whether all failing tests are visible."""
    return set(task.fail_to_pass) <= set(task.visible_tests)


async def confirmed(drafts: Sequence[Task]) -> list[Task]:
    """Keep drafts that behave as promised in sandboxes set up as for episodes."""
    wrong = await _verify(drafts, lambda number: None) if drafts else {}
    return [draft for draft in drafts if draft.id not in wrong]


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


def verify(tasks: Sequence[Task], progress: Callable[[int], None] | None = None) -> dict[str, str]:
    """Check tasks in real sandboxes, as the factory did.

    Args:
        tasks: What to check.
        progress: Told how many are done.

    Returns:
        What is wrong, by task id; empty where all is well.
    """
    return asyncio.run(_verify(tasks, progress or (lambda number: None)))


async def _verify(tasks: Sequence[Task], progress: Callable[[int], None]) -> dict[str, str]:
    environment = FunctionsEnvironment(tasks)
    num_done = 0
    async with SandboxPool(environment.images(), SandboxLimits()) as pool:
        gate = asyncio.Semaphore(_NUM_CONCURRENT)

        async def one(task: Task) -> str:
            nonlocal num_done
            async with gate:
                problem = await confirm(task, pool, environment)
            num_done += 1
            progress(num_done)
            return problem

        problems = await asyncio.gather(*map(one, tasks))
    return {task.id: problem for task, problem in zip(tasks, problems, strict=True) if problem}
