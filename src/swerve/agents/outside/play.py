"""Episodes that a program plays: its conversation is recorded, its commands run in the episode's sandbox.

    Swerve process                                        the agent's program, one per episode
    OutsideAgents: one server for all    <--HTTP, key--   its OpenAI client     /v1/chat/completions
      key -> episode                     <--HTTP, key--   `docker` on its PATH  /sandbox/run, exec, stop
        Recorder  -> policy session
        Container -> sandbox
      Program     ----------- starts, kills ---------->   supervisor, program, whatever that starts

The program itself runs as whoever runs Swerve does, outside of any sandbox: it is the operator's, not the policy's.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import secrets
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from swerve.agents.outside.chat import MODEL, RefusedError, json_object, read_chat
from swerve.agents.outside.container import Container
from swerve.agents.outside.http import HttpServer, Request, Response, json_response
from swerve.agents.outside.program import Program
from swerve.agents.outside.recorder import Recorder
from swerve.agents.transcript import Transcript
from swerve.rendering import ConversationRenderer, Template, Tokenizer, ToolSchema
from swerve.sandboxes import WORKDIR, Sandbox
from swerve.types import EpisodeStatus, Limits, OutsideRequests, PolicySession, SamplingParams, SwerveError, Task

_DOCKER = Path(__file__).with_name("docker_client.py")
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class AgentProgramError(SwerveError):
    """The agent's program did not do its part."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Episode:
    """What a key opens, and the requests to its sandbox that are being answered."""

    recorder: Recorder
    container: Container
    commands: set[asyncio.Task[object]] = field(default_factory=set)

    async def close(self) -> None:
        """Stop whatever still goes on; nothing changes the transcript or the sandbox afterwards."""
        commands = list(self.commands)
        for command in commands:
            command.cancel()
        await asyncio.gather(*commands, return_exceptions=True)
        await self.recorder.close()


