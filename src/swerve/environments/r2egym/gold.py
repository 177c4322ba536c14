"""The fix of a row as a patch that holds whole files, and such a patch as the work of an agent who made it."""

from __future__ import annotations

from typing import Any

from swerve.environments.patches import make_patch, whole_texts
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
_ABSENT = "/dev/null"


def gold_patch(commit: dict[str, Any]) -> str:
    """The fix as a unified diff of one hunk per file, with all of each file as its context; tests are left out.

    Args:
        commit: `parsed_commit_content` of a row.

    Raises:
        SwerveError: A key is at fault.
    """
    old: dict[str, str | None] = {}
    new: dict[str, str | None] = {}
    for index, entry in enumerate(commit["file_diffs"]):
        where = f"parsed_commit_content.file_diffs[{index}]."
        check(entry, _DIFF_KEYS, where, strict=False)
        path = _path(entry["header"], "file", f"{where}header.")
        before = _side(entry.get("minus_file"), "a/", path, f"{where}minus_file.")
        after = _side(entry.get("plus_file"), "b/", path, f"{where}plus_file.")
        if entry.get("is_binary_file"):
            continue
        if before is not None and counts(before):
            old[before] = entry["old_file_content"]
        if after is not None and counts(after):
            new[after] = entry["new_file_content"]
    return make_patch(old, new, whole=True)


def _path(holder: dict[str, Any], key: str, prefix: str) -> str:
    check(holder, {key: Key((dict,))}, prefix, strict=False)
    return check(holder[key], {"path": text()}, f"{prefix}{key}.", strict=False)["path"]


def _side(file: dict[str, Any] | None, side: str, path: str, prefix: str) -> str | None:
    """Path of one side of a change, or `None` where there is no file on it."""
    if file is None:
        return path
    named = check(file, {"path": text()}, prefix, strict=False)["path"]
    return None if named == _ABSENT else named.removeprefix(side)


def gold_files(patch: str, where: str) -> dict[str, str | None]:
    """Whole texts by path after a patch of `gold_patch`, `None` for files that it removes.

    Args:
        patch: One hunk per file, with all of the file in it.
        where: Named in the complaint.

    Raises:
        SwerveError: It is no such patch.
    """
    try:
        return whole_texts(patch)
    except SwerveError as error:
        raise SwerveError(f"{where}: key gold_patch: {error}") from None
