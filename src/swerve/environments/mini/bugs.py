"""Families of bug: ways to break a small right function in one place, each an edit within one line."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator

from swerve.environments.functions.mutations import Edit, apply, sites

_OF_KIND: dict[str, str] = {
    "arithmetic": "operator",
    "augmented": "operator",
    "boolean": "boolean",
    "not": "boolean",
    "negation": "sign",
    "constant": "constant",
    "call": "call",
    "swap": "argument_order",
    "jump": "boolean",
}
_OPERATORS = {"+": "-*", "-": "+", "*": "+"}


def breaks(source: str) -> list[tuple[str, Edit]]:
    """List the ways to break a function.

    Args:
        source: One function: ASCII, dedented.

    Returns:
        Pairs of family and edit in a fixed order, one per distinct outcome; each outcome parses.
    """
    found: list[tuple[str, Edit]] = []
    for family, finder in _FINDERS.items():
        found += [(family, edit) for edit in finder(source)]
    for edit in sites(source):
        if edit.kind == "compare":
            strictness = source[edit.start : edit.end].rstrip("=") == edit.text.rstrip("=")
            found.append(("boundary" if strictness else "comparison", edit))
        elif edit.kind in _OF_KIND:
            found.append((_OF_KIND[edit.kind], edit))
    outcomes = {source}
    distinct = []
    for family, edit in found:
        outcome = apply(source, edit)
        if outcome not in outcomes and _parses(outcome):
            outcomes.add(outcome)
            distinct.append((family, edit))
    return distinct


def _parses(source: str) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def _matches(source: str, pattern: str, replacement: Callable[[re.Match[str]], list[str]], kind: str) -> Iterator[Edit]:
    for match in re.finditer(pattern, source):
        for text in replacement(match):
            yield Edit(kind, match.start(1), match.end(1), text)


def _range_end(source: str) -> Iterator[Edit]:
    yield from _matches(source, r"range\((?:[^(),]+, )?((?:[^(),]|\([^()]*\))+)\)", _shift, "range_end")


def _shift(match: re.Match[str]) -> list[str]:
    end = match.group(1)
    if end.endswith((" + 1", " - 1")):
        return [end[:-4]]
    return [f"{end} + 1", f"{end} - 1"]


def _initial_value(source: str) -> Iterator[Edit]:
    yield from _matches(source, r"(?m)^    \w+ = ([01])$", lambda m: ["1" if m.group(1) == "0" else "0"], "initial")


def _accumulate(source: str) -> Iterator[Edit]:
    yield from _matches(source, r" ([+*]=|//=) ", lambda m: ["="], "accumulate")


def _return_variable(source: str) -> Iterator[Edit]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    yield from _matches(
        source, r"(?m)^ +return (\w+)$", lambda m: sorted(names - {m.group(1)}) if m.group(1) in names else [], "return"
    )


def _index(source: str) -> Iterator[Edit]:
    yield from _matches(source, r"\[(-?\d)\]", lambda m: [x for x in ("0", "1", "-1") if x != m.group(1)], "index")
    yield from _matches(source, r"\w\[(\w+ [+-] 1)\]", lambda m: [m.group(1)[:-4]], "index")
    yield from _matches(source, r"\w\[([a-z]\w*)\]", lambda m: [f"{m.group(1)} - 1"], "index")


def _slice(source: str) -> Iterator[Edit]:
    yield from _matches(source, r"\[(:-?\d|-?\d:)\]", _turned, "slice")


def _turned(match: re.Match[str]) -> list[str]:
    text = match.group(1)
    return [text[1:] + ":"] if text.startswith(":") else [":" + text[:-1]]


def _operand_order(source: str) -> Iterator[Edit]:
    pattern = r"(?<![\w\])] )\b(\w+ (?:-|//|%) \w+)\b(?! [*/%+-])"
    yield from _matches(source, pattern, lambda m: [_swapped(m.group(1))], "order")


def _swapped(text: str) -> str:
    left, operator, right = text.split(" ")
    return f"{right} {operator} {left}"


def _other_operator(source: str) -> Iterator[Edit]:
    pattern = r"[\w\])] ([-+*]) (?=[\w(])"
    yield from _matches(source, pattern, lambda m: list(_OPERATORS[m.group(1)]), "arithmetic")


def _wrong_variable(source: str) -> Iterator[Edit]:
    arguments = [node.arg for node in ast.walk(ast.parse(source)) if isinstance(node, ast.arg)]
    if len(arguments) == 2:
        for a, b in (arguments, arguments[::-1]):
            yield from _matches(source[source.index("\n") :], rf"[-+*/%<>=] ({a})\b", lambda m, b=b: [b], "variable")


def _shifted(finder: Callable[[str], Iterator[Edit]]) -> Callable[[str], Iterator[Edit]]:
    """Finders that look at the body only give offsets into it."""

    def find(source: str) -> Iterator[Edit]:
        body = source.index("\n")
        for edit in finder(source):
            yield edit._replace(start=edit.start + body, end=edit.end + body)

    return find


_FINDERS: dict[str, Callable[[str], Iterator[Edit]]] = {
    "range_end": _range_end,
    "initial_value": _initial_value,
    "accumulate": _accumulate,
    "return_variable": _return_variable,
    "index": _index,
    "slice": _slice,
    "argument_order": _operand_order,
    "operator": _other_operator,
    "wrong_variable": _shifted(_wrong_variable),
}
FAMILIES: tuple[str, ...] = tuple(sorted({*_FINDERS, *_OF_KIND.values(), "boundary", "comparison"}))