class OutsideAgents:
    """Plays episodes with a program of the user's; an asynchronous context manager, and one server for all of them."""

    def __init__(self, command: str, tokenizer: Tokenizer, template: Template) -> None:
        """Set the program.

        Args:
            command: Its command line; `{task_file}`, `{base_url}`, `{model}` and `{docker}` stand for an episode's.
            tokenizer: Of the policy.
            template: Of the conversations.
        """
        self._words = shlex.split(command)
        self._tokenizer = tokenizer
        self._template = template
        self._renderers: dict[str, ConversationRenderer] = {}
        self._episodes: dict[str, _Episode] = {}
        self._server = HttpServer(self._handle)
        self._renderer_for(())

    async def __aenter__(self) -> OutsideAgents:
        """Begin to listen."""
        await self._server.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening."""
        await self._server.__aexit__()

    @property
    def base_url(self) -> str:
        """Where OpenAI clients look."""
        return f"http://127.0.0.1:{self._server.port}/v1"

    async def play(
        self,
        task: Task,
        session: PolicySession,
        sandbox: Sandbox,
        transcript: Transcript,
        *,
        sampling: SamplingParams,
        limits: Limits,
        context_length: int,
    ) -> EpisodeStatus:
        """Have the program play an episode; whoever calls bounds its time, and cancelling kills the program.

        Args:
            task: What to repair; the program is told its statement and nothing of its tests.
            session: A fresh conversation with the policy.
            sandbox: Of the episode.
            transcript: Filled as the episode goes on.
            sampling: How the policy's tokens are drawn.
            limits: Of the episode.
            context_length: Tokens the conversation may hold.

        Returns:
            SUCCEEDED (the program ended by itself), MAX_TURNS, MAX_CONTEXT_LIMIT_REACHED, or CANCELLED.

        Raises:
            AgentProgramError: The program failed, or never asked the policy.
            RefusedError: It asked for what it cannot have, for example another history.
        """
        transcript.requests = OutsideRequests()
        recorder = Recorder(
            session,
            self._renderer_for,
            transcript,
            sampling=sampling,
            max_turns=limits.max_turns,
            context_length=context_length,
        )
        container = Container(sandbox, transcript, image=task.image, command_timeout_s=limits.command_timeout_s)
        key = secrets.token_urlsafe(32)
        start = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="swerve-agent-", ignore_cleanup_errors=True) as folder:
            episode = self._episodes[key] = _Episode(recorder=recorder, container=container)
            try:
                argv, environment = self._invocation(Path(folder), key, task, limits)
                return await _run(argv, environment, recorder)
            finally:
                del self._episodes[key]
                await episode.close()
                spent = transcript.seconds
                own = time.perf_counter() - start - spent.get("generate", 0.0) - spent.get("tools", 0.0)
                spent["agent"] = max(own, 0.0)

    def _invocation(self, folder: Path, key: str, task: Task, limits: Limits) -> tuple[list[str], dict[str, str]]:
        """The program's words and variables, once its files are written."""
        for name in ("bin", "home", "tmp"):
            (folder / name).mkdir()
        connection, docker, task_file = folder / "connection.json", folder / "bin" / "docker", folder / "task.json"
        connection.touch(mode=0o600)
        connection.write_text(json.dumps({"port": self._server.port, "key": key}))
        docker.write_text(
            f'#!/bin/sh\nexec {shlex.join([sys.executable, "-I", "-S", str(_DOCKER), str(connection)])} "$@"\n'
        )
        docker.chmod(0o700)
        task_file.write_text(json.dumps(_told(task, limits), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        values = {"task_file": task_file, "base_url": self.base_url, "model": MODEL, "docker": docker}
        environment = {
            "PATH": f"{docker.parent}:{_PATH}",
            "HOME": str(folder / "home"),
            "TMPDIR": str(folder / "tmp"),
            "LANG": "C.UTF-8",
            "OPENAI_BASE_URL": self.base_url,
            "OPENAI_API_KEY": key,
            "SWERVE_TASK_FILE": str(task_file),
            "SWERVE_DOCKER": str(docker),
        }
        return [word.format_map(values) for word in self._words], environment

    def _renderer_for(self, tools: tuple[ToolSchema, ...]) -> ConversationRenderer:
        key = json.dumps([tool.to_openai() for tool in tools])
        if key not in self._renderers:
            self._renderers[key] = ConversationRenderer(self._tokenizer, self._template, tools=tools)
        return self._renderers[key]

    # ---------------------------------------------------------------------------------------------------- requests

    async def _handle(self, request: Request) -> Response:
        episode = self._opened_by(request.headers.get("authorization", ""))
        if episode is None:
            return RefusedError(
                "this key opens no episode that is played", status=401, code="invalid_api_key"
            ).response()
        try:
            return await self._route(request, episode)
        except RefusedError as refusal:
            if request.path.startswith("/v1/"):
                episode.recorder.refuse(refusal)
            return refusal.response()
        except Exception as error:  # of the policy, the sandbox, or a bug: the episode ends with it, whatever it is
            episode.recorder.fail(error)
            return RefusedError("the episode is over", status=500, code="episode_over").response()

    def _opened_by(self, authorization: str) -> _Episode | None:
        """The episode of a key; every key is compared, so that time tells nothing."""
        given = authorization.removeprefix("Bearer ").encode()
        found = None
        for key, episode in self._episodes.items():
            if hmac.compare_digest(key.encode(), given):
                found = episode
        return found

    async def _route(self, request: Request, episode: _Episode) -> Response:
        match request.method, request.path:
            case "GET", "/v1/models":
                model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "swerve"}
                return json_response({"object": "list", "data": [model]})
            case "POST", "/v1/chat/completions":
                asked = read_chat(json_object(request), episode.recorder.sampling)
                return (await episode.recorder.answer(asked)).response(asked)
            case "POST", path if path.startswith("/sandbox/"):
                command = asyncio.current_task()
                assert command is not None
                episode.commands.add(command)
                try:
                    answer = await episode.container.handle(path.removeprefix("/sandbox/"), json_object(request))
                finally:
                    episode.commands.discard(command)
                return json_response(answer)
        raise RefusedError(
            f"{request.method} {request.path}: there is no such thing here", status=404, code="not_found"
        )


async def _run(argv: list[str], environment: dict[str, str], recorder: Recorder) -> EpisodeStatus:
    """Run the program until it ends or its episode does; nothing of it is left then."""
    program = await Program.start(argv, environment)
    waiting = asyncio.create_task(program.wait(), name="wait for an outside agent")
    try:
        await asyncio.wait([waiting, recorder.ended], return_when=asyncio.FIRST_COMPLETED)
        if recorder.ended.done():
            return recorder.ended.result()
        code = waiting.result()
        if recorder.status is not EpisodeStatus.SUCCEEDED:
            return recorder.status
        said = f": {program.last_line}" if program.last_line else ""
        if code != 0:
            raise AgentProgramError(f"the agent's program ended with exit code {code}{said}")
        if recorder.num_answers == 0:
            raise AgentProgramError(f"the agent's program ended without asking the policy anything{said}")
        return EpisodeStatus.SUCCEEDED
    finally:
        await asyncio.shield(asyncio.ensure_future(program.close()))
        waiting.cancel()


def _told(task: Task, limits: Limits) -> dict[str, object]:
    """What the program is told of a task: nothing that its sandbox does not show."""
    return {
        "id": task.id,
        "problem_statement": task.problem_statement,
        "image": task.image,
        "workdir": WORKDIR,
        "model": MODEL,
        "max_turns": limits.max_turns,
        "command_timeout_s": limits.command_timeout_s,
        "episode_timeout_s": limits.episode_timeout_s,
    }
