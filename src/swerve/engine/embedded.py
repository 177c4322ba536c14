"""The embedded engine: sessions, slots and the barrier that gathers them into rounds.

    open() --> [waiting, FIFO] --> slot --> generate() --> pending --+
                    ^                                                |  every open session is pending: a round
                    |  close() hands the slot on                     v
    event loop  ----+-----------------------------------------  jobs, ordered by session id
    worker thread                                               RoundRunner.run(params, jobs)
    event loop  <---------------------------------------------  completions, in the same order

All bookkeeping happens on the event loop's thread; all arrays belong to one worker thread, so sandboxes and
heartbeats go on while the device computes. A round starts when every open session has a pending `generate`. The
sessions of a round, their rows and the batch shapes therefore follow from the requests alone, never from timing, and
a run repeats exactly, provided that sessions are opened together, before anything that takes time, and closed as
soon as they have nothing more to ask: an open session that neither generates nor closes holds everybody up.
`max_wait_s` trades that repeatability for progress where clients are not under our control.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swerve import models
from swerve.engine.batching import check_sizes, default_batch_sizes
from swerve.engine.counters import EngineCounters, RoundCounters
from swerve.engine.errors import EngineError, RefitError
from swerve.engine.programs import DecoderModel, Params, Programs
from swerve.engine.rounds import Job, RoundRunner
from swerve.engine.sampling import seed_words
from swerve.types import Completion, FinishReason, Float32Array, SamplingParams, SwerveError


@dataclass(kw_only=True, slots=True, eq=False)
class _Request:
    """A pending `generate`; `job` is set while its round runs."""

    sampling: SamplingParams
    future: asyncio.Future[Completion]
    job: Job | None = None


class EngineSession:
    """One conversation: implements `swerve.types.PolicySession`. Made by `EmbeddedEngine.open`."""

    def __init__(self, engine: EmbeddedEngine, session_id: str, seed: int) -> None:
        self._engine = engine
        self.session_id = session_id
        """Unique among the open sessions."""
        self.seed = seed
        """Seeds this session's sampling."""
        self.tokens: list[int] = []
        """The whole context, sampled tokens included."""
        self.num_fed = 0
        self.fed_version = -1
        self.row: int | None = None
        self.request: _Request | None = None
        self.closed = False

    async def generate(self, new_tokens: Sequence[int], sampling: SamplingParams) -> Completion:
        """Append `new_tokens` to the context, then sample until the end of the turn.

        Args:
            new_tokens: Token ids; at least one where the session is new.
            sampling: How to draw; no combination compiles a program anew but the first that truncates.

        Returns:
            The completion; an empty one with reason CONTEXT where the new tokens leave no room.

        Raises:
            SwerveError: The arguments are wrong, or the session is closed or busy.
            EngineError: A round failed.
        """
        return await self._engine._generate(self, new_tokens, sampling)

    def abort(self) -> None:
        """End the running `generate` soon; it returns what it has, with reason ABORT. The session stays open."""
        self._engine._abort(self)

    def close(self) -> None:
        """Free the slot, and end a running `generate` as `abort` does. Idempotent."""
        self._engine._close_session(self)


