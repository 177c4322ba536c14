"""How tools read and what they say: two styles, each of which belongs to templates.

`plain` is what the policy that ships was trained on: the bare text of a file, one word after an edit. `numbered` is for
full-size models in whole repositories: line numbers, the lines around an edit, where else a text occurs, exit codes,
and all arguments of the reference agent. A policy must be shown the style it knows, so a recipe's template decides.

An observation that starts with `error: ` says that a call did nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from swerve.rendering import ParameterSchema, ToolSchema
from swerve.sandboxes import ExecResult

ERROR = "error: "
FINISH = "finish"
EDITED = "edited"
UNDONE = "undone"
CREATED = "created"
NOTHING_TO_UNDO = "error: nothing to undo"
NOT_FOUND = "error: old_str not found"
_LINES_AROUND = 4
"""Lines shown before and after an edit, in the numbered style."""
_MAX_PLACES = 10


def ambiguous(num_occurrences: int) -> str:
    """What the editor says of text that occurs more than once."""
    return f"error: old_str occurs {num_occurrences} times"


def shorten(text: str, max_characters: int) -> str:
    """Cut a text in its middle to about `max_characters`, and say how much is missing."""
    if len(text) <= max_characters:
        return text
    half = max(max_characters // 2, 1)
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"


TOOL_SCHEMAS: Mapping[str, ToolSchema] = {
    schema.name: schema
    for schema in (
        ToolSchema(
            name="execute_bash",
            description="Run a shell command in the working directory and see its output.",
            parameters={"command": ParameterSchema(description="The command.", required=True)},
        ),
        ToolSchema(
            name="str_replace_editor",
            description="View, create and edit files. An edit can be undone with undo_edit.",
            parameters={
                "command": ParameterSchema(
                    description="What to do.",
                    required=True,
                    choices=("view", "create", "str_replace", "insert", "undo_edit"),
                ),
                "path": ParameterSchema(description="File, relative to the working directory.", required=True),
                "file_text": ParameterSchema(description="create: the whole text of the new file."),
                "old_str": ParameterSchema(description="str_replace: text that occurs exactly once in the file."),
                "new_str": ParameterSchema(description="str_replace, insert: the text to put there."),
                "insert_line": ParameterSchema(
                    type="integer", description="insert: the text goes after this line; 0 puts it first."
                ),
                "view_range": ParameterSchema(
                    type="array", description="view: first and last line, for example [1, 20]; -1 is the last line."
                ),
            },
        ),
        ToolSchema(
            name="think",
            description="Write a thought down. Nothing happens.",
            parameters={"thought": ParameterSchema(description="The thought.", required=True)},
        ),
        ToolSchema(
            name=FINISH,
            description="End the work.",
            parameters={"message": ParameterSchema(description="What was done.")},
        ),
    )
}
"""The tools of the plain style, by name."""

_REFERENCE_BASH = ToolSchema(
    name="execute_bash",
    description="Run a command in a persistent bash: directory and variables last. The output ends with the exit code.",
    parameters={
        "command": ParameterSchema(description="The command; several may be joined by && or ;.", required=True),
        "is_input": ParameterSchema(
            description="Must be false: no running command takes input here.", choices=("true", "false")
        ),
        "timeout": ParameterSchema(
            type="number", description="Seconds after which the command is killed, where less than the usual limit."
        ),
    },
)


class PlainStyle:
    """Bare texts. Whoever uses a style cuts what is longer than allowed; it may be wiser and cut itself."""

    name = "plain"
    tools: Mapping[str, ToolSchema] = TOOL_SCHEMAS
    reports_repeated_commands = False
    """Whether a command that fails again, and says the same again, counts as a repeated failure."""

    def lines(self, text: str) -> list[str]:
        """Lines of a file with their ends, as `view_range` and `insert_line` count them."""
        return text.splitlines(keepends=True)

    def file(self, path: str, text: str, max_characters: int) -> str:
        """A whole file."""
        return text.removesuffix("\n") or "the file is empty"

    def part(self, path: str, lines: Sequence[str], first: int, last: int, max_characters: int) -> str:
        """Lines `first` to `last`, counted from 1."""
        return "\n".join("".join(line.splitlines()[:1]) for line in lines[first - 1 : last])

    def created(self, path: str, text: str) -> str:
        """A file was written anew."""
        return CREATED

    def edited(self, path: str, text: str, first: int, num_lines: int) -> str:
        """A file was changed; `num_lines` lines from `first` on are new."""
        return EDITED

    def undone(self, path: str) -> str:
        """The last edit of a file was taken back."""
        return UNDONE

    def not_found(self, path: str) -> str:
        """The text to replace is not there."""
        return NOT_FOUND

    def ambiguous(self, path: str, lines: Sequence[int]) -> str:
        """The text to replace begins in each of several lines."""
        return ambiguous(len(lines))

    def ran(self, result: ExecResult, timeout_s: float, max_characters: int) -> str:
        """A command has ended, or was ended after `timeout_s`."""
        output = result.output.removesuffix("\n")
        if result.timed_out:
            notice = f"error: timed out after {timeout_s:g} s, the processes were killed"
            return f"{shorten(output, max_characters - len(notice) - 1)}\n{notice}" if output else notice
        return output or f"no output, exit code {result.exit_code}"


class NumberedStyle(PlainStyle):
    """Texts with line numbers, surroundings and exit codes."""

    name = "numbered"
    tools: Mapping[str, ToolSchema] = {
        **TOOL_SCHEMAS,
        "execute_bash": _REFERENCE_BASH,
        "str_replace_editor": replace(
            TOOL_SCHEMAS["str_replace_editor"],
            description="View files with line numbers and directories, create and edit files in /testbed. "
            "The numbers do not belong to the text. An edit can be undone with undo_edit.",
        ),
    }
    reports_repeated_commands = True

    def lines(self, text: str) -> list[str]:
        """See `PlainStyle.lines`; numbers are those of grep and of tracebacks, whatever characters a line holds."""
        lines = [f"{line}\n" for line in text.split("\n")]
        last = lines.pop().removesuffix("\n")
        return [*lines, last] if last else lines

    def file(self, path: str, text: str, max_characters: int) -> str:
        """See `PlainStyle.file`."""
        lines = self.lines(text)
        return self.part(path, lines, 1, len(lines), max_characters) if lines else f"{path} is empty"

    def part(self, path: str, lines: Sequence[str], first: int, last: int, max_characters: int) -> str:
        """See `PlainStyle.part`."""
        title = f"{path}, {len(lines)} lines:"
        shown, room = [title], max_characters - len(title) - 80
        for number in range(first, last + 1):
            line = f"{number:>6}\t{lines[number - 1].rstrip(chr(10))}"
            if len(line) + 1 > room:
                if number == first:
                    shown.append(shorten(line, max(room, 1)))
                    number += 1
                if number <= last:
                    shown.append(f"[lines {number} to {last} are left out: ask for them with view_range]")
                break
            shown.append(line)
            room -= len(line) + 1
        return "\n".join(shown)

    def created(self, path: str, text: str) -> str:
        """See `PlainStyle.created`."""
        return f"created {path}, {len(self.lines(text))} lines"

    def edited(self, path: str, text: str, first: int, num_lines: int) -> str:
        """See `PlainStyle.edited`."""
        lines = self.lines(text)
        start, end = max(first - _LINES_AROUND, 1), min(first + num_lines - 1 + _LINES_AROUND, len(lines))
        numbered = [f"{number:>6}\t{lines[number - 1].rstrip(chr(10))}" for number in range(start, end + 1)]
        return "\n".join([f"edited {path}; it now reads:", *numbered]) if lines else f"edited {path}; it is empty"

    def undone(self, path: str) -> str:
        """See `PlainStyle.undone`."""
        return f"undone: the last edit of {path}"

    def not_found(self, path: str) -> str:
        """See `PlainStyle.not_found`."""
        return f"{NOT_FOUND} in {path}; it must be the file's text to the last space, without line numbers"

    def ambiguous(self, path: str, lines: Sequence[int]) -> str:
        """See `PlainStyle.ambiguous`."""
        places = ", ".join(map(str, lines[:_MAX_PLACES])) + (", ..." if len(lines) > _MAX_PLACES else "")
        return f"{ambiguous(len(lines))} in {path}, in lines {places}; take in more of its surroundings"

    def ran(self, result: ExecResult, timeout_s: float, max_characters: int) -> str:
        """See `PlainStyle.ran`."""
        end = f"[exit code {result.exit_code}]"
        if result.timed_out:
            end = f"{ERROR}timed out after {timeout_s:g} s, the processes were killed"
        output = result.output.removesuffix("\n")
        return f"{shorten(output, max(max_characters - len(end) - 40, 1))}\n{end}" if output else end


PLAIN = PlainStyle()
NUMBERED = NumberedStyle()
STYLES: Mapping[str, PlainStyle] = {style.name: style for style in (PLAIN, NUMBERED)}
"""Every style by the name that recipes give it."""
