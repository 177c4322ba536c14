"""Minting of `mini` tasks: generated functions with one bug, and tests that are plain calls.

A test is one line, `NAME: CALL == VALUE`; its name is what `./run_tests` prints, and the value of a hidden test is a
digest. Everything follows from the seed.
"""

from __future__ import annotations

import difflib
import hashlib
import random
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple

from swerve.environments.functions.mutations import Edit, apply, line_of
from swerve.environments.mini.bugs import breaks
from swerve.environments.mini.harness import digest
from swerve.environments.mini.templates import (
    ARGUMENT_NAMES,
    CONSTANT_WORDS,
    LOCAL_NAMES,
    TEMPLATES,
    FunctionTemplate,
)
from swerve.environments.tasks import REPAIR_FILE
from swerve.types import Limits, Mutation, Provenance, Task

FAMILY = "mini"
IMAGE = "mini"
VISIBLE_FILE = "test_visible.py"
NUM_VISIBLE, NUM_HIDDEN = 3, 5
MAX_LINES_RUN = 4000
_WORDS = (
    *("apple", "pear", "fig", "plum", "kiwi", "lime", "mango", "olive", "peach", "date"),
    *("level", "noon", "radar", "stats", "Anna", "Bob", "sky", "grape"),
)


class OutOfLinesError(Exception):
    """A function ran for too many lines."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MiniFunction:
    """A generated function and its bug.

    Attributes:
        name: Its name.
        arguments: Kinds of its arguments.
        right: Text, without a trailing newline.
        family: Family of the bug.
        edit: What breaks it.
    """

    name: str
    arguments: tuple[str, ...]
    right: str
    family: str
    edit: Edit

    @property
    def broken(self) -> str:
        """Text with the bug."""
        return apply(self.right, self.edit)

    @property
    def fix(self) -> Edit:
        """What mends it."""
        start = self.edit.start
        return Edit(self.edit.kind, start, start + len(self.edit.text), self.right[start : self.edit.end])


def generate(rng: random.Random) -> MiniFunction:
    """Make a function and break it; all families that apply are equally likely."""
    while True:
        template = rng.choice(TEMPLATES)
        name, right = fill(rng, template)
        options = breaks(right)
        if options:
            family = rng.choice(sorted({family for family, _ in options}))
            edit = rng.choice([edit for other, edit in options if other == family])
            return MiniFunction(name=name, arguments=template.arguments, right=right, family=family, edit=edit)


def fill(rng: random.Random, template: FunctionTemplate) -> tuple[str, str]:
    """Draw names and constants; returns the function's name and text."""
    constant = rng.choice(sorted(CONSTANT_WORDS))
    slots: dict[str, str] = {"K": str(constant), "KW": CONSTANT_WORDS[constant]}
    taken: set[str] = set()
    for slot, kind in zip("abc", template.arguments, strict=False):
        slots[slot] = rng.choice([name for name in ARGUMENT_NAMES[kind] if name not in taken])
        taken.add(slots[slot])
    arguments = ", ".join(slots[slot] for slot in "abc"[: len(template.arguments)])
    for slot, names in LOCAL_NAMES.items():
        slots[slot] = rng.choice([name for name in names if name not in taken])
        taken.add(slots[slot])
    name = rng.choice(template.names.split()).format(**slots)
    return name, f"def {name}({arguments}):\n{template.body.format(**slots)}"


def mint_mini(num_train: int = 700, num_validation: int = 251, seed: int = 0) -> tuple[list[Task], list[Task]]:
    """Mint both splits; no two tasks, in one split or across, share the text of the right or of the broken function.

    Args:
        num_train: Training tasks.
        num_validation: Held-out tasks.
        seed: Decides everything.

    Returns:
        Training tasks and held-out tasks, in order.
    """
    rng = random.Random(f"mini/{seed}")
    texts: set[str] = set()
    tasks: list[Task] = []
    while len(tasks) < num_train + num_validation:
        function = generate(rng)
        if function.right in texts or function.broken in texts:
            continue
        split = "train" if len(tasks) < num_train else "validation"
        task = _task(rng, function, split, len(tasks))
        if task is not None:
            texts |= {function.right, function.broken}
            tasks.append(task)
    return tasks[:num_train], tasks[num_train:]


def texts_of(tasks: Iterable[Task]) -> set[str]:
    """Texts that must not be generated again: the broken functions of tasks, and the right ones."""
    texts = set()
    for task in tasks:
        broken = task.workspace[REPAIR_FILE].rstrip("\n")
        texts.add(broken)
        assert task.provenance is not None
        mutation = task.provenance.mutation
        assert mutation is not None
        lines = broken.split("\n")
        lines[mutation.line - 1] = mutation.before
        texts.add("\n".join(lines))
    return texts


