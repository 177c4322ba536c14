"""One round on the device: every job's new tokens are consumed, then all jobs sample until each has ended.

    jobs --> group equal contexts
         --> take one row of each --> feed chunks --> put, a copy to every row of the group
         --> take the rows that live --> decode a segment --> put
    Both lines begin again in a smaller batch once few enough rows have work left.

The full state has one row per slot and stays on the device; its rows hold as many tokens as a round has needed so far,
doubled up to the context's length, so that a long context costs memory only once somebody fills it. Work happens in the
smallest compiled batch that holds the rows concerned, a number that depends on the jobs alone. Between a session's
turns its row holds all its tokens but the last: that one opens the next decode step or joins the next chunk, and costs
nothing extra.

Used by one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from swerve.engine.batching import batch_size_for, group_by_key, plan_chunks, smaller_batch_size
from swerve.engine.counters import RoundCounters
from swerve.engine.programs import DecodeRows, Params, Programs, State
from swerve.engine.sampling import SamplingRows
from swerve.types import FinishReason, SamplingParams

FIRST_CAPACITY = 512
"""Tokens that rows hold at first, unless the context is shorter."""


@dataclass(kw_only=True, slots=True, eq=False)
class Job:
    """One session's part in a round, filled in by the round.

    Attributes:
        row: Slot that holds the session's state.
        tokens: The whole context; sampled tokens are appended.
        num_fed: Leading tokens that the row's state holds; 0 empties the row first.
        seed: The session's seed as two 32-bit words.
        sampling: How to draw.
        stop: Token that ends the turn.
        room: Tokens that may still be generated, at least 1.
        aborted: Set by another thread to end the job at the next segment.
        logprobs: One per sampled token.
        finish_reason: Why it ended; `None` while it runs.
    """

    row: int
    tokens: list[int]
    num_fed: int
    seed: tuple[int, int]
    sampling: SamplingParams
    stop: int
    room: int
    aborted: bool = False
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None

    @property
    def num_unfed(self) -> int:
        """Tokens to consume in chunks: all that the state lacks but the last."""
        return len(self.tokens) - 1 - self.num_fed

    @property
    def truncates(self) -> bool:
        """Whether the job needs the program that truncates the distribution."""
        sampling = self.sampling
        return sampling.temperature > 0 and (sampling.top_p < 1 or sampling.top_k > 0)


@dataclass(kw_only=True, slots=True, eq=False)
class _Batch:
    """Rows of several slots brought together.

    Attributes:
        size: Rows.
        state: Their state.
        place: Row of the batch by slot.
    """

    size: int
    state: State
    place: Mapping[int, int]


class RoundRunner:
    """Holds the full decoding state and runs rounds on it.

    Args:
        programs_of: The compiled programs for a capacity.
        num_slots: Rows of the full state.
        context_length: Tokens of a session at most.
        batch_sizes: Ascending batch sizes, the last one `num_slots`.
        chunk_lengths: Ascending chunk lengths.
        pad_id: Token in padding.
    """

    def __init__(
        self,
        programs_of: Callable[[int], Programs],
        *,
        num_slots: int,
        context_length: int,
        batch_sizes: tuple[int, ...],
        chunk_lengths: tuple[int, ...],
        pad_id: int,
    ) -> None:
        self._programs_of = programs_of
        self._programs = programs_of(min(context_length, FIRST_CAPACITY))
        self._num_slots = num_slots
        self._context_length = context_length
        self._batch_sizes = batch_sizes
        self._chunk_lengths = chunk_lengths
        self._pad_id = pad_id
        self._full: State = None
        self._amounts: dict[str, Any] = {}

    def run(self, params: Params, jobs: Sequence[Job]) -> RoundCounters:
        """Run one round to its end.

        Args:
            params: The policy's parameters.
            jobs: At least one, ordered; each ends with a `finish_reason`, its new tokens and their log-probabilities.

        Returns:
            What was done.
        """
        started = time.perf_counter()
        self._amounts = {}
        if self._full is None:
            self._full = self._call("copy_s", self._programs.init_state)
        self._make_room(max(len(job.tokens) + job.room for job in jobs))
        self._feed(params, jobs)
        self._decode(params, jobs)
        self._add(round_s=time.perf_counter() - started)
        return RoundCounters(**self._amounts)

    def warm_up(self, num_rows: Sequence[int], *, truncated: bool, num_threads: int) -> None:
        """Compile what rounds of the given numbers of rows use; safe beside a running round."""
        sizes = sorted({batch_size_for(n, self._batch_sizes) for n in num_rows}, reverse=True)
        programs = self._programs
        calls: list[Callable[[], Any]] = [partial(programs.decode, size, truncated) for size in sizes]
        calls += [partial(programs.feed, size, length) for size in sizes for length in self._chunk_lengths]
        calls += [
            partial(move, size) for size in sizes if size < self._num_slots for move in (programs.take, programs.put)
        ]
        calls += [programs.reset, programs.spread] if self._num_slots in sizes else []
        with ThreadPoolExecutor(num_threads, thread_name_prefix="engine-warmup") as pool:
            for done in [pool.submit(call) for call in calls]:
                done.result()

    # ------------------------------------------------------------------------------------------------ phases

    def _make_room(self, num_tokens: int) -> None:
        """Have every row hold as many tokens as the longest session of a round may come to."""
        before = self._programs.capacity
        capacity = before
        while capacity < min(num_tokens, self._context_length):
            capacity = min(2 * capacity, self._context_length)
        if capacity > before:
            self._full = self._call("copy_s", self._program(self._programs.grow, capacity), self._full)
            self._programs = self._programs_of(capacity)

    def _feed(self, params: Params, jobs: Sequence[Job]) -> None:
        """Bring every job's row up to all its tokens but the last; equal contexts are computed once."""
        pending = [job for job in jobs if job.num_unfed or not job.num_fed]
        groups = group_by_key(pending, [(job.num_fed, tuple(job.tokens[:-1])) for job in pending])
        group_of = {group[0].row: group for group in groups}
        self._add(shared_tokens=sum(job.num_unfed for group in groups for job in group[1:]))
        leaders = [group[0] for group in groups]
        while leaders:
            batch = self._take(leaders, empty=[job for job in leaders if not job.num_fed])
            floor = smaller_batch_size(batch.size, self._batch_sizes)
            unfed = [job for job in leaders if job.num_unfed]
            while len(unfed) > floor:
                self._feed_chunk(params, batch, unfed)
                unfed = [job for job in unfed if job.num_unfed]
            source_of = {job.row: batch.place[job.row] for job in unfed}
            for job in leaders:
                if not job.num_unfed:
                    source_of.update({member.row: batch.place[job.row] for member in group_of[job.row]})
            self._put(batch, source_of)
            leaders = unfed
        for job in pending:
            job.num_fed = len(job.tokens) - 1

    def _feed_chunk(self, params: Params, batch: _Batch, unfed: Sequence[Job]) -> None:
        """Consume one chunk of each job that has tokens left; the batch may hold other rows, which stay as they are."""
        length = plan_chunks(max(job.num_unfed for job in unfed), self._chunk_lengths)[0]
        tokens = np.full((batch.size, length), self._pad_id, np.int32)
        num_valid = np.zeros(batch.size, np.int32)
        for job in unfed:
            chunk = job.tokens[job.num_fed : min(job.num_fed + length, len(job.tokens) - 1)]
            tokens[batch.place[job.row], : len(chunk)] = chunk
            num_valid[batch.place[job.row]] = len(chunk)
            job.num_fed += len(chunk)
        program = self._program(self._programs.feed, batch.size, length)
        batch.state = self._call("prefill_s", program, params, tokens, num_valid, batch.state)
        self._add(prefill_slots=batch.size * length, prefill_tokens=int(num_valid.sum()))

    def _decode(self, params: Params, jobs: Sequence[Job]) -> None:
        """Sample in segments until no job is left, in ever smaller batches."""
        alive = _unfinished(jobs)
        while alive:
            batch = self._take(alive)
            floor = smaller_batch_size(batch.size, self._batch_sizes)
            while len(alive) > floor:
                self._decode_segment(params, batch, floor, alive)
                alive = _unfinished(alive)
            self._put(batch, batch.place)
        for job in jobs:
            job.num_fed = len(job.tokens) - 1

    def _decode_segment(self, params: Params, batch: _Batch, floor: int, alive: Sequence[Job]) -> None:
        """Run one compiled segment and hand each job its tokens.

        Args:
            params: The policy's parameters.
            batch: The batch; it may hold other rows, which stay as they are.
            floor: End the segment when this many rows or fewer are alive.
            alive: Jobs that generate.
        """
        program = self._program(self._programs.decode, batch.size, any(job.truncates for job in alive))
        rows = _decode_rows(alive, batch)
        batch.state, result = self._call("decode_s", program, params, batch.state, rows, np.int32(floor))
        tokens, logprobs, count, stopped, num_steps = (np.asarray(x) for x in result)
        for job in alive:
            place = batch.place[job.row]
            n = int(count[place])
            job.tokens.extend(tokens[place, :n].tolist())
            job.logprobs.extend(logprobs[place, :n].tolist())
            job.room -= n
            if stopped[place]:
                job.finish_reason = FinishReason.STOP
            elif len(job.tokens) >= self._context_length:
                job.finish_reason = FinishReason.CONTEXT
            elif job.room <= 0:
                job.finish_reason = FinishReason.LENGTH
        steps = int(num_steps)
        self._add(decode_tokens=int(count.sum()), decode_slots=steps * batch.size, decode_steps=steps)

    # ------------------------------------------------------------------------------------------------- batches

    def _take(self, jobs: Sequence[Job], empty: Sequence[Job] = ()) -> _Batch:
        """Gather the jobs' rows into the smallest batch that holds them, some of them emptied.

        A batch as large as the full state is that state itself, uncopied, every row at its slot.
        """
        size = batch_size_for(len(jobs), self._batch_sizes)
        whole = size == self._num_slots
        place = {job.row: job.row if whole else i for i, job in enumerate(jobs)}
        reset = np.zeros(size, np.bool_)
        reset[[place[job.row] for job in empty]] = True
        if not whole:
            rows = np.zeros(size, np.int32)
            rows[: len(jobs)] = [job.row for job in jobs]
            state = self._call("copy_s", self._program(self._programs.take, size), self._full, rows, reset)
        elif reset.any():
            state = self._call("copy_s", self._program(self._programs.reset), self._full, reset)
        else:
            state = self._full
        return _Batch(size=size, state=state, place=place)

    def _put(self, batch: _Batch, source_of: Mapping[int, int]) -> None:
        """Write a batch back: slot r becomes a copy of the batch's row `source_of[r]`; other slots stay."""
        whole = batch.size == self._num_slots
        source = np.arange(self._num_slots, dtype=np.int32) if whole else np.full(self._num_slots, -1, np.int32)
        for row, place in source_of.items():
            source[row] = place
        if not whole:
            program = self._program(self._programs.put, batch.size)
            self._full = self._call("copy_s", program, self._full, batch.state, source)
        elif (source != np.arange(self._num_slots)).any():
            self._full = self._call("copy_s", self._program(self._programs.spread), batch.state, source)
        else:
            self._full = batch.state

    # ------------------------------------------------------------------------------------------------ counting

    def _program(self, get: Callable[..., Callable[..., Any]], *key: Any) -> Callable[..., Any]:
        """Get a program; time spent waiting for its compilation is counted apart."""
        started = time.perf_counter()
        program = get(*key)
        self._add(compile_s=time.perf_counter() - started)
        return program

    def _call(self, phase: str, program: Callable[..., Any], *arguments: Any) -> Any:
        """Run a program to its end and count its seconds under a phase."""
        started = time.perf_counter()
        result = jax.block_until_ready(program(*arguments))
        self._add(**{phase: time.perf_counter() - started})
        return result

    def _add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self._amounts[name] = self._amounts.get(name, 0) + amount


