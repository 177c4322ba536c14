"""Noisy demonstrations of repairing one broken function.

The demonstrator knows the fix and often tries something else first: a plausible repair that is wrong. It sees the
tests fail, takes the edit back and tries again, never twice the same, and now and then gives up too early. Both
habits are left in on purpose, at a lower weight: imitation of perfect work makes a policy too certain to explore,
and what is noise here is what reinforcement learning can remove later.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from swerve.agents.styles import CREATED, EDITED, NOTHING_TO_UNDO, UNDONE, ambiguous
from swerve.environments.demonstrations.spans import replacement
from swerve.environments.functions.mutations import Edit, apply, candidates
from swerve.rendering import DemonstrationTurn

FILE = "repair.py"
MAX_NAME_CHARACTERS = 32

Size = Literal["span", "line", "file"]
Call = tuple[str, dict[str, str]]

_ERRORS_OF_KIND: dict[str, tuple[str, ...]] = {
    "swap": ("TypeError", "AttributeError", "ValueError"),
    "call": ("TypeError", "AttributeError", "KeyError"),
    "return": ("TypeError", "AttributeError"),
    "constant": ("IndexError", "ValueError", "TypeError"),
    "compare": ("IndexError", "TypeError", "ValueError", "KeyError"),
    "not": ("TypeError", "AttributeError", "KeyError", "ValueError"),
    "arithmetic": ("TypeError", "IndexError", "ValueError"),
    "augmented": ("TypeError", "IndexError"),
    "boolean": ("TypeError", "AttributeError"),
    "jump": ("RuntimeError", "KeyError"),
    "negation": ("IndexError", "ValueError"),
}
_TEST_ENDINGS = (
    *("basic", "simple", "empty", "default", "defaults", "single", "many", "none", "zero", "negative", "errors"),
    *("invalid", "edge", "one", "two", "types", "strings", "list", "nested", "order", "unicode", "roundtrip"),
    *("1", "2", "3", "4", "5"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """How imperfect the demonstrations are, and how much imperfection weighs.

    Attributes:
        right_edit: Probability that an attempt is the fix.
        give_up: Probability of finishing after a failed attempt although attempts are left.
        invalid_edit: Probability that an episode begins with an edit the editor refuses; it has no weight.
        max_attempts: Edits of one episode at most.
        wrong_weight: Loss weight of a turn with a wrong edit, or of giving up.
        code_weight: Loss weight of the source as the editor shows it.
        wrong_by_kind: Draw half of the wrong edits so that each kind of edit is equally likely, as faults are drawn;
            otherwise every edit is.
    """

    right_edit: float = 0.55
    give_up: float = 0.12
    invalid_edit: float = 0.04
    max_attempts: int = 3
    wrong_weight: float = 0.35
    code_weight: float = 0.25
    wrong_by_kind: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """One conversation to imitate.

    Attributes:
        problem: Problem statement.
        turns: Calls and observations of each turn.
        weights: Loss weight of each turn's calls.
    """

    problem: str
    turns: tuple[DemonstrationTurn, ...]
    weights: tuple[float, ...]


def problem_statement(name: str, error: str) -> str:
    """What the agent is told of a broken function whose visible tests fail with `error`."""
    return f"Fix the function {name} in {FILE}. ./run_tests fails with {error}."


def function_name(source: str) -> str:
    """Name of the function that a source begins with."""
    return source[4 : source.index("(")].strip()


class ImaginedTests:
    """Tests of a function that has none: names, and outcomes that look like those of a real run.

    A run prints one line per test and then how many failed.
    """

    def __init__(self, rng: random.Random, name: str, kind: str, names: Sequence[str] = ()) -> None:
        """Draw names and the outcome before any edit.

        Args:
            rng: Source of randomness.
            name: The function's name.
            kind: Kind of the mutation, which decides the likely errors.
            names: Names of its visible tests; drawn if there are none.
        """
        self._names = list(names) or _imagine_names(rng, name)
        self._rng = rng
        others = _ERRORS_OF_KIND.get(kind, ("TypeError",))
        self.error = "AssertionError" if rng.random() < 0.62 else rng.choice(others)
        self._others = others
        num_failing = rng.randrange(1, len(self._names) + 1)
        self._failing = set(rng.sample(range(len(self._names)), num_failing))

    def passing(self) -> str:
        """Output of a run after the fix."""
        return "\n".join([*(f"{name} ok" for name in self._names), "all passed"])

    def failing(self) -> str:
        """Output of a run after something else."""
        failing, error = self._failing, self.error
        if self._rng.random() < 0.3:
            failing = failing | {self._rng.randrange(len(self._names))}
            error = self._rng.choice(("AssertionError", *self._others))
        lines = [f"{name} FAILED {error}" if i in failing else f"{name} ok" for i, name in enumerate(self._names)]
        return "\n".join([*lines, f"{len(failing)} failed"])


def _imagine_names(rng: random.Random, name: str) -> list[str]:
    stem = "test_" + name.strip("_")
    endings = rng.sample(_TEST_ENDINGS, rng.choice((1, 1, 2, 2, 3, 4)))
    names = [stem if i == 0 and rng.random() < 0.6 else f"{stem}_{ending}" for i, ending in enumerate(endings)]
    return [name[:MAX_NAME_CHARACTERS].rstrip("_") for name in names]


def demonstrate(
    rng: random.Random,
    broken: str,
    fix: Edit,
    noise: Noise,
    test_names: Sequence[str] = (),
    *,
    guesses: Sequence[Edit] = (),
    size: Size = "span",
) -> Demonstration | None:
    """Demonstrate the repair of a function.

    Args:
        rng: Source of randomness; equal states give equal demonstrations.
        broken: The broken function, without a trailing newline.
        fix: The edit that mends it.
        noise: How imperfect to be.
        test_names: Names of the visible tests; imagined if there are none.
        guesses: Edits that may be tried in vain beside the inverses of all mutations.
        size: What one edit rewrites: the smallest span, its line, or the file. The larger, the more is to be copied.

    Returns:
        The demonstration, or `None` where the fix cannot be written as one replacement.
    """
    if _rewrite(broken, fix, size) is None:
        return None
    right = apply(broken, fix)
    tests = ImaginedTests(rng, function_name(broken), fix.kind, test_names)
    turns: list[DemonstrationTurn] = [([_view()], [broken])]
    weights = [1.0]
    pool: list[Edit] | None = None
    solved, undoable, attempts = False, False, 0
    if rng.random() < noise.invalid_edit and (invalid := _invalid_edit(rng, broken)):
        turns.append(([invalid[0], _run_tests()], [invalid[1], tests.failing()]))
        weights.append(0.0)
        attempts = 1
    while not solved and attempts < noise.max_attempts:
        if attempts and rng.random() < noise.give_up:
            break
        attempts += 1
        solved = rng.random() < noise.right_edit
        written = None
        if not solved:
            if pool is None:
                outcomes = {apply(broken, edit): edit for edit in [*guesses, *candidates(broken)]}
                pool = [edit for outcome, edit in outcomes.items() if outcome != right]
                rng.shuffle(pool)
                if noise.wrong_by_kind:
                    pool = _by_kind(rng, pool)
            while pool and written is None:
                written = _rewrite(broken, pool.pop(), size)
        if written is None:
            solved, written = True, _rewrite(broken, fix, size)
        assert written is not None
        calls = [written, _run_tests()]
        observations = [CREATED if size == "file" else EDITED, tests.passing() if solved else tests.failing()]
        if len(turns) > 1:
            calls.insert(0, _undo())
            observations.insert(0, UNDONE if undoable else NOTHING_TO_UNDO)
        turns.append((calls, observations))
        weights.append(1.0 if solved else noise.wrong_weight)
        undoable = True
    turns.append(([("finish", {})], []))
    weights.append(1.0 if solved or attempts >= noise.max_attempts else noise.wrong_weight)
    return Demonstration(problem=problem_statement(function_name(broken), tests.error), turns=tuple(turns),
                         weights=tuple(weights))  # fmt: skip


def _by_kind(rng: random.Random, shuffled: Sequence[Edit]) -> list[Edit]:
    """The edits anew, to be taken from the end: half the time one of a random kind that is left, else any."""
    left, order = list(shuffled), list[Edit]()
    while left:
        taken = len(left) - 1
        if rng.random() < 0.5:
            kind = rng.choice(sorted({edit.kind for edit in left}))
            taken = max(i for i, edit in enumerate(left) if edit.kind == kind)
        order.append(left.pop(taken))
    return order[::-1]


def _view() -> Call:
    return "str_replace_editor", {"command": "view", "path": FILE}


def _rewrite(source: str, edit: Edit, size: Size) -> Call | None:
    """The call that carries out an edit, or `None` where it cannot be written."""
    if size == "file":
        return "str_replace_editor", {"command": "create", "path": FILE, "file_text": apply(source, edit)}
    written = replacement(source, edit, whole_line=size == "line")
    return None if written is None else _replace(*written)


def _replace(old: str, new: str) -> Call:
    return "str_replace_editor", {"command": "str_replace", "path": FILE, "old_str": old, "new_str": new}


def _undo() -> Call:
    return "str_replace_editor", {"command": "undo_edit", "path": FILE}


def _run_tests() -> Call:
    return "execute_bash", {"command": "./run_tests"}


def _invalid_edit(rng: random.Random, source: str) -> tuple[Call, str] | None:
    """A replacement that the editor refuses because its text is ambiguous, with what the editor says."""
    words: Sequence[str] = sorted({word for word in source.replace("(", " ").split() if source.count(word) > 1})
    if not words:
        return None
    word = rng.choice(words)
    return _replace(word, word + "_"), ambiguous(source.count(word))
