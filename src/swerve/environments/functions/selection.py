"""The two splits: whole files are held out, and tasks are taken evenly over packages and kinds of mutation."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

from swerve.environments.functions.drafts import kind_of
from swerve.environments.functions.environment import REPAIR_FILE
from swerve.environments.functions.mutations import candidates
from swerve.environments.functions.recipe import MintRecipe, rank
from swerve.types import SwerveError, Task


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
    num_packages = len({package for package, _ in by_file})
    largest_share = recipe.max_package_share if num_packages * recipe.max_package_share >= 1 else 1.0
    package_cap = {name: math.ceil(number * largest_share) for name, number in wanted.items()}
    pools: dict[str, list[Task]] = {"train": [], "validation": []}
    usable: Counter[str] = Counter()
    for file in sorted(by_file, key=lambda file: rank(recipe, *file)):
        group = by_file[file]
        room = package_cap["validation"] - usable[file[0]]
        gain = min(len(group), room)
        fits = not pools["validation"] or len(pools["validation"]) + len(group) <= 1.5 * share * total
        held_out = gain > 0 and fits and sum(usable.values()) < recipe.num_validation
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
    easy = {task.id: len(candidates(task.workspace[REPAIR_FILE])) < recipe.preferred_candidates for task in pool}
    chosen: list[Task] = []
    while len(chosen) < wanted:
        open_packages = [name for name, queue in sorted(queues.items()) if queue and taken[name] < cap]
        if not open_packages:
            break
        for name in open_packages[: wanted - len(chosen)]:
            best = min(
                queues[name],
                key=lambda task: (
                    easy[task.id],
                    functions_taken[_place(task)],
                    kinds[kind_of(task)],
                    rank(recipe, task.id),
                ),
            )
            queues[name].remove(best)
            chosen.append(best)
            taken[name] += 1
            functions_taken[_place(best)] += 1
            kinds[kind_of(best)] += 1
    return sorted(chosen, key=lambda task: rank(recipe, "order", task.id))


def _place(task: Task) -> tuple[str, int]:
    assert task.provenance is not None
    return f"{task.provenance.package}/{task.provenance.file}", task.provenance.line
