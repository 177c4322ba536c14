"""The `str_replace_editor` tool: small edits of workspace files, each of which can be undone."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Mapping
from typing import Any

from swerve.sandboxes import WORKDIR, Sandbox, SandboxFileError

EDITED = "edited"
UNDONE = "undone"
CREATED = "created"
CHANGES = frozenset({EDITED, UNDONE, CREATED})
"""What the editor says when a file has changed."""
NOTHING_TO_UNDO = "error: nothing to undo"
NOT_FOUND = "error: old_str not found"


def ambiguous(num_occurrences: int) -> str:
    """What the editor says of text that occurs more than once."""
    return f"error: old_str occurs {num_occurrences} times"


class StrReplaceEditor:
    """Edits files of one sandbox and remembers what they were before."""

    def __init__(self, sandbox: Sandbox, *, command_timeout_s: float) -> None:
        """Start with an empty history.

        Args:
            sandbox: Whose workspace is edited.
            command_timeout_s: Wall-clock seconds for listing a directory or removing a file.
        """
        self._sandbox = sandbox
        self._command_timeout_s = command_timeout_s
        self._history: dict[str, list[str | None]] = {}

    async def run(self, arguments: Mapping[str, Any]) -> str:
        """Carry out one call; `arguments` fit the tool's schema. Returns the observation."""
        path = posixpath.normpath(posixpath.join(WORKDIR, arguments["path"]))
        try:
            match arguments["command"]:
                case "view":
                    return await self._view(path, arguments.get("view_range"))
                case "create":
                    return await self._create(path, arguments.get("file_text"))
                case "str_replace":
                    return await self._str_replace(path, arguments.get("old_str"), arguments.get("new_str", ""))
                case "insert":
                    return await self._insert(path, arguments.get("insert_line"), arguments.get("new_str"))
                case _:
                    return await self._undo_edit(path)
        except SandboxFileError as error:
            return f"error: {error}"

    async def _view(self, path: str, view_range: list[Any] | None) -> str:
        try:
            text = await self._sandbox.read_file(path)
        except SandboxFileError as error:
            return await self._list(path, error)
        if view_range is None:
            return text.removesuffix("\n") or "the file is empty"
        lines = text.splitlines()
        match view_range:
            case [int(first), int(last)] if 1 <= first <= len(lines) and (last == -1 or first <= last):
                return "\n".join(lines[first - 1 : None if last == -1 else last])
        return f"error: view_range must be [first, last] with first between 1 and {len(lines)}"

    async def _list(self, path: str, error: SandboxFileError) -> str:
        """Files below a directory, or why `path` cannot be viewed."""
        command = f"test -d {shlex.quote(path)} && find {shlex.quote(path)} -maxdepth 2 -not -path '*/.*' | sort"
        result = await self._sandbox.exec(command, timeout_s=self._command_timeout_s)
        return result.output.removesuffix("\n") if result.exit_code == 0 else f"error: {error}"

    async def _create(self, path: str, text: str | None) -> str:
        if text is None:
            return "error: create needs file_text"
        try:
            before = await self._sandbox.read_file(path)
        except SandboxFileError:
            before = None
        await self._write(path, before, text)
        return CREATED

    async def _str_replace(self, path: str, old: str | None, new: str) -> str:
        if not old:
            return "error: str_replace needs old_str"
        if old == new:
            return "error: old_str and new_str are the same"
        text = await self._sandbox.read_file(path)
        num_occurrences = text.count(old)
        if num_occurrences == 0:
            return NOT_FOUND
        if num_occurrences > 1:
            return ambiguous(num_occurrences)
        await self._write(path, text, text.replace(old, new))
        return EDITED

    async def _insert(self, path: str, line: int | None, new: str | None) -> str:
        if line is None or new is None:
            return "error: insert needs insert_line and new_str"
        text = await self._sandbox.read_file(path)
        lines = text.splitlines(keepends=True)
        if not 0 <= line <= len(lines):
            return f"error: insert_line must be between 0 and {len(lines)}"
        if line and not lines[line - 1].endswith("\n"):
            lines[line - 1] += "\n"
        await self._write(path, text, "".join([*lines[:line], new.removesuffix("\n") + "\n", *lines[line:]]))
        return EDITED

    async def _undo_edit(self, path: str) -> str:
        history = self._history.get(path)
        if not history:
            return NOTHING_TO_UNDO
        before = history[-1]
        if before is None:
            await self._sandbox.exec(f"rm -f -- {shlex.quote(path)}", timeout_s=self._command_timeout_s)
        else:
            await self._sandbox.write_file(path, before)
        history.pop()
        return UNDONE

    async def _write(self, path: str, before: str | None, after: str) -> None:
        await self._sandbox.write_file(path, after)
        self._history.setdefault(path, []).append(before)
