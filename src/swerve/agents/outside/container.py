"""An episode's sandbox in the shape of a container that an agent starts, runs commands in, and removes.

What the agent removes stays: its work is still to be collected. Every command is a process of its own, as with Docker;
directory and variables are given with each.
"""

from __future__ import annotations

import base64
import shlex
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swerve.agents.outside.chat import RefusedError
from swerve.agents.transcript import Transcript
from swerve.sandboxes import WORKDIR, Sandbox

MAX_INPUT_BYTES = 64 << 10
"""Of standard input of one command: it travels in the command line."""


@dataclass(slots=True)
class _State:
    """What `run` asked for."""

    names: frozenset[str]
    workdir: str
    environment: Mapping[str, str]


class Container:
    """One episode's."""

    def __init__(self, sandbox: Sandbox, transcript: Transcript, *, image: str, command_timeout_s: float) -> None:
        """Wrap a sandbox; nothing is started by it.

        Args:
            sandbox: Of the episode.
            transcript: Gets the seconds that commands take.
            image: The only image that can be run.
            command_timeout_s: Wall-clock seconds of one command.
        """
        self._sandbox = sandbox
        self._transcript = transcript
        self._image = image
        self._command_timeout_s = command_timeout_s
        self._state: _State | None = None
        self._was_stopped = False

    async def handle(self, operation: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out `run`, `exec` or `stop` as the command-line client asks for it.

        Raises:
            RefusedError: It cannot be; the message is for the client's standard error.
            SandboxLostError: The sandbox died.
        """
        match operation:
            case "run":
                return self._run(body)
            case "exec":
                return await self._exec(body)
            case "stop":
                self._named(str(body.get("container", "")))
                self._state, self._was_stopped = None, True
                return {}
        raise RefusedError(f"{operation}: there is no such operation", status=404)

    def _run(self, body: Mapping[str, Any]) -> dict[str, Any]:
        if body.get("image") != self._image:
            raise RefusedError(f"image {body.get('image')}: this episode's is {self._image}", status=404)
        if self._state is not None or self._was_stopped:
            raise RefusedError("an episode has one container, and it has been run", status=409)
        key = uuid.uuid4().hex * 2
        names = {key, key[:12], str(body.get("name") or key)}
        self._state = _State(frozenset(names), str(body.get("workdir") or WORKDIR), dict(body.get("environment") or {}))
        return {"id": key}

    def _named(self, name: str) -> _State:
        if self._state is None or name not in self._state.names:
            raise RefusedError(f"No such container: {name}", status=404)
        return self._state

    async def _exec(self, body: Mapping[str, Any]) -> dict[str, Any]:
        state = self._named(str(body.get("container", "")))
        argv = body.get("argv")
        if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
            raise RefusedError("exec needs a command")
        environment = {**state.environment, **(body.get("environment") or {})}
        variables = [f"{key}={value}" for key, value in environment.items()]
        workdir = str(body.get("workdir") or state.workdir)
        command = shlex.join(["env", *variables, *argv] if variables else argv)
        if given := body.get("input"):
            if len(base64.b64decode(given)) > MAX_INPUT_BYTES:
                raise RefusedError(f"exec -i: standard input is longer than {MAX_INPUT_BYTES} bytes")
            command = f"printf %s {shlex.quote(given)} | base64 -d | {command}"
        start = time.perf_counter()
        try:
            result = await self._sandbox.exec(f"cd {shlex.quote(workdir)} && {command}", self._command_timeout_s)
        finally:
            self._transcript.add_seconds("tools", start)
        return {
            "output": result.output,
            "exit_code": result.exit_code,
            "timed_out_s": self._command_timeout_s if result.timed_out else None,
        }