class EmbeddedEngine:
    """Samples from the policy inside this process: implements `swerve.types.Policy`.

    Methods are called on one event loop's thread at a time, except `refit`, `probe`, `warmup` and `counters`, which
    any thread may call.

    Args:
        config: The model's configuration; its `vocab_size` bounds token ids.
        params: The model's parameters; copied.
        num_slots: Sessions that can be open at once.
        context_length: Tokens one session can hold.
        end_of_turn_id: Token that ends a completion.
        pad_id: Token in padding.
        weights_version: Number of the weights given.
        batch_sizes: Batch sizes to compile for, the largest `num_slots`; by default it and its halves. One size alone
            makes a session's tokens bit for bit independent of how many others there are.
        chunk_lengths: Lengths of the chunks in which given tokens are consumed. On a CPU a token costs the same in
            every length and each length compiles its own programs; accelerators want long ones, too.
        segment_steps: Most decode steps between two looks at aborts.
        max_wait_s: Seconds after which a round starts without the sessions that are not ready; `None` waits for all.
        model: Functions of the model.
    """

    def __init__(
        self,
        config: Any,
        params: Params,
        *,
        num_slots: int,
        context_length: int,
        end_of_turn_id: int,
        pad_id: int,
        weights_version: int = 0,
        batch_sizes: Sequence[int] | None = None,
        chunk_lengths: Sequence[int] = (16,),
        segment_steps: int = 32,
        max_wait_s: float | None = None,
        model: DecoderModel = models,
    ) -> None:
        if num_slots < 1 or context_length < 2 or segment_steps < 1:
            raise SwerveError("engine: num_slots and segment_steps must be at least 1, context_length at least 2")
        sizes = check_sizes(batch_sizes or default_batch_sizes(num_slots), num_slots, "batch_sizes")
        self._batch_sizes = sizes
        lengths = check_sizes(chunk_lengths, None, "chunk_lengths")
        self._vocab_size: int = config.vocab_size
        self._num_slots = num_slots
        self._context_length = context_length
        self._end_of_turn_id = end_of_turn_id
        self._max_wait_s = max_wait_s
        self._model = model
        self._weights = (self._own(params), weights_version)
        self._config = config
        self._segment_steps = segment_steps
        self._programs: dict[int, Programs] = {}
        self._runner = RoundRunner(
            self._programs_of,
            num_slots=num_slots,
            context_length=context_length,
            batch_sizes=sizes,
            chunk_lengths=lengths,
            pad_id=pad_id,
        )
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="engine")
        self._sessions: dict[str, EngineSession] = {}
        self._waiting: deque[tuple[EngineSession, asyncio.Future[None]]] = deque()
        self._free_rows = list(range(num_slots))
        self._round: list[EngineSession] | None = None
        self._check_scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._failure: BaseException | None = None
        self._shut = False
        self._work = RoundCounters()
        self._num = {"rounds": 0, "completions": 0, "aborted": 0, "refits": 0, "peak": 0}

    # --------------------------------------------------------------------------------------------- public

    @property
    def context_length(self) -> int:
        """Tokens one session can hold."""
        return self._context_length

    @property
    def weights_version(self) -> int:
        """Number of the weights in use."""
        return self._weights[1]

    async def open(self, session_id: str, seed: int) -> EngineSession:
        """Begin a conversation; waits, first come first served, while all slots are taken.

        Args:
            session_id: Unique among the open and waiting sessions; rounds are ordered by it.
            seed: Seeds this session's sampling, modulo 2^64, and nothing else.

        Returns:
            The session, which holds a slot until it is closed.
        """
        self._check_usable()
        if session_id in self._sessions or any(session.session_id == session_id for session, _ in self._waiting):
            raise SwerveError(f"engine: session {session_id} is already open; close it or choose another id")
        session = EngineSession(self, session_id, seed)
        if len(self._sessions) < self._num_slots:
            self._admit(session)
            return session
        future = asyncio.get_running_loop().create_future()
        self._waiting.append((session, future))
        try:
            await future
        except asyncio.CancelledError:
            if self._sessions.get(session_id) is session:  # granted and cancelled at once
                session.close()
            else:
                self._waiting = deque(entry for entry in self._waiting if entry[0] is not session)
            raise
        return session

    def refit(self, params: Params, version: int, *, allow_open: bool = False) -> None:
        """Put new weights in place; rounds that start from now on use them. State of older weights is never used again.

        Args:
            params: Tree of the same structure, shapes and dtypes; copied.
            version: Greater than the present version.
            allow_open: Whether sessions may be open; their whole context is consumed anew, with the new weights.

        Raises:
            RefitError: The weights were refused; the old ones stay.
        """
        current, current_version = self._weights
        if version <= current_version:
            raise RefitError(f"refit: version {version} must be greater than the present {current_version}")
        if self._sessions and not allow_open:
            raise RefitError(
                f"refit to version {version}: {len(self._sessions)} sessions are open; "
                "close them or pass allow_open=True"
            )
        new = self._own(params)
        _check_like(current, new, version)
        self._weights = (new, version)
        self._num["refits"] += 1

    def probe(self, tokens: Sequence[int]) -> Float32Array:
        """Score tokens with the weights in use, token by token on a state of its own: proof of which weights answer.

        Args:
            tokens: At least two token ids, `context_length` at most.

        Returns:
            Log-probabilities at temperature 1, float32 `[n]`: entry t is of `tokens[t]` given those before it, and
            entry 0 is 0.
        """
        self._check_tokens(tokens)
        if not 2 <= len(tokens) <= self._context_length:
            raise SwerveError(f"engine: a probe takes 2 to {self._context_length} tokens, got {len(tokens)}")
        length = max(16, 1 << (len(tokens) - 1).bit_length())
        padded = np.zeros(length, np.int32)
        padded[: len(tokens)] = tokens
        log_probs = next(iter(self._programs.values())).score(length)(self._weights[0], padded, np.int32(len(tokens)))
        return np.asarray(log_probs)[: len(tokens)]

    def warmup(self, num_rows: Sequence[int] | None = None, *, truncated: bool = False, num_threads: int = 2) -> None:
        """Compile ahead of the first round; may run in a thread of its own, beside rounds.

        Args:
            num_rows: Numbers of rows to be ready for; by default every batch size.
            truncated: Compile the decode programs for requests with `top_p` or `top_k` instead of the plain ones.
            num_threads: Programs to compile at once.
        """
        rows = self._batch_sizes if num_rows is None else num_rows
        self._runner.warm_up(rows, truncated=truncated, num_threads=num_threads)

    def _programs_of(self, capacity: int) -> Programs:
        """The programs for rows of a capacity, made where they are first asked for."""
        if capacity not in self._programs:
            self._programs[capacity] = Programs(
                self._model,
                self._config,
                self._weights[0],
                num_slots=self._num_slots,
                capacity=capacity,
                segment_steps=self._segment_steps,
            )
        return self._programs[capacity]

    @property
    def compile_seconds(self) -> dict[str, float]:
        """Wall-clock seconds that each program took to compile, by name."""
        return {
            name if capacity == min(self._programs) else f"{name} of {capacity} tokens": seconds
            for capacity, programs in self._programs.items()
            for name, seconds in programs.compile_seconds.items()
        }

    def counters(self) -> EngineCounters:
        """What the engine has done so far."""
        return EngineCounters(
            num_slots=self._num_slots,
            open_sessions=len(self._sessions),
            peak_open_sessions=self._num["peak"],
            waiting_sessions=len(self._waiting),
            num_rounds=self._num["rounds"],
            num_completions=self._num["completions"],
            num_aborted=self._num["aborted"],
            num_refits=self._num["refits"],
            weights_version=self.weights_version,
            work=self._work,
        )

    def shutdown(self) -> None:
        """Abort everything, close all sessions, end the worker thread. Idempotent."""
        self._shut = True
        waiting, self._waiting = list(self._waiting), deque()
        for _, future in waiting:
            _resolve(future, error=EngineError("engine: it was shut down"))
        for session in list(self._sessions.values()):
            session.close()
        self._worker.shutdown(wait=True)

    # ----------------------------------------------------------------------------------------- sessions

    async def _generate(
        self, session: EngineSession, new_tokens: Sequence[int], sampling: SamplingParams
    ) -> Completion:
        self._check_usable()
        if session.closed or session.request is not None:
            state = "closed" if session.closed else "busy with another generate"
            raise SwerveError(f"engine: session {session.session_id} is {state}")
        self._check_tokens(new_tokens)
        _check_sampling(sampling)
        if not session.tokens and not new_tokens:
            raise SwerveError(f"engine: session {session.session_id} has no tokens to continue from")
        session.tokens.extend(int(token) for token in new_tokens)
        if len(session.tokens) >= self._context_length:
            self._num["completions"] += 1
            return self._completion(session, (), (), FinishReason.CONTEXT)
        loop = asyncio.get_running_loop()
        request = session.request = _Request(sampling=sampling, future=loop.create_future())
        if self._max_wait_s is not None and self._timer is None:
            self._timer = loop.call_later(self._max_wait_s, self._start_late_round)
        self._schedule_check(loop)
        try:
            return await request.future
        except asyncio.CancelledError:
            self._abort(session)
            raise

    def _abort(self, session: EngineSession) -> None:
        request = session.request
        if request is None:
            return
        if request.job is not None:
            request.job.aborted = True
            return
        session.request = None
        self._num["completions"] += 1
        self._num["aborted"] += 1
        _resolve(request.future, self._completion(session, (), (), FinishReason.ABORT))
        self._schedule_check(request.future.get_loop())

    def _close_session(self, session: EngineSession) -> None:
        if session.closed:
            return
        session.closed = True
        self._abort(session)
        if session.request is None:  # otherwise its row computes; the slot is freed when the round ends
            self._release(session)

    def _admit(self, session: EngineSession) -> None:
        self._sessions[session.session_id] = session
        self._num["peak"] = max(self._num["peak"], len(self._sessions))

    def _release(self, session: EngineSession) -> None:
        """Free a closed session's slot, hand it to whoever waits longest, and see whether a round can start."""
        if self._sessions.get(session.session_id) is not session:
            return
        del self._sessions[session.session_id]
        if session.row is not None:
            bisect.insort(self._free_rows, session.row)
            session.row = None
        while self._waiting and len(self._sessions) < self._num_slots:
            waiter, future = self._waiting.popleft()
            if not future.done():
                self._admit(waiter)
                _resolve(future, None)
        pending = next((s.request for s in self._sessions.values() if s.request is not None), None)
        if pending is not None:
            self._schedule_check(pending.future.get_loop())

    # ------------------------------------------------------------------------------------------- rounds

    def _schedule_check(self, loop: asyncio.AbstractEventLoop) -> None:
        """Look at the barrier after everything that is ready to run now has run, so that a burst joins one round."""
        if not self._check_scheduled and not loop.is_closed():
            self._check_scheduled = True
            loop.call_soon(self._check_barrier, loop)

    def _check_barrier(self, loop: asyncio.AbstractEventLoop) -> None:
        self._check_scheduled = False
        pending = [session for session in self._sessions.values() if session.request is not None]
        if self._round is None and pending and len(pending) == len(self._sessions):
            self._start_round(loop, pending)

    def _start_late_round(self) -> None:
        """Start without those that are not ready, `max_wait_s` after the first that was."""
        self._timer = None
        pending = [session for session in self._sessions.values() if session.request is not None]
        if self._round is None and pending:
            self._start_round(asyncio.get_running_loop(), pending)

    def _start_round(self, loop: asyncio.AbstractEventLoop, sessions: Sequence[EngineSession]) -> None:
        """Give new sessions their rows, make the jobs, and hand them to the worker."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        ordered = sorted(sessions, key=lambda session: session.session_id)
        params, version = self._weights
        jobs = [self._make_job(session, version) for session in ordered]
        self._round = ordered
        work = self._worker.submit(self._runner.run, params, jobs)
        work.add_done_callback(lambda done: self._call_on_loop(loop, lambda: self._finish_round(loop, done, version)))

    def _make_job(self, session: EngineSession, version: int) -> Job:
        request = session.request
        assert request is not None
        if session.row is None:
            session.row = self._free_rows.pop(0)
        if session.fed_version != version:
            session.num_fed, session.fed_version = 0, version
        room = min(request.sampling.max_new_tokens, self._context_length - len(session.tokens))
        request.job = Job(
            row=session.row,
            tokens=list(session.tokens),
            num_fed=session.num_fed,
            seed=seed_words(session.seed),
            sampling=request.sampling,
            stop=self._end_of_turn_id,
            room=room,
        )
        return request.job

    def _finish_round(self, loop: asyncio.AbstractEventLoop, done: Future[RoundCounters], version: int) -> None:
        """Hand out a round's completions in order, free the slots of sessions closed meanwhile, look for the next."""
        sessions, self._round = self._round or [], None
        error = done.exception()
        if error is not None:
            self._fail(error)
            return
        self._work += done.result()
        self._num["rounds"] += 1
        for session in sessions:
            request, session.request = session.request, None
            assert request is not None
            job = request.job
            assert job is not None
            assert job.finish_reason is not None
            session.tokens, session.num_fed = job.tokens, job.num_fed
            new_tokens = job.tokens[len(job.tokens) - len(job.logprobs) :]
            completion = Completion(
                tokens=tuple(new_tokens),
                logprobs=tuple(job.logprobs),
                finish_reason=job.finish_reason,
                weights_version=version,
            )
            self._num["completions"] += 1
            self._num["aborted"] += job.finish_reason is FinishReason.ABORT
            _resolve(request.future, completion)
        for session in sessions:
            if session.closed:
                self._release(session)
        if self._max_wait_s is not None and self._timer is None and not loop.is_closed():
            self._timer = loop.call_later(self._max_wait_s, self._start_late_round)
        self._schedule_check(loop)

    def _fail(self, error: BaseException) -> None:
        """Tell every session, pending or waiting, why the engine is dead."""
        self._failure = error
        for session in self._sessions.values():
            request, session.request = session.request, None
            if request is not None:
                _resolve(request.future, error=self._error())
        waiting, self._waiting = list(self._waiting), deque()
        for _, future in waiting:
            _resolve(future, error=self._error())

    def _call_on_loop(self, loop: asyncio.AbstractEventLoop, function: Callable[[], None]) -> None:
        """Run a function on the loop's thread, or here where the loop has ended and nobody else can be waiting."""
        try:
            loop.call_soon_threadsafe(function)
        except RuntimeError:
            function()

    # ------------------------------------------------------------------------------------------- checks

    def _completion(
        self, session: EngineSession, tokens: tuple[int, ...], logprobs: tuple[float, ...], reason: FinishReason
    ) -> Completion:
        return Completion(tokens=tokens, logprobs=logprobs, finish_reason=reason, weights_version=self.weights_version)

    def _own(self, params: Params) -> Params:
        """A copy that nobody else can change, donate or delete, in the layout that decodes fastest."""
        here = jax.device_put(params, jax.devices()[0])  # a trainer's may lie on many devices
        return jax.tree.map(lambda x: jnp.array(x, copy=True), self._model.unstack_blocks(here))

    def _error(self) -> EngineError:
        error = EngineError(f"engine: a round failed: {type(self._failure).__name__}: {self._failure}")
        error.__cause__ = self._failure
        return error

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._error()
        if self._shut:
            raise EngineError("engine: it was shut down")

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if not 0 <= token < self._vocab_size:
                raise SwerveError(f"engine: token id {token} is outside the vocabulary of {self._vocab_size}")


