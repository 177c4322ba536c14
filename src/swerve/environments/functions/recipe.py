"""What the task factory is asked for, and the repeatable chance by which it chooses."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Protocol


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
        preferred_candidates: Functions that offer fewer are taken only where there are not enough others.
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
    max_mutants_tried: int = 6
    max_mutants_kept: int = 3
    min_candidates: int = 6
    preferred_candidates: int = 8
    max_package_share: float = 0.25
    max_visible_characters: int = 1500


class Seeded(Protocol):
    """What has a seed."""

    @property
    def seed(self) -> int:
        """Decides what is taken."""
        ...


def rank(recipe: Seeded, *parts: object) -> str:
    """A repeatable random order: sorts equally everywhere."""
    return hashlib.sha256(json.dumps([recipe.seed, *map(str, parts)]).encode()).hexdigest()
