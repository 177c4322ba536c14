"""Generated functions: the bug is seen, the fix passes, and the harness says so."""

import ast
import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swerve.environments import REPAIR_FILE, Grader, load_split, mini
from swerve.environments.functions.mutations import apply
from swerve.environments.mini import FAMILIES, MiniEnvironment, generate, harness, mint_mini
from swerve.environments.mini.templates import TEMPLATES
from swerve.sandboxes import SandboxPool
from swerve.types import EpisodeStatus

DATA = Path(mini.__file__).parent.parent / "data"

# The harness forks; here it may share a process with libraries that have started threads.
pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning"),
]


def shipped():
    return load_split(DATA / "mini_train.jsonl.xz", DATA / "mini_validation.jsonl.xz")


def mended(task):
    broken = task.workspace[REPAIR_FILE]
    lines = broken.split("\n")
    mutation = task.provenance.mutation
    assert lines[mutation.line - 1] == mutation.after
    lines[mutation.line - 1] = mutation.before
    return "\n".join(lines)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9))
def test_a_generated_bug_differs_from_the_function_in_one_line_and_its_fix_restores_it(seed):
    function = generate(random.Random(seed))
    ast.parse(function.right)
    ast.parse(function.broken)
    assert function.family in FAMILIES
    right, broken = function.right.split("\n"), function.broken.split("\n")
    assert len(right) == len(broken)
    assert sum(a != b for a, b in zip(right, broken, strict=True)) == 1
    assert apply(function.broken, function.fix) == function.right


def test_the_shipped_splits_have_their_sizes_and_share_no_text():
    train, validation = shipped()
    assert (len(train), len(validation)) == (700, 251)
    texts = [
        {task.workspace[REPAIR_FILE] for task in split} | {mended(task) for task in split}
        for split in (train, validation)
    ]
    assert not texts[0] & texts[1]
    assert len({task.provenance.mutation.kind for task in train}) >= 8
    assert len(TEMPLATES) > 100


def test_minting_repeats_the_shipped_tasks():
    train, _ = mint_mini(12, 0)
    assert train == shipped()[0][:12]


def test_expectations_hold_for_the_broken_and_the_right_function():
    for task in shipped()[1][::20]:
        broken, right = task.workspace[REPAIR_FILE], mended(task)
        assert all(harness.outcomes(broken, list(task.fail_to_pass)))
        assert not any(harness.outcomes(broken, list(task.pass_to_pass)))
        assert not any(harness.outcomes(right, [*task.fail_to_pass, *task.pass_to_pass]))


def test_hidden_values_are_digests():
    task = shipped()[0][0]
    assert all(" == sha256:" in test for test in task.hidden_tests)
    assert not any("sha256" in test for test in task.visible_tests)


def test_the_visible_run_prints_one_line_per_test(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    task = shipped()[0][0]
    harness.prepare(MiniEnvironment().prepare_payload(task))
    lines = harness.visible_tests().splitlines()
    error = task.problem_statement.rpartition(" ")[2].rstrip(".")
    assert len(lines) == len(task.visible_tests) + 1
    assert any(line.endswith(f"FAILED {error}") for line in lines)
    (tmp_path / REPAIR_FILE).write_text(mended(task))
    assert harness.visible_tests().endswith("all passed\n")
    (tmp_path / REPAIR_FILE).unlink()
    assert "FAILED FileNotFoundError" in harness.visible_tests()


ALWAYS_EQUAL = """
def f(a):
    class E(int):
        def __eq__(self, other):
            return True
    return E()
"""


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("def f(a):\n    return a == 1\n", "AssertionError"),
        ("def f(a):\n    while True:\n        a += 1\n", "TimeoutError"),
        ("def f(a):\n    return g(a)\n", "NameError"),
        ("def f(a)\n", "SyntaxError"),
        ("import os\ndef f(a):\n    os._exit(0)\n", "SystemExit"),
        (ALWAYS_EQUAL, "AssertionError"),
        ("def f(a):\n    return a\n", ""),
    ],
)  # fmt: skip
def test_an_outcome_is_the_name_of_the_error(text, error):
    assert harness.outcomes(text, ["test_1: f(1) == 1"] * 2) == [error] * 2


def test_a_test_that_ends_the_child_spoils_no_other():
    text = "import os\ndef f(a):\n    while a == 2:\n        pass\n    return os._exit(0) if a == 3 else a\n"
    tests = [f"test_{n}: f({n}) == {n}" for n in (1, 2, 3, 4)]
    assert harness.outcomes(text, tests) == ["", "TimeoutError", "SystemExit", ""]


def test_what_hangs_beyond_the_budget_of_lines_is_waited_for_once(monkeypatch):
    monkeypatch.setattr(harness, "WALL_LIMIT_S", 0.2)
    text = "def f(a):\n    return a if a == 1 else sum(range(10**12))\n"
    tests = [f"test_{n}: f({n}) == {n}" for n in (1, 2, 3, 4)]
    start = time.monotonic()
    assert harness.outcomes(text, tests) == ["", *["TimeoutError"] * 3]
    assert time.monotonic() - start < 0.5


FORGE = """
import os
def f(a):
    for descriptor in range(3, 16):
        try:
            os.write(descriptor, b'{"value": "1"}' + bytes([10]))
        except OSError:
            pass
"""


def test_forged_answers_are_no_values_of_the_hidden_tests():
    tests = [f"test_{n}: f({n}) == {harness.digest(f'f({n})', n)}" for n in (5, 6)]
    script = f"from swerve.environments.mini import harness; print(harness.outcomes({FORGE!r}, {tests!r}))"
    found = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert found.stdout == "['AssertionError', 'AssertionError']\n"


def test_a_grade_in_a_sandbox_is_exact():
    task = shipped()[1][3]
    environment = MiniEnvironment([task])

    async def verdicts():
        async with SandboxPool(environment.images()) as pool:
            grader = Grader(pool, environment)
            texts = (mended(task), task.workspace[REPAIR_FILE], "")
            return [await grader.grade(task, {REPAIR_FILE: text}) for text in texts]

    right, broken, empty = asyncio.run(verdicts())
    assert right.reward == 1.0
    assert (broken.reward, broken.status) == (0.0, EpisodeStatus.SUCCEEDED)
    assert empty.reward == 0.0
