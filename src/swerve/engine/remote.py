"""The remote engine: sessions over servers of vLLM, and weights that reach them as files.

    open() --> [waiting, FIFO] --> place, at the server with the fewest sessions
    generate() ---- the whole context ----> server ---- tokens, log-probabilities, weights version ----> completion
    refit() --> files in a folder of their own --> every server reads them, or is started anew on them
            --> each is told what they are called --> what is cached under another name is never used

A session stays with its server, whose prefix cache makes a turn cost its new tokens only. Which sessions share a batch
is the server's choice and follows from time, so that runs do not repeat to the last bit, as they do embedded.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from swerve.config.schema import Engine
from swerve.engine.errors import EngineError, RefitError
from swerve.engine.remote_http import HttpClient
from swerve.engine.remote_process import ServerProcess
from swerve.engine.remote_server import Answer, VllmServer
from swerve.types import Completion, FinishReason, Float32Array, SamplingParams, SwerveError


class VllmSession:
    """One conversation: implements `swerve.types.PolicySession`. Made by `VllmEngine.open`."""

    def __init__(self, engine: VllmEngine, server: VllmServer, session_id: str, seed: int) -> None:
        self._engine = engine
        self._server = server
        self.session_id = session_id
        """Unique among the open sessions."""
        self.tokens: list[int] = []
        """The whole context, sampled tokens included."""
        self._seed = seed
        self._running: asyncio.Task[None] | None = None
        self._aborted = False
        self.closed = False

    @property
    def url(self) -> str:
        """The server that has it."""
        return self._server.url

    async def generate(self, new_tokens: Sequence[int], sampling: SamplingParams) -> Completion:
        """Append `new_tokens` to the context, then sample until the end of the turn.

        Args:
            new_tokens: Token ids; at least one where the session is new.
            sampling: How to draw. At temperature 0 log-probabilities are those at 1.

        Returns:
            The completion; an empty one with reason CONTEXT where the new tokens leave no room.

        Raises:
            SwerveError: The session is closed, busy or empty.
            EngineError: The server failed, or sampled with other weights.
        """
        if self.closed or self._running is not None:
            state = "closed" if self.closed else "busy with another generate"
            raise SwerveError(f"engine: session {self.session_id} is {state}")
        if not self.tokens and not new_tokens:
            raise SwerveError(f"engine: session {self.session_id} has no tokens to continue from")
        self.tokens.extend(int(token) for token in new_tokens)
        room = self._engine.context_length - len(self.tokens)
        answer = Answer()
        if room <= 0:
            answer.finish_reason = FinishReason.CONTEXT
            return self._completion(answer)
        await self._sample(answer, sampling, min(room, sampling.max_new_tokens))
        if answer.finish_reason is FinishReason.LENGTH and room <= sampling.max_new_tokens:
            answer.finish_reason = FinishReason.CONTEXT
        self.tokens += answer.tokens
        return self._completion(answer)

    async def _sample(self, answer: Answer, sampling: SamplingParams, room: int) -> None:
        """Have the server fill the answer, or as much of it as there is when it is aborted."""
        self._aborted = False
        label = self._engine.label
        work = self._server.generate(
            self.tokens, sampling, room=room, seed=self._turn_seed(), salt=label, answer=answer
        )
        self._running = asyncio.ensure_future(work)
        try:
            await self._running
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not self._aborted or (task is not None and task.cancelling()):
                raise
            answer.finish_reason = FinishReason.ABORT
            return
        finally:
            self._running = None
        if answer.tokens and set(answer.versions) != {label}:
            raise EngineError(
                f"{self.url}: tokens were sampled with weights {', '.join(answer.versions) or 'without a name'}, "
                f"not {label}: the server was started anew, or is another run's, too"
            )

    def _turn_seed(self) -> int:
        """A seed of this turn's own, since a server begins each with a new generator: 0 to 2**63 - 1."""
        name = f"{self._seed}\n{len(self.tokens)}"
        return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1

    def _completion(self, answer: Answer) -> Completion:
        assert answer.finish_reason is not None
        return Completion(
            tokens=tuple(answer.tokens),
            logprobs=tuple(answer.logprobs),
            finish_reason=answer.finish_reason,
            weights_version=self._engine.weights_version,
        )

    def abort(self) -> None:
        """End the running `generate` soon; it returns what it has, with reason ABORT. The session stays open."""
        if self._running is not None:
            self._aborted = True
            self._running.cancel()

    def close(self) -> None:
        """Give the place up, and end a running `generate` as `abort` does. Idempotent."""
        if not self.closed:
            self.closed = True
            self.abort()
            self._engine.release(self, self._server)


