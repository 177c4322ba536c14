"""Mutations: every site parses, stays in its line, and can be undone by a candidate."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swerve.environments.functions import mutations
from swerve.environments.functions.mutations import Edit, apply, candidates, line_of, normalise_function, sites

EVERYTHING = """def f(self, a, b, *, flag=True):
    total = 3
    for x in a:
        if x in b and not flag or x is None:
            continue
        if x < 0 <= total:
            total += x * 2
            break
        while flag:
            total = max(total, -x)
    if total == 1:
        return total
    return False
"""


def function_sources() -> list[str]:
    modules = [textwrap, inspect, re, ast]
    sources = []
    for module in modules:
        text = inspect.getsource(module)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
                segment = "\n".join(text.split("\n")[node.lineno - 1 : node.end_lineno])
                normal = normalise_function(segment)
                if normal is not None and normal.count("\n") <= 20:
                    sources.append(normal)
    return sources


SOURCES = [EVERYTHING, *function_sources()]


def test_every_kind_is_found() -> None:
    found = {edit.kind for edit in sites(EVERYTHING)}
    assert found == set(mutations.KINDS)
    outcomes = {EVERYTHING[edit.start : edit.end] + ">" + edit.text for edit in sites(EVERYTHING)}
    assert {"in>not in", "and>or", "or>and", "not >", "is>is not", "continue>break", "<><=", "<>>", "+=>-="} <= outcomes
    assert {
        "*>//",
        "2>3",
        "2>1",
        "max>min",
        "->",
        ">not ",
        "total>None",
        "False>True",
        "total, -x>-x, total",
    } <= outcomes


@given(st.sampled_from(SOURCES))
def test_sites_parse_and_differ_in_one_line(source: str) -> None:
    for edits in (sites(source), candidates(source)):
        outcomes = set()
        for edit in edits:
            outcome = apply(source, edit)
            ast.parse(outcome)
            before, after = source.split("\n"), outcome.split("\n")
            assert len(before) == len(after)
            changed = [number for number, pair in enumerate(zip(before, after, strict=True), 1) if pair[0] != pair[1]]
            assert changed == [line_of(source, edit)]
            assert edit.kind in mutations.KINDS
            outcomes.add(outcome)
        assert len(outcomes) == len(edits)
        assert source not in outcomes


@given(st.sampled_from(SOURCES), st.data())
def test_candidates_hold_the_inverse(source: str, data: st.DataObject) -> None:
    edits = [edit for edit in sites(source) if not undoable_only_by_luck(source, edit)]
    if edits:
        broken = apply(source, data.draw(st.sampled_from(edits)))
        assert source in {apply(broken, edit) for edit in candidates(broken)}


def undoable_only_by_luck(source: str, edit: Edit) -> bool:
    """A few operators lose what was there: their inverse is offered only for common cases."""
    before = source[edit.start : edit.end]
    return (
        (edit.kind == "return")
        or (edit.kind == "negation" and not source[edit.end : edit.end + 1].isdigit())
        or (edit.kind in ("not", "swap"))
        or (edit.kind == "constant" and before.isdigit() and int(before) > mutations.MAX_CONSTANT - 1)
    )


def test_normalise_drops_only_what_does_not_matter() -> None:
    segment = '''
    @decorated
    def f(self, a=1):  # comment
        """Say
        much."""

        # more
        return "# kept"  # dropped
'''
    assert normalise_function(segment) == 'def f(self, a=1):\n    return "# kept"\n'
    assert normalise_function('def f():\n    """Only words."""\n') is None
    assert normalise_function('def f():\n    """A"""; return 1\n') is None
    assert normalise_function('def f():\n    return "\u00e9"\n') is None
    assert normalise_function('def f():\n    return """a\n\n    # b"""\n') is None
    assert normalise_function("x = 1\n") is None
    assert normalise_function("def f(:\n") is None


def test_sources_that_are_no_function_are_refused() -> None:
    with pytest.raises(SyntaxError):
        sites("def f(:\n")
    for text in ("x = 1\n", "def f():\n    return 'é'\n", "def f(): pass\ndef g(): pass\n"):
        with pytest.raises(ValueError):
            candidates(text)
