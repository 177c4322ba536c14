"""What an engine has done so far, in numbers with units."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, kw_only=True, slots=True)
class RoundCounters:
    """Work of one round, or the sum over many.

    Attributes:
        prefill_tokens: Given tokens the model consumed in chunks.
        shared_tokens: Given tokens that cost nothing because another row with the same context had consumed them.
        prefill_slots: Token places of the chunks, padding included.
        decode_tokens: Tokens sampled.
        decode_slots: Row places of the decode steps, finished and empty rows included.
        decode_steps: Decode steps, each one call of the model.
        prefill_s: Wall-clock seconds in chunks.
        decode_s: Wall-clock seconds in decode steps.
        copy_s: Wall-clock seconds spent gathering rows into smaller batches and putting them back.
        compile_s: Wall-clock seconds rounds waited for a program to be compiled.
        round_s: Wall-clock seconds of the rounds as a whole; what the others leave is the host's share.
    """

    prefill_tokens: int = 0
    shared_tokens: int = 0
    prefill_slots: int = 0
    decode_tokens: int = 0
    decode_slots: int = 0
    decode_steps: int = 0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    copy_s: float = 0.0
    compile_s: float = 0.0
    round_s: float = 0.0

    def __add__(self, other: RoundCounters) -> RoundCounters:
        """Sum field by field."""
        return RoundCounters(**{f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(RoundCounters)})

    @property
    def host_s(self) -> float:
        """Seconds of the rounds in which nothing was computed: building arrays, reading results."""
        return max(self.round_s - self.prefill_s - self.decode_s - self.copy_s - self.compile_s, 0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCounters:
    """Snapshot of an engine.

    Attributes:
        num_slots: Sessions that can be open at once.
        open_sessions: Slots in use now.
        peak_open_sessions: Most slots in use at once so far.
        waiting_sessions: Calls of `open` that wait for a slot now.
        num_rounds: Rounds completed.
        num_completions: Completions returned, aborted ones included.
        num_aborted: Completions that were aborted.
        num_refits: Successful refits.
        weights_version: Number of the weights in use.
        work: Sum over all rounds.
    """

    num_slots: int
    open_sessions: int
    peak_open_sessions: int
    waiting_sessions: int
    num_rounds: int
    num_completions: int
    num_aborted: int
    num_refits: int
    weights_version: int
    work: RoundCounters