class VllmEngine:
    """Samples from the policy on servers of vLLM: implements `swerve.types.Policy` and `swerve.weights.RefitTarget`.

    Args:
        settings: Where the servers are, and how weights reach them.
        save: Writes weights as Hugging Face files into a directory that it makes.
        params: The weights to begin with, whatever the servers have.
        num_slots: Sessions that can be open at once, on all servers together.
        context_length: Tokens one session can hold.
        end_of_turn_id: Token that ends a completion.
        sample_tokens: Some tokens, with which servers are tried.
        weights_version: Number of the weights given.
    """

    def __init__(
        self,
        settings: Engine,
        save: Callable[[Path, Any], None],
        params: Any,
        *,
        num_slots: int,
        context_length: int,
        end_of_turn_id: int,
        sample_tokens: Sequence[int],
        weights_version: int = 0,
    ) -> None:
        self._restarts = settings.refit == "restart"
        self._tolerance = settings.probe_tolerance
        self._save = save
        self._first: Any = params
        self._context_length = context_length
        self._sample_tokens = tuple(sample_tokens)
        self._directory = Path(settings.weights_directory).absolute()
        self._run = secrets.token_hex(4)
        self._version = weights_version
        self._files: Path | None = None
        self._sessions: dict[str, VllmSession] = {}
        self._places = asyncio.Semaphore(num_slots)
        self._starting = threading.Lock()
        self._shut = False
        clients = [HttpClient(url, settings.request_timeout_s) for url in settings.urls]
        self._servers = [
            VllmServer(
                client,
                model=settings.model,
                end_of_turn_id=end_of_turn_id,
                load_timeout_s=settings.load_timeout_s,
            )
            for client in clients
        ]
        self._processes = {
            client.url: ServerProcess(
                settings.command,
                client,
                self._directory / f"server-{client.host}-{client.port}.log",
                settings.load_timeout_s,
            )
            for client in clients
            if settings.command
        }

    # --------------------------------------------------------------------------------------------------- sessions

    @property
    def context_length(self) -> int:
        """Tokens one session can hold."""
        return self._context_length

    @property
    def weights_version(self) -> int:
        """Number of the weights in use."""
        return self._version

    @property
    def label(self) -> str:
        """What the servers call them: the number, and a name of this engine's own."""
        return f"{self._version}-{self._run}"

    async def open(self, session_id: str, seed: int) -> VllmSession:
        """Begin a conversation; waits, first come first served, while all places are taken.

        Args:
            session_id: Unique among the open sessions.
            seed: Seeds this session's sampling and nothing else.
        """
        await self._places.acquire()
        try:
            if self._shut:
                raise EngineError("engine: it was shut down")
            if session_id in self._sessions:
                raise SwerveError(f"engine: session {session_id} is already open; close it or choose another id")
            server = min(self._servers, key=lambda one: (one.num_failures, one.num_sessions))
            session = self._sessions[session_id] = VllmSession(self, server, session_id, seed)
            server.num_sessions += 1
        except SwerveError:
            self._places.release()
            raise
        return session

    def release(self, session: VllmSession, server: VllmServer) -> None:
        """Take back the place of a session that closes."""
        del self._sessions[session.session_id]
        server.num_sessions -= 1
        self._places.release()

    # ---------------------------------------------------------------------------------------------------- weights

    def warmup(self, *, truncated: bool = False) -> None:
        """Have every server take the weights to begin with, once; may run in a thread of its own.

        Args:
            truncated: Of no effect: servers cut distributions without preparation.
        """
        with self._starting:
            first, self._first = self._first, None
            if first is not None:
                self._hand_over(first, self._version)

    def refit(self, params: Any, version: int) -> None:
        """Have every server take new weights. What was cached with older ones is never used again.

        Args:
            params: Tree of arrays; written before this returns.
            version: Greater than the present version.

        Raises:
            RefitError: The version does not rise, or sessions are open; the old weights stay.
            EngineError: A server could not take them; which have them is not known.
        """
        if version <= self._version:
            raise RefitError(f"refit: version {version} must be greater than the present {self._version}")
        if self._sessions:
            raise RefitError(f"refit to version {version}: {len(self._sessions)} sessions are open; close them")
        self._hand_over(params, version)

    def _hand_over(self, params: Any, version: int) -> None:
        label = f"{version}-{self._run}"
        before, self._files = self._files, self._directory / f"version_{label}"
        self._directory.mkdir(parents=True, exist_ok=True)
        self._save(self._files, params)
        self._on_all(lambda server: self._give(server, label, is_first=before is None))
        self._version = version
        if before is not None:
            shutil.rmtree(before, ignore_errors=True)

    def _give(self, server: VllmServer, label: str, *, is_first: bool) -> None:
        """Bring the files to one server."""
        files = self._files
        assert files is not None
        process = self._processes.get(server.url)
        starts = process is not None and (self._restarts or not process.runs)
        if process is not None and starts:
            process.stop()
            process.start(files)
        if starts or is_first:
            server.examine(self._sample_tokens, self._context_length)
        if not starts:
            server.reload(files)
        server.name_weights(label)

    def probe(self, tokens: Sequence[int]) -> Float32Array:
        """Score tokens with the weights in use at temperature 1, on every server.

        Args:
            tokens: At least two token ids.

        Returns:
            Log-probabilities float32 `[n]` of the first server; entry 0 is 0.

        Raises:
            EngineError: Servers differ among each other.
        """
        first, *others = self._on_all(lambda server: server.probe(tokens))
        for server, other in zip(self._servers[1:], others, strict=True):
            gap = float(np.max(np.abs(other - first)))
            if not gap <= self._tolerance:
                raise EngineError(
                    f"{server.url} and {self._servers[0].url} answer the probe differently, by {gap:.2e} nats (limit "
                    f"engine.probe_tolerance = {self._tolerance:g}): one serves other weights"
                )
        return first

    def _on_all(self, work: Callable[[VllmServer], Any]) -> list[Any]:
        """Do something with all servers at once; the first failure is raised once all have ended."""
        with ThreadPoolExecutor(len(self._servers), thread_name_prefix="engine") as pool:
            return list(pool.map(work, self._servers))

    def shutdown(self) -> None:
        """Close all sessions, end the servers that were started here, remove the files. Idempotent."""
        self._shut = True
        for session in list(self._sessions.values()):
            session.close()
        with ThreadPoolExecutor(max(1, len(self._processes))) as pool:
            list(pool.map(ServerProcess.stop, self._processes.values()))
        for files in self._directory.glob(f"version_*-{self._run}"):
            shutil.rmtree(files, ignore_errors=True)