def _task(rng: random.Random, function: MiniFunction, split: str, number: int) -> Task | None:
    calls = _calls(rng, function)
    if calls is None:
        return None
    failing, passing = calls
    visible = [failing[0], *[*passing, *failing[1:]][: NUM_VISIBLE - 1]]
    shown_calls = {test.call for test in visible}
    hidden = [test for test in [*failing, *passing] if test.call not in shown_calls][:NUM_HIDDEN]
    if len(visible) < 2 or len(hidden) < 2:
        return None
    rng.shuffle(visible)
    texts = {test.call: f"test_{i}: {test.call} == {test.value!r}" for i, test in enumerate(visible, 1)}
    for i, test in enumerate(hidden, 1 + len(visible)):
        texts[test.call] = f"test_{i}: {test.call} == {digest(test.call, test.value)}"
    shown = next(test for test in visible if test.error)
    broken = function.broken + "\n"
    workspace = {
        REPAIR_FILE: broken,
        VISIBLE_FILE: _visible_source(function.name, [texts[test.call] for test in visible]),
    }
    line = line_of(function.right, function.edit)
    mutation = Mutation(
        kind=function.family,
        line=line,
        before=function.right.split("\n")[line - 1],
        after=function.broken.split("\n")[line - 1],
    )
    return Task(
        id=f"mini.{number:04d}.{function.name}",
        family=FAMILY,
        split=split,
        image=IMAGE,
        base_commit=hashlib.sha256(repr(sorted(workspace.items())).encode()).hexdigest(),
        problem_statement=f"Fix the function {function.name} in {REPAIR_FILE}. ./run_tests fails with {shown.error}.",
        workspace=workspace,
        visible_tests=tuple(texts[test.call] for test in visible),
        hidden_tests=tuple(texts[test.call] for test in hidden),
        fail_to_pass=tuple(texts[test.call] for test in [*visible, *hidden] if test.error),
        pass_to_pass=tuple(texts[test.call] for test in [*visible, *hidden] if not test.error),
        gold_patch=_diff(broken, function.right + "\n"),
        limits=Limits(max_turns=5, episode_timeout_s=60.0, command_timeout_s=10.0, test_timeout_s=10.0),
        provenance=Provenance(
            package="swerve",
            version="",
            archive_sha256="",
            license="Apache-2.0",
            file="",
            line=1,
            qualname=function.name,
            mutation=mutation,
        ),
    )


class _Test(NamedTuple):
    """A call, its right value, and the error the broken function fails with (empty where it passes)."""

    call: str
    value: Any
    error: str


def _calls(rng: random.Random, function: MiniFunction) -> tuple[list[_Test], list[_Test]] | None:
    """Draw calls until enough tell right from wrong; `None` if the bug hangs or is hardly ever seen."""
    right, broken = _load(function.right, function.name), _load(function.broken, function.name)
    tests: dict[str, _Test] = {}
    for _ in range(40):
        arguments = [_argument(rng, kind) for kind in function.arguments]
        call = f"{function.name}({', '.join(map(repr, arguments))})"
        value, error = _outcome(right, arguments)
        if error or call in tests:
            continue
        found, error = _outcome(broken, arguments)
        if error == OutOfLinesError.__name__:
            return None
        if not error and (found != value or type(found) is not type(value)):
            error = "AssertionError"
        tests[call] = _Test(call, value, error)
        failing = [test for test in tests.values() if test.error]
        if len(failing) >= 3 and len(tests) >= NUM_VISIBLE + NUM_HIDDEN:
            break
    failing = [test for test in tests.values() if test.error]
    return (failing, [test for test in tests.values() if not test.error]) if len(failing) >= 2 else None


def _load(source: str, name: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {}
    exec(compile(source, REPAIR_FILE, "exec"), namespace)
    return namespace[name]


def _outcome(function: Callable[..., Any], arguments: list[Any]) -> tuple[Any, str]:
    """Value, and the name of the exception if there was one, within a budget of lines."""
    left = MAX_LINES_RUN

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise OutOfLinesError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return function(*[list(a) if isinstance(a, list) else a for a in arguments]), ""
    except Exception as error:
        return None, type(error).__name__
    finally:
        sys.settrace(before)


def _argument(rng: random.Random, kind: str) -> Any:
    match kind:
        case "int":
            return rng.randint(-9, 20)
        case "nat":
            return rng.randint(0, 30)
        case "pos":
            return rng.randint(1, 24)
        case "digit":
            return rng.randint(0, 6)
        case "year":
            return rng.choice((1900, 1999, 2000, 2004, 2023, 2024, 2100, 2400))
        case "ints":
            return [rng.randint(-6, 9) for _ in range(rng.randint(0, 6))]
        case "nums2":
            return [rng.randint(-6, 9) for _ in range(rng.randint(2, 6))]
        case "word":
            return rng.choice(_WORDS)
        case "char":
            return rng.choice("aeiloprst")
        case "text":
            return " ".join(rng.sample(_WORDS, rng.randint(1, 4)))
        case "words":
            return [rng.choice(_WORDS) for _ in range(rng.randint(0, 4))]
        case "flag":
            return rng.random() < 0.5
    raise ValueError(f"no argument kind {kind}")


def _visible_source(name: str, tests: list[str]) -> str:
    lines = [f"from repair import {name}", ""]
    for test in tests:
        label, _, claim = test.partition(": ")
        lines += ["", f"def {label}():", f"    assert {claim}", ""]
    return "\n".join(lines)


def _diff(broken: str, right: str) -> str:
    lines = difflib.unified_diff(
        broken.splitlines(keepends=True), right.splitlines(keepends=True), f"a/{REPAIR_FILE}", f"b/{REPAIR_FILE}"
    )
    return "".join(lines)