def _check_like(current: Params, params: Params, version: int) -> None:
    """Refuse weights that differ in structure, shape or dtype, or that are not finite."""
    old, new = jax.tree_util.tree_leaves_with_path(current), jax.tree_util.tree_leaves_with_path(params)
    if [path for path, _ in old] != [path for path, _ in new]:
        names = {jax.tree_util.keystr(path) for path, _ in old} ^ {jax.tree_util.keystr(path) for path, _ in new}
        raise RefitError(f"refit to version {version}: parameters differ in name: {', '.join(sorted(names))}")
    for (path, a), (_, b) in zip(old, new, strict=True):
        name = jax.tree_util.keystr(path)
        if a.shape != b.shape or a.dtype != b.dtype:
            raise RefitError(f"refit to version {version}: {name} is {b.dtype}{b.shape}, not {a.dtype}{a.shape}")
        if jnp.issubdtype(b.dtype, jnp.floating) and not bool(jnp.isfinite(b).all()):
            raise RefitError(f"refit to version {version}: {name} holds values that are not finite")


def _check_sampling(sampling: SamplingParams) -> None:
    """Refuse settings that mean nothing."""
    checks = (
        ("temperature", sampling.temperature, 0.0 <= sampling.temperature < float("inf")),
        ("top_p", sampling.top_p, 0.0 < sampling.top_p <= 1.0),
        ("top_k", sampling.top_k, sampling.top_k >= 0),
        ("max_new_tokens", sampling.max_new_tokens, sampling.max_new_tokens >= 1),
    )
    for name, value, right in checks:
        if not right:
            raise SwerveError(f"sampling: {name} is {value}, out of its range")


def _resolve(future: asyncio.Future[Any], result: Any = None, *, error: BaseException | None = None) -> None:
    """Set a future's result or error, unless it is done or its event loop has ended."""
    if future.done() or future.get_loop().is_closed():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