def _unfinished(jobs: Sequence[Job]) -> list[Job]:
    """End the aborted jobs; return those that go on."""
    for job in jobs:
        if job.aborted and job.finish_reason is None:
            job.finish_reason = FinishReason.ABORT
    return [job for job in jobs if job.finish_reason is None]


def _decode_rows(alive: Sequence[Job], batch: _Batch) -> DecodeRows:
    """The arrays that tell a decode segment about its rows; rows of no living job are dead."""
    places = [batch.place[job.row] for job in alive]

    def column(values: Sequence[Any], dtype: Any, shape: tuple[int, ...] = (), fill: Any = 0) -> Any:
        array = np.full((batch.size, *shape), fill, dtype)
        array[places] = np.asarray(values, dtype)
        return array

    return DecodeRows(
        token=column([job.tokens[-1] for job in alive], np.int32),
        alive=column([True] * len(alive), np.bool_),
        position=column([len(job.tokens) for job in alive], np.int32),
        room=column([job.room for job in alive], np.int32),
        stop=column([job.stop for job in alive], np.int32),
        sampling=SamplingRows(
            seed=column([job.seed for job in alive], np.uint32, (2,)),
            temperature=column([job.sampling.temperature for job in alive], np.float32),
            top_p=column([job.sampling.top_p for job in alive], np.float32, fill=1.0),
            top_k=column([job.sampling.top_k for job in alive], np.int32),
        ),
    )
