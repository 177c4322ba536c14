"""The tools an agent may call, with the names and arguments of the reference agent, over any sandbox.

An observation that starts with `error: ` says that a call did nothing. Everything a tool says is text for the policy;
only a sandbox that is lost, or a machine that fails, is raised.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from swerve.agents.editor import CHANGES, StrReplaceEditor
from swerve.rendering import ParameterSchema, ToolCall, ToolSchema
from swerve.sandboxes import Sandbox

ERROR = "error: "
FINISH = "finish"

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
"""The tools on offer, by name."""


class Toolbox:
    """Runs the calls of one episode in its sandbox."""

    def __init__(self, sandbox: Sandbox, *, command_timeout_s: float, max_observation_characters: int) -> None:
        """Bind the tools to a sandbox.

        Args:
            sandbox: Of the episode.
            command_timeout_s: Wall-clock seconds of one command. No tool has a shorter limit of its own.
            max_observation_characters: Longer observations lose their middle, and say so.
        """
        self._sandbox = sandbox
        self._command_timeout_s = command_timeout_s
        self._max_characters = max_observation_characters
        self._editor = StrReplaceEditor(sandbox, command_timeout_s=command_timeout_s)
        self._failed: set[str] = set()
        self._tools: Mapping[str, Callable[[Mapping[str, Any]], Awaitable[str]]] = {
            "execute_bash": self._execute_bash,
            "str_replace_editor": self._editor.run,
            "think": self._think,
            FINISH: self._finish,
        }
        self.num_repeated_failures = 0
        """Calls that failed although the very same call had failed before and no file was edited since."""

    async def run(self, call: ToolCall) -> str:
        """Run one call and return its observation.

        Raises:
            SandboxLostError: The sandbox died.
        """
        observation = shorten(await self._tools[call.name](call.arguments), self._max_characters)
        if observation.startswith(ERROR) and call.name != "execute_bash":
            key = json.dumps([call.name, call.arguments], sort_keys=True)
            if key in self._failed:
                self.num_repeated_failures += 1
                observation += " (this very call has failed before)"
            self._failed.add(key)
        elif observation in CHANGES:
            self._failed.clear()
        return observation

    async def _execute_bash(self, arguments: Mapping[str, Any]) -> str:
        result = await self._sandbox.shell(arguments["command"], timeout_s=self._command_timeout_s)
        output = result.output.removesuffix("\n")
        if result.timed_out:
            notice = f"error: timed out after {self._command_timeout_s:g} s, the processes were killed"
            return f"{shorten(output, self._max_characters - len(notice) - 1)}\n{notice}" if output else notice
        return output or f"no output, exit code {result.exit_code}"

    async def _think(self, arguments: Mapping[str, Any]) -> str:
        return "noted"

    async def _finish(self, arguments: Mapping[str, Any]) -> str:
        return "finished"


def shorten(text: str, max_characters: int) -> str:
    """Cut a text in its middle to about `max_characters`, and say how much is missing."""
    if len(text) <= max_characters:
        return text
    half = max(max_characters // 2, 1)
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
