"""Blind enumeration: what a search that knows the operators, and nothing else, achieves. A policy must beat it.

The search writes down all plausible repairs of the broken text and tries some at random, none twice, stopping as soon
as the tests pass. Its success needs no simulation: among N candidates of which m are right, t tries find one with
probability 1 - C(N-m, t) / C(N, t).
"""

from __future__ import annotations

import asyncio
import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from swerve.environments.functions.environment import FunctionsEnvironment
from swerve.environments.functions.mutations import apply, candidates
from swerve.environments.grading import Grader
from swerve.environments.tasks import REPAIR_FILE, gold_text
from swerve.sandboxes import SandboxLimits, SandboxPool
from swerve.telemetry import write_atomic
from swerve.types import MachineError, Task

_NUM_CONCURRENT = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline:
    """How blind enumeration does.

    Attributes:
        num_tries: Edits tested per attempt.
        pass_at_1: Share of tasks that one attempt resolves, in expectation.
        pass_at_4: Share of tasks that the best of four independent attempts resolves, in expectation.
        num_tasks: Tasks counted.
        mean_candidates: Plausible repairs per task.
        median_candidates: Plausible repairs of the median task.
        gold_share: Share of tasks whose own repair is among the candidates.
    """

    num_tries: int
    pass_at_1: float
    pass_at_4: float
    num_tasks: int
    mean_candidates: float
    median_candidates: float
    gold_share: float


def repairs(task: Task) -> list[str]:
    """Texts that a blind search would try, in order of position."""
    broken = task.workspace[REPAIR_FILE]
    return [apply(broken, edit) for edit in candidates(broken)]


def baseline(tasks: Sequence[Task], num_tries: int, passing: Mapping[str, int] | None = None) -> Baseline:
    """Work out how blind enumeration does on tasks.

    Args:
        tasks: At least one.
        num_tries: Edits tested per attempt.
        passing: Per task id, how many candidates resolve it (see `count_passing`); by default the gold one alone.

    Returns:
        The expected scores.
    """
    pass_at_1, pass_at_4, numbers, with_gold = [], [], [], 0
    for task in tasks:
        texts = repairs(task)
        has_gold = gold_text(task) in texts
        num_right = passing[task.id] if passing is not None else int(has_gold)
        with_gold += has_gold
        tries = min(num_tries, len(texts))
        missed = math.comb(len(texts) - num_right, tries) / math.comb(len(texts), tries)
        pass_at_1.append(1 - missed)
        pass_at_4.append(1 - missed**4)
        numbers.append(len(texts))
    return Baseline(
        num_tries=num_tries,
        pass_at_1=statistics.fmean(pass_at_1),
        pass_at_4=statistics.fmean(pass_at_4),
        num_tasks=len(tasks),
        mean_candidates=statistics.fmean(numbers),
        median_candidates=statistics.median(numbers),
        gold_share=with_gold / len(tasks),
    )


def count_passing(tasks: Sequence[Task], cache_file: Path | None = None) -> dict[str, int]:
    """Grade every candidate of every task for real, as other edits than the gold one may resolve a task.

    Args:
        tasks: What to grade; some twenty gradings each.
        cache_file: JSON file that remembers counts by task id, read and extended.

    Returns:
        Per task id, how many candidates earn reward 1.

    Raises:
        MachineError: A candidate cannot be graded.
    """
    known: dict[str, int] = {}
    if cache_file is not None and cache_file.is_file():
        known = json.loads(cache_file.read_text("utf-8"))
    missing = [task for task in tasks if task.id not in known]
    if missing:
        known |= asyncio.run(_count_passing(missing))
        if cache_file is not None:
            write_atomic(cache_file, json.dumps(known, sort_keys=True, indent=0) + "\n")
    return {task.id: known[task.id] for task in tasks}


async def _count_passing(tasks: Sequence[Task]) -> dict[str, int]:
    environment = FunctionsEnvironment(tasks)
    async with SandboxPool(environment.images(), SandboxLimits()) as pool:
        grader = Grader(pool, environment)
        gate = asyncio.Semaphore(_NUM_CONCURRENT)

        async def one(task: Task) -> int:
            count = 0
            for text in repairs(task):
                async with gate:
                    result = await grader.grade(task, {REPAIR_FILE: text})
                if result.reward is None:
                    raise MachineError(result.error)
                count += result.reward > 0
            return count

        counts = await asyncio.gather(*map(one, tasks))
    return {task.id: count for task, count in zip(tasks, counts, strict=True)}


def by_package(tasks: Iterable[Task]) -> dict[str, int]:
    """Tasks per package, in order of name."""
    counts: dict[str, int] = {}
    for task in tasks:
        name = task.provenance.package if task.provenance is not None else ""
        counts[name] = counts.get(name, 0) + 1
    return dict(sorted(counts.items()))
