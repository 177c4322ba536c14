"""From a change of characters to the `old_str` and `new_str` that demonstrate it."""

from __future__ import annotations

import re

from swerve.environments.functions.mutations import Edit

_LEXEME = re.compile(r"[A-Za-z_]\w*|\d+|[ ]+|[<>=!+\-*/%&|^@:]+|.")
_LEXEME_OR_BREAK = re.compile(_LEXEME.pattern + "|\n")


def replacement(source: str, edit: Edit, *, whole_line: bool = False) -> tuple[str, str] | None:
    """The smallest replacement of whole lexemes that carries out an edit and is unambiguous.

    The span starts as the lexemes that the edit touches and grows within its line, one lexeme to the left, one to the
    right and so on, until its text occurs once in the source; then it becomes the line without its indentation, then
    the line with more and more of the lines before it. It never begins or ends with a blank and neither text is empty.

    Args:
        source: Text of the file.
        edit: A change within one line.
        whole_line: Begin with the line rather than with what the edit touches.

    Returns:
        `old_str` and `new_str`, or `None` where no span is unambiguous.
    """
    line_start = source.rfind("\n", 0, edit.start) + 1
    line_end = source.find("\n", edit.end)
    line_end = len(source) if line_end < 0 else line_end
    lexemes = [(line_start + m.start(), line_start + m.end()) for m in _LEXEME.finditer(source[line_start:line_end])]
    solid = [span for span in lexemes if not source[span[0] : span[1]].isspace()]
    touched = [i for i, (start, end) in enumerate(solid) if start < edit.end and end > edit.start]
    if not touched or not edit.text.strip() or edit.start == edit.end or source[edit.end - 1].isspace():
        after = [i for i, (start, _) in enumerate(solid) if start >= edit.end]
        before = [i for i, (_, end) in enumerate(solid) if end <= edit.start]
        neighbour = after[:1] or before[-1:]
        if not neighbour:
            return None
        touched = sorted({*touched, *neighbour})
    first, last = (0, len(solid) - 1) if whole_line else (touched[0], touched[-1])
    go_left = True
    while True:
        found = _cut(source, edit, solid[first][0], solid[last][1])
        if found:
            return found
        if first == 0 and last == len(solid) - 1:
            break
        if (go_left and first > 0) or last == len(solid) - 1:
            first -= 1
        else:
            last += 1
        go_left = not go_left
    end = solid[-1][1]
    start = line_start
    while start > 0:
        start = source.rfind("\n", 0, start - 1) + 1
        indented = start + len(source[start:]) - len(source[start:].lstrip(" "))
        found = _cut(source, edit, indented, end)
        if found:
            return found
    return None


def difference(before: str, after: str) -> Edit:
    """The one replacement of whole lexemes that turns `before` into `after`, as short as can be."""
    old, new = _LEXEME_OR_BREAK.findall(before), _LEXEME_OR_BREAK.findall(after)
    shared = min(len(old), len(new))
    head = next((i for i in range(shared) if old[i] != new[i]), shared)
    shared -= head
    tail = next((i for i in range(shared) if old[-1 - i] != new[-1 - i]), shared)
    start = sum(map(len, old[:head]))
    end = len(before) - sum(map(len, old[len(old) - tail :]))
    return Edit("fix", start, end, "".join(new[head : len(new) - tail]))


def _cut(source: str, edit: Edit, start: int, end: int) -> tuple[str, str] | None:
    old = source[start:end]
    new = source[start : edit.start] + edit.text + source[edit.end : end]
    if not new.strip() or new != new.strip() or start > edit.start or end < edit.end:
        return None
    return (old, new) if _occurs_once(source, old) else None


def _occurs_once(source: str, text: str) -> bool:
    first = source.find(text)
    return first >= 0 and source.find(text, first + 1) < 0
