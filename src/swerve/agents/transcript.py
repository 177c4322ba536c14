"""What an episode records as it goes on, whoever plays it: tokens, who made them, and the conversation in words."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from swerve.types import BoolArray, Completion, Float32Array, Int32Array, OutsideRequests, Turn


@dataclass(slots=True)
class Transcript:
    """What has happened in an episode so far. Valid at any moment, so a failed episode keeps what it had.

    Attributes:
        tokens: All tokens, prompt included.
        sampled: Per token: the policy produced it.
        logprobs: Per token: log-probability under the sampling distribution, 0 where not sampled.
        weights_versions: Per token: version that sampled it, -1 where not sampled.
        turns: The conversation in words.
        seconds: Wall-clock seconds by phase.
        requests: What an outside agent asked for; `None` where the built-in one plays.
    """

    tokens: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    weights_versions: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    requests: OutsideRequests | None = None

    def append_given(self, tokens: Sequence[int]) -> None:
        """Add tokens the policy did not produce."""
        self.tokens += tokens
        self.sampled += [False] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.weights_versions += [-1] * len(tokens)

    def append_completion(self, completion: Completion) -> None:
        """Add tokens the policy produced."""
        self.tokens += completion.tokens
        self.sampled += [True] * len(completion.tokens)
        self.logprobs += completion.logprobs
        self.weights_versions += [completion.weights_version] * len(completion.tokens)

    def add_seconds(self, phase: str, start: float) -> None:
        """Account the time since `start` (of `time.perf_counter`) to a phase."""
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - start

    def arrays(self) -> tuple[Int32Array, BoolArray, Float32Array, Int32Array]:
        """Tokens, sampled mask, behaviour log-probabilities and weights versions, each `[T]`."""
        return (
            np.asarray(self.tokens, np.int32),
            np.asarray(self.sampled, np.bool_),
            np.asarray(self.logprobs, np.float32),
            np.asarray(self.weights_versions, np.int32),
        )
