"""The `str_replace_editor` tool: small edits of workspace files, each of which can be undone."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Mapping
from typing import Any

from swerve.agents.styles import NOTHING_TO_UNDO, PLAIN, PlainStyle
from swerve.sandboxes import WORKDIR, Sandbox, SandboxFileError


class StrReplaceEditor:
    """Edits files of one sandbox and remembers what they were before."""

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        command_timeout_s: float,
        max_observation_characters: int,
        style: PlainStyle = PLAIN,
    ) -> None:
        """Start with an empty history.

        Args:
            sandbox: Whose workspace is edited.
            command_timeout_s: Wall-clock seconds for listing a directory or removing a file.
            max_observation_characters: Of one observation.
            style: How it speaks.
        """
        self._sandbox = sandbox
        self._command_timeout_s = command_timeout_s
        self._max_characters = max_observation_characters
        self._style = style
        self._history: dict[str, list[str | None]] = {}
        self.num_changes = 0
        """Times a file was changed."""

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
            return self._style.file(path, text, self._max_characters)
        lines = self._style.lines(text)
        match view_range:
            case [int(first), int(last)] if 1 <= first <= len(lines) and (last == -1 or first <= last):
                last = len(lines) if last == -1 else min(last, len(lines))
                return self._style.part(path, lines, first, last, self._max_characters)
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
        return self._style.created(path, text)

    async def _str_replace(self, path: str, old: str | None, new: str) -> str:
        if not old:
            return "error: str_replace needs old_str"
        if old == new:
            return "error: old_str and new_str are the same"
        text = await self._sandbox.read_file(path)
        before, *others = text.split(old)
        if not others:
            return self._style.not_found(path)
        if len(others) > 1:
            return self._style.ambiguous(path, _lines_of(text, old))
        after = before + new + others[0]
        await self._write(path, text, after)
        return self._style.edited(path, after, before.count("\n") + 1, new.count("\n") + 1)

    async def _insert(self, path: str, line: int | None, new: str | None) -> str:
        if line is None or new is None:
            return "error: insert needs insert_line and new_str"
        text = await self._sandbox.read_file(path)
        lines = self._style.lines(text)
        if not 0 <= line <= len(lines):
            return f"error: insert_line must be between 0 and {len(lines)}"
        if line and not lines[line - 1].endswith("\n"):
            lines[line - 1] += "\n"
        inserted = new.removesuffix("\n") + "\n"
        after = "".join([*lines[:line], inserted, *lines[line:]])
        await self._write(path, text, after)
        return self._style.edited(path, after, line + 1, inserted.count("\n"))

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
        self.num_changes += 1
        return self._style.undone(path)

    async def _write(self, path: str, before: str | None, after: str) -> None:
        await self._sandbox.write_file(path, after)
        self._history.setdefault(path, []).append(before)
        self.num_changes += 1


def _lines_of(text: str, part: str) -> list[int]:
    """Lines, counted from 1, in which the occurrences of a part begin."""
    lines, line, *pieces = [], 1, *text.split(part)
    for piece in pieces[:-1]:
        line += piece.count("\n")
        lines.append(line)
        line += part.count("\n")
    return lines
