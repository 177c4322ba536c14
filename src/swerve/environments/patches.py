"""Unified diffs between texts: made, and applied in either direction, strictly."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from typing import TypeAlias

from swerve.types import SwerveError, Work

_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = "\\ No newline at end of file\n"
_NOTHING = "/dev/null"
_EMPTY = re.compile(r"diff --git a/(.+) b/\1\n(new|deleted) file mode \d+\n(?!(?:index .*\n)?--- (?:a/\1|/dev/null)\n)")
_CONTEXT = 3

_Hunk: TypeAlias = tuple[int, int, list[str]]
"""First line before and after, and the lines with their marks."""


def make_patch(before: Work, after: Work, *, whole: bool = False) -> str:
    """The unified diff that turns some texts into others.

    Args:
        before: Text by path; a path that is missing, or `None`, is no file.
        after: The same, afterwards.
        whole: Every file's hunk holds all of it, so that its texts can be had from the diff alone.

    Returns:
        The diff, files in order of path; empty where nothing differs.
    """
    pairs = {path: (before.get(path), after.get(path)) for path in sorted({*before, *after})}
    pairs = {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}
    # An empty file that comes or goes has no hunk: git's own heads say it, and must then stand before every file.
    headed = any(not old and not new for old, new in pairs.values())
    pieces: list[str] = []
    for path, (old, new) in pairs.items():
        if headed:
            mode = "new" if old is None else "deleted" if new is None else ""
            pieces.append(f"diff --git a/{path} b/{path}\n" + (f"{mode} file mode 100644\n" if mode else ""))
        names = (_NOTHING if old is None else f"a/{path}", _NOTHING if new is None else f"b/{path}")
        lines = split_lines(old or ""), split_lines(new or "")
        for line in difflib.unified_diff(*lines, *names, n=sum(map(len, lines)) if whole else _CONTEXT):
            pieces.append(line if line.endswith("\n") else f"{line}\n{_NO_NEWLINE}")
    return "".join(pieces)


def patched_paths(patch: str) -> list[str]:
    """Paths of the files a diff is about, in its order."""
    return [old or new or "" for old, new, _ in _files(patch)]


def whole_texts(patch: str) -> dict[str, str | None]:
    """New text by path of the files that a diff of whole files is about; `None` for one that is no more.

    Raises:
        SwerveError: It is not one that `make_patch` makes with `whole`.
    """
    before: dict[str, str] = {}
    for old, new, hunks in _files(patch):
        if len(hunks) > 1 or any(max(hunk[:2]) > 1 for hunk in hunks):
            raise SwerveError(f"the patch does not hold all of {old or new}")
        if old is not None:
            before[old] = "".join(line[1:] for _, _, body in hunks for line in body if line[0] in " -")
    return apply_patch(before, patch)


def apply_patch(files: Mapping[str, str], patch: str, *, reverse: bool = False) -> dict[str, str | None]:
    """Apply a unified diff.

    Args:
        files: Text by path, of at least the files that the diff is about.
        patch: The diff.
        reverse: Turn what it leads to into what it starts from.

    Returns:
        New text by path of the files it is about; `None` for one that is no more.

    Raises:
        SwerveError: It does not fit the texts, or is no unified diff.
    """
    result: dict[str, str | None] = {}
    for old, new, hunks in _files(patch):
        source, target = (new, old) if reverse else (old, new)
        path = source or target
        assert path is not None
        if source is not None and source not in files:
            raise SwerveError(f"the patch is about {source}, which is not there")
        lines = [] if source is None else split_lines(files[source])
        changed = _apply(path, lines, hunks, reverse)
        if source is not None and source != target:
            result[source] = None
        if target is not None:
            result[target] = "".join(changed)
    return result


def _apply(path: str, lines: list[str], hunks: list[_Hunk], reverse: bool) -> list[str]:
    result: list[str] = []
    position = 0
    kept, gone = (" +", "+") if reverse else (" -", "-")
    for old_start, new_start, body in hunks:
        before = [line[1:] for line in body if line[0] in kept]
        after = [line[1:] for line in body if line[0] != gone]
        first = new_start if reverse else old_start
        first = first - 1 if before else first  # a hunk of nothing but additions names the line before them
        if first < position or lines[first : first + len(before)] != before:
            raise SwerveError(f"the patch does not fit {path} at line {first + 1}")
        result += lines[position:first] + after
        position = first + len(before)
    return result + lines[position:]


def _files(patch: str) -> list[tuple[str | None, str | None, list[_Hunk]]]:
    """Old path, new path and hunks of each file."""
    files: list[tuple[str | None, str | None, list[_Hunk]]] = []
    lines = split_lines(patch)
    position = 0
    while position < len(lines):
        if not lines[position].startswith("--- "):
            if empty := _EMPTY.match("".join(lines[position : position + 4])):
                files.append((None, empty[1], []) if empty[2] == "new" else (empty[1], None, []))
            position += 1  # what git and others write between files
            continue
        if position + 1 == len(lines) or not lines[position + 1].startswith("+++ "):
            raise SwerveError(f"line {position + 1} of the patch: a `---` line without its `+++`")
        names = _path(lines[position], "a/"), _path(lines[position + 1], "b/")
        if names == (None, None):
            raise SwerveError(f"line {position + 1} of the patch: names no file")
        hunks: list[_Hunk] = []
        position += 2
        while position < len(lines) and (found := _HUNK.match(lines[position])):
            position, body = _body(lines, position + 1, int(found[2] or 1), int(found[4] or 1))
            hunks.append((int(found[1]), int(found[3]), body))
        if not hunks:
            raise SwerveError(f"line {position} of the patch: a file without a hunk")
        files.append((*names, hunks))
    if patch.strip() and not files:
        raise SwerveError("not a unified diff")
    return files


def _body(lines: list[str], position: int, num_old: int, num_new: int) -> tuple[int, list[str]]:
    body: list[str] = []
    while num_old or num_new:
        line = lines[position] if position < len(lines) else ""
        mark = line[:1]
        if mark not in ("-", "+", " ") or (mark != "+" and not num_old) or (mark != "-" and not num_new):
            raise SwerveError(f"line {position + 1} of the patch: the hunk has other lines than it says")
        num_old -= mark != "+"
        num_new -= mark != "-"
        body.append(line)
        position += 1
        if position < len(lines) and lines[position] == _NO_NEWLINE:
            body[-1] = body[-1].removesuffix("\n")
            position += 1
    return position, body


def _path(line: str, prefix: str) -> str | None:
    name = line[4:].rstrip("\n").split("\t")[0]
    return None if name == _NOTHING else name.removeprefix(prefix)


def split_lines(text: str) -> list[str]:
    """Lines with their newlines; no other character ends a line."""
    *whole, last = text.split("\n")
    return [f"{line}\n" for line in whole] + ([last] if last else [])
