"""The tools an agent may call, with the names and arguments of the reference agent, over any sandbox.

An observation that starts with `error: ` says that a call did nothing. Everything a tool says is text for the policy;
only a sandbox that is lost, or a machine that fails, is raised.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from swerve.agents.editor import StrReplaceEditor
from swerve.agents.styles import ERROR, FINISH, PLAIN, PlainStyle, shorten
from swerve.rendering import ToolCall
from swerve.sandboxes import Sandbox

REPEATED = " (this very call has failed before)"

_Outcome = tuple[str, str | None]
"""The observation, and for a call that failed what else must be alike in a repetition of it."""


class Toolbox:
    """Runs the calls of one episode in its sandbox."""

    def __init__(
        self,
        sandbox: Sandbox,
        *,
        command_timeout_s: float,
        max_observation_characters: int,
        style: PlainStyle = PLAIN,
    ) -> None:
        """Bind the tools to a sandbox.

        Args:
            sandbox: Of the episode.
            command_timeout_s: Wall-clock seconds of one command. No tool has a shorter limit of its own.
            max_observation_characters: Longer observations are cut, and say so.
            style: Which arguments tools take, and how they speak.
        """
        self.style = style
        self._sandbox = sandbox
        self._command_timeout_s = command_timeout_s
        self._max_characters = max_observation_characters
        self._editor = StrReplaceEditor(
            sandbox,
            command_timeout_s=command_timeout_s,
            max_observation_characters=max_observation_characters,
            style=style,
        )
        self._failed: set[str] = set()
        self._num_changes = 0
        self._tools: Mapping[str, Callable[[Mapping[str, Any]], Awaitable[_Outcome]]] = {
            "execute_bash": self._execute_bash,
            "str_replace_editor": self._edit,
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
        observation, failure = await self._tools[call.name](call.arguments)
        observation = shorten(observation, self._max_characters)
        if self._editor.num_changes > self._num_changes:
            self._num_changes = self._editor.num_changes
            self._failed.clear()
        if failure is not None:
            key = json.dumps([call.name, call.arguments, failure], sort_keys=True)
            if key in self._failed:
                self.num_repeated_failures += 1
                observation += REPEATED
            self._failed.add(key)
        return observation

    async def _execute_bash(self, arguments: Mapping[str, Any]) -> _Outcome:
        if arguments.get("is_input") == "true":
            return f"{ERROR}no command is waiting for input: commands get none, and end or are killed", ""
        timeout_s = min(arguments.get("timeout", self._command_timeout_s), self._command_timeout_s)
        if not timeout_s > 0:
            return f"{ERROR}timeout must be above 0", ""
        result = await self._sandbox.shell(arguments["command"], timeout_s=timeout_s)
        observation = self.style.ran(result, timeout_s, self._max_characters)
        failed = self.style.reports_repeated_commands and (result.timed_out or result.exit_code != 0)
        return observation, observation if failed else None

    async def _edit(self, arguments: Mapping[str, Any]) -> _Outcome:
        observation = await self._editor.run(arguments)
        return observation, "" if observation.startswith(ERROR) else None

    async def _think(self, arguments: Mapping[str, Any]) -> _Outcome:
        return "noted", None

    async def _finish(self, arguments: Mapping[str, Any]) -> _Outcome:
        return "finished", None
