"""Demonstrations read like episodes, and the stream of them repeats."""

import random
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import swerve
from swerve.agents import TOOL_SCHEMAS
from swerve.environments.demonstrations import Mixture, Noise, Sources, demonstrate
from swerve.environments.demonstrations.corpus import (
    CorpusFunction,
    collect,
    functions_of,
    lock_wheels,
    normalise,
    read_lock,
    skeleton,
)
from swerve.environments.demonstrations.repairs import _by_kind
from swerve.environments.demonstrations.spans import difference, replacement
from swerve.environments.demonstrations.stream import break_anew, render
from swerve.environments.functions.mutations import Edit, apply, candidates, sites
from swerve.environments.mini import generate
from swerve.environments.mini.bugs import breaks
from swerve.rendering import ConversationRenderer, Template, Tokenizer, parse_tool_calls
from swerve.types import SwerveError

CLAMP = "def clamp(x, low, high):\n    if x < low:\n        return low\n    return min(x, high)"


@pytest.fixture(scope="module")
def renderer():
    return ConversationRenderer(
        Tokenizer.load(Path(swerve.__file__).parent / "policies" / "tiny"), Template.load("tiny_repair")
    )


def corpus_function(text):
    return CorpusFunction(package="p", file="p.py", line=1, text=text, num_sites=len(sites(text)), shape=skeleton(text))


def sources(num=40):
    rng = random.Random(5)
    texts = {generate(rng).right for _ in range(num)}
    corpus = [corpus_function(text) for text in sorted(texts) if sites(text)]
    return Sources(corpus=corpus[:-4], held_back=corpus[-4:], task_functions=(), forbidden=frozenset())


# ------------------------------------------------------------------------------------------------------ spans


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 10**9))
def test_a_replacement_is_unambiguous_and_does_what_the_edit_does(seed):
    function = generate(random.Random(seed))
    found = replacement(function.broken, function.fix)
    assume(found is not None)
    assert found is not None
    old, new = found
    assert function.broken.count(old) == 1
    assert function.broken.replace(old, new) == function.right
    assert old == old.strip() and new == new.strip() and old != new


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("x < low", "x <= low", ("<", "<=")),
        ("return low", "return high", ("return low", "return high")),
        ("min", "max", ("min", "max")),
    ],
)
def test_a_span_is_as_short_as_it_can_be(old, new, expected):
    after = CLAMP.replace(old, new)
    edit = difference(CLAMP, after)
    assert apply(CLAMP, edit) == after
    assert replacement(CLAMP, edit) == expected


def test_an_inserted_word_takes_its_neighbour_along():
    before = "def f(a):\n    if a:\n        return b\n    return a"
    edit = next(edit for edit in candidates(before) if edit.text == "not ")
    assert replacement(before, edit) in (("if a", "if not a"), ("a:", "not a:"))


# ---------------------------------------------------------------------------------------------- demonstrations


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.booleans())
def test_a_demonstration_ends_with_finish_and_never_repeats_an_edit(seed, wrong_by_kind):
    rng = random.Random(seed)
    problem = break_anew(rng, generate(rng).right)
    assume(problem is not None)
    guesses = [edit for _, edit in breaks(problem.broken)] if wrong_by_kind else []
    noise = Noise(invalid_edit=0.3, wrong_by_kind=wrong_by_kind)
    made = demonstrate(rng, problem.broken, problem.fix, noise, guesses=guesses)
    assume(made is not None)
    edits = [
        (parameters["old_str"], parameters["new_str"])
        for calls, _ in made.turns
        for _, parameters in calls
        if parameters.get("command") == "str_replace"
    ]
    assert len(edits) == len(set(edits)) <= 3
    assert made.turns[-1] == ([("finish", {})], [])
    assert len(made.weights) == len(made.turns) <= 5
    solved = any("all passed" in observation for _, seen in made.turns for observation in seen)
    if solved:
        old, new = edits[-1]
        assert problem.broken.replace(old, new) == apply(problem.broken, problem.fix)
        assert made.weights[-2:] == (1.0, 1.0)


def test_wrong_edits_by_kind_are_all_there_and_rare_kinds_come_early():
    rng = random.Random(0)
    many = [Edit("name", i, i + 1, "x") for i in range(99)]
    lone = Edit("compare", 0, 1, "<")
    orders = [_by_kind(rng, [lone, *many]) for _ in range(200)]
    assert all(len(order) == 100 and set(order) == {lone, *many} for order in orders)
    first = sum(order[-1] == lone for order in orders)  # edits are taken from the end
    assert 0.15 < first / 200 < 0.35  # half the time a kind is drawn, and this is one of two


