"""The fix of a row as a patch that holds whole files, and such a patch as the work of an agent who made it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator
from typing import Any

from swerve.environments.r2egym.fields import Key, check, optional, text
from swerve.environments.r2egym.harness import counts
from swerve.types import SwerveError

_DIFF_KEYS = {
    "header": Key((dict,)),
    "old_file_content": text(),
    "new_file_content": text(),
    "minus_file": optional(dict),
    "plus_file": optional(dict),
    "is_binary_file": optional(bool),
}
_NO_NEWLINE = "\\ No newline at end of file\n"
_ABSENT = "/dev/null"
_HEAD = re.compile(
    r"diff --git a/(?P<path>.+) b/(?P=path)\n(?:(?P<mode>new|deleted) file mode 100644\n)?"
    r"(?:--- .+\n\+\+\+ .+\n@@ -[01],(?P<old>\d+) \+[01],(?P<new>\d+) @@\n)?"
)


def gold_patch(commit: dict[str, Any]) -> str:
    """The fix as a unified diff of one hunk per file, with all of each file as its context; tests are left out.

    Args:
        commit: `parsed_commit_content` of a row.

    Raises:
        SwerveError: A key is at fault.
    """
    changes: dict[str, tuple[str | None, str | None]] = {}
    for index, entry in enumerate(commit["file_diffs"]):
        where = f"parsed_commit_content.file_diffs[{index}]."
        check(entry, _DIFF_KEYS, where, strict=False)
        path = _path(entry["header"], "file", f"{where}header.")
        before = _side(entry.get("minus_file"), "a/", path, f"{where}minus_file.")
        after = _side(entry.get("plus_file"), "b/", path, f"{where}plus_file.")
        if entry.get("is_binary_file"):
            continue
        if before is not None and before != after:
            changes[before] = (entry["old_file_content"], None)
        if after is not None:
            changes[after] = (entry["old_file_content"] if before == after else None, entry["new_file_content"])
    return "".join(_diff(path, *changes[path]) for path in sorted(changes) if counts(path))


def _path(holder: dict[str, Any], key: str, prefix: str) -> str:
    check(holder, {key: Key((dict,))}, prefix, strict=False)
    return check(holder[key], {"path": text()}, f"{prefix}{key}.", strict=False)["path"]


def _side(file: dict[str, Any] | None, side: str, path: str, prefix: str) -> str | None:
    """Path of one side of a change, or `None` where there is no file on it."""
    if file is None:
        return path
    named = check(file, {"path": text()}, prefix, strict=False)["path"]
    return None if named == _ABSENT else named.removeprefix(side)


def _diff(path: str, before: str | None, after: str | None) -> str:
    if before == after:
        return ""
    old, new = _lines(before or ""), _lines(after or "")
    head = f"diff --git a/{path} b/{path}\n"
    if before is None or after is None:
        head += f"{'new' if before is None else 'deleted'} file mode 100644\n"
    if not old and not new:  # an empty file comes or goes
        return head
    head += f"--- {_ABSENT if before is None else f'a/{path}'}\n+++ {_ABSENT if after is None else f'b/{path}'}\n"
    spans = [f"{1 if lines else 0},{len(lines)}" for lines in (old, new)]
    return f"{head}@@ -{spans[0]} +{spans[1]} @@\n" + "".join(_body(old, new))


def _lines(content: str) -> list[str]:
    return re.findall(r"[^\n]*\n|[^\n]+", content)


def _body(old: list[str], new: list[str]) -> Iterator[str]:
    """Lines of the one hunk. Equal ends are taken off first, so that the comparison is of what differs."""
    first = 0
    while first < min(len(old), len(new)) and old[first] == new[first]:
        first += 1
    last = 0
    while last < min(len(old), len(new)) - first and old[-1 - last] == new[-1 - last]:
        last += 1
    yield from _marked(" ", old[:first])
    left, right = old[first : len(old) - last], new[first : len(new) - last]
    for kind, i, j, k, m in difflib.SequenceMatcher(None, left, right, autojunk=True).get_opcodes():
        if kind == "equal":
            yield from _marked(" ", left[i:j])
        else:
            yield from _marked("-", left[i:j])
            yield from _marked("+", right[k:m])
    yield from _marked(" ", old[len(old) - last :])


def _marked(mark: str, lines: list[str]) -> Iterator[str]:
    for line in lines:
        yield mark + line if line.endswith("\n") else f"{mark}{line}\n{_NO_NEWLINE}"


def gold_files(patch: str, where: str) -> dict[str, str | None]:
    """Whole texts by path after a patch of `gold_patch`, `None` for files that it removes.

    Args:
        patch: One hunk per file, with all of the file in it.
        where: Named in the complaint.

    Raises:
        SwerveError: It is no such patch.
    """
    files: dict[str, str | None] = {}
    lines = _lines(patch)
    at = 0
    while at < len(lines):
        head = _HEAD.match("".join(lines[at : at + 5]))
        if head is None:
            raise SwerveError(f"{where}: key gold_patch: not a diff that holds whole files")
        at += head[0].count("\n")
        kept: list[str] = []
        if head["new"] is not None:
            at, kept = _after(lines, at, int(head["old"]), int(head["new"]))
            if len(kept) != int(head["new"]):
                raise SwerveError(f"{where}: key gold_patch: its hunk of {head['path']} is cut short")
        files[head["path"]] = None if head["mode"] == "deleted" else "".join(kept)
    return files


def _after(lines: list[str], at: int, num_old: int, num_new: int) -> tuple[int, list[str]]:
    """Go through a hunk of so many old and new lines; where it ends, and the new ones."""
    kept: list[str] = []
    mark = " "
    while at < len(lines):
        line = lines[at]
        if line == _NO_NEWLINE:
            if mark != "-":
                kept[-1] = kept[-1].removesuffix("\n")
        elif num_old <= 0 and num_new <= 0:
            break
        else:
            mark = line[0]
            num_old -= mark in " -"
            num_new -= mark in " +"
            kept += [line[1:]] if mark in " +" else []
        at += 1
    return at, kept