def test_equal_seeds_give_equal_demonstrations():
    def draw():
        rng = random.Random(3)
        problem = break_anew(rng, CLAMP)
        return demonstrate(rng, problem.broken, problem.fix, Noise())

    assert draw() == draw()


def test_the_tokens_are_those_of_an_episode(renderer):
    rng = random.Random(11)
    problem = break_anew(rng, CLAMP)
    made = demonstrate(rng, problem.broken, problem.fix, Noise(right_edit=0.0, give_up=0.0, invalid_edit=0.0))
    assert made is not None
    sequence = render(renderer, made, 0.25)
    tokens = list(renderer.initial(made.problem))
    expected = [0.0] * len(tokens)
    for number, ((calls, observations), weight) in enumerate(zip(made.turns, made.weights, strict=True)):
        completion = renderer.completion(calls)
        parsed = parse_tool_calls(renderer.tokenizer.decode(completion[:-1]), TOOL_SCHEMAS)
        assert [call.name for call in parsed.calls] == [name for name, _ in calls] and not parsed.malformed
        tokens += completion
        expected += [weight] * len(completion)
        if observations:
            seen = renderer.tool_results(observations)
            tokens += seen
            expected += [0.25 if number == 0 else 0.0] * len(seen)
    assert sequence.tokens.tolist() == tokens
    np.testing.assert_allclose(sequence.weights, expected)
    assert not sequence.right_edits.any() or made.weights[-2] == 1.0


# ----------------------------------------------------------------------------------------------------- stream


def test_the_stream_is_addressed_by_position(renderer):
    def stream():
        noise, mixture = Noise(), Mixture(mini_share=0.3, short_first=10)
        return sources().stream(renderer, seed=1, noise=noise, mixture=mixture, max_tokens=512)

    forwards = [stream().sequence(i).tokens.tolist() for i in (0, 7, 300)]
    one = stream()
    backwards = [one.sequence(i).tokens.tolist() for i in (300, 7, 0)]
    assert forwards == backwards[::-1]
    assert one.sequence(0).weights.sum() > 0


def test_long_demonstrations_are_passed_over(renderer):
    noise, mixture = Noise(), Mixture(short_first=0)
    stream = sources().stream(renderer, seed=1, noise=noise, mixture=mixture, max_tokens=150)
    assert max(len(stream.sequence(i).tokens) for i in range(20)) <= 150


# ----------------------------------------------------------------------------------------------------- corpus


def test_normalising_drops_comments_and_docstring():
    segment = '    def f(self, a):\n        """Doc."""\n        # why\n        b = a + 1  # one\n\n        return b\n'
    assert normalise(segment) == "def f(self, a):\n    b = a + 1\n    return b"
    assert normalise("def f(a):\n    return a") is None


def test_a_skeleton_ignores_names_and_blanks_only():
    assert skeleton("def f(a):\n    return a + 1") == skeleton("def g(b):\n    return  b + 1")
    assert skeleton("def f(a):\n    return a + 1") != skeleton("def f(a):\n    return a - 1")


def test_a_corpus_is_distinct_and_leaves_out_tests_and_task_packages(tmp_path):
    wheel = tmp_path / "thing-1.0-py3-none-any.whl"
    code = "class A:\n    def f(self, a):\n        b = a + 1\n        return b\n"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("thing/a.py", code)
        archive.writestr("thing/b.py", code)
        archive.writestr("thing/tests/c.py", code.replace("+", "*"))
        archive.writestr("thing/_vendor/toolz/d.py", code.replace("+", "%"))
        archive.writestr("thing-1.0.dist-info/METADATA", "Name: thing\nVersion: 1.0\nLicense-Expression: MIT\n\n")
    found = collect(functions_of(wheel, "thing"))
    assert [(function.file, function.line) for function in found] == [("thing/a.py", 2)]
    assert [(locked.name, locked.license) for locked in lock_wheels(tmp_path)] == [("thing", "MIT")]


def test_the_shipped_lock_is_permissive_and_names_no_package_of_the_tasks():
    wheels = read_lock()
    assert len({wheel.name for wheel in wheels}) == len(wheels) > 200
    assert not {"boltons", "toolz", "networkx", "python-dateutil"} & {wheel.name for wheel in wheels}


def test_a_torn_lock_is_one_clear_line(tmp_path):
    path = tmp_path / "lock.jsonl"
    path.write_text('{"name": "x"}\n')
    with pytest.raises(SwerveError, match=r"lock\.jsonl:1: not a lock entry"):
        read_lock(path)
