"""The records that flow through Swerve, and the protocol by which policies are asked for tokens.

Standard library and numpy only. Every record is frozen, keyword-only, slotted, and complete when built; one
name means one thing everywhere. A failed rollout is a value (its `EpisodeStatus`); a programming error propagates.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

Int32Array = NDArray[np.int32]
Int16Array = NDArray[np.int16]
Float32Array = NDArray[np.float32]
BoolArray = NDArray[np.bool_]


class SwerveError(Exception):
    """A fault a user can act on: one clear line that names the file, the key or the value, and the remedy.

    Attributes:
        exit_code: What the command line exits with: 2 where the input is at fault, 1 where the machine is.
    """

    exit_code = 2


class MachineError(SwerveError):
    """A fault of the machine rather than of the input: a full disk, no user namespaces, a killed process."""

    exit_code = 1


# ---------------------------------------------------------------------------------------------------- tasks


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one episode may use. A limit of an outer thing is never cut by the default of an inner one.

    Attributes:
        max_turns: Assistant turns the agent may take.
        episode_timeout_s: Wall-clock seconds from the first prompt to the last observation.
        command_timeout_s: Wall-clock seconds of one command the agent runs.
        test_timeout_s: Wall-clock seconds of the hidden evaluation.
    """

    max_turns: int = 4
    episode_timeout_s: float = 120.0
    command_timeout_s: float = 10.0
    test_timeout_s: float = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutation:
    """One single-site change that turned a right function into a wrong one.

    Attributes:
        kind: Operator family, for example `compare` or `constant`.
        line: 1-based line within the workspace file.
        before: Text of the right function at the site.
        after: Text that replaced it.
    """

    kind: str
    line: int
    before: str
    after: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Provenance:
    """Where a task's code comes from, enough to repeat it byte for byte.

    Attributes:
        package: Distribution name, or `swerve` for generated code.
        version: Release of that distribution.
        archive_sha256: Hexadecimal SHA-256 of the source archive; empty for generated code.
        license: SPDX expression of the code.
        file: Path inside the archive.
        line: 1-based line of the function in that file; 0 where whole files are meant.
        qualname: Dotted name of the function inside its module; empty where whole files are meant.
        mutation: What was changed; `None` where a release of the package itself is undone.
        previous_version: Release whose faults `version` mended; empty where a mutation is.
        requires: What the package needs from elsewhere, as `name==version`.
    """

    package: str
    version: str
    archive_sha256: str
    license: str
    file: str
    line: int
    qualname: str
    mutation: Mutation | None = None
    previous_version: str = ""
    requires: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One repair to make.

    Attributes:
        id: Unique among all tasks of a run; groups are identified by it, never by text.
        family: `functions`, `mini`, or another task source.
        split: `train` or `validation`.
        image: Name of the sandbox image the episode starts from.
        base_commit: Hexadecimal digest of the untouched snapshot the workspace starts from.
        problem_statement: What the agent is told.
        workspace: Files written into the sandbox's working directory before the agent starts (path to text).
        visible_tests: Tests the agent may run; at least one of them fails at the start.
        hidden_tests: Tests that only the grader runs.
        fail_to_pass: Tests (visible or hidden) that fail at the start and must pass at the end.
        pass_to_pass: Tests that pass at the start and must still pass at the end.
        gold_patch: Unified diff that resolves the task. Never shown to the agent.
        limits: What one episode may use.
        provenance: Where the code comes from.
        expected_statuses: Status that a test must have at the end, where that is not `passed`. Never shown either.
    """

    id: str
    family: str
    split: str
    image: str
    base_commit: str
    problem_statement: str
    workspace: Mapping[str, str]
    visible_tests: tuple[str, ...]
    hidden_tests: tuple[str, ...]
    fail_to_pass: tuple[str, ...]
    pass_to_pass: tuple[str, ...]
    gold_patch: str
    limits: Limits = field(default_factory=Limits)
    provenance: Provenance | None = None
    expected_statuses: Mapping[str, str] = field(default_factory=dict[str, str])


Work: TypeAlias = Mapping[str, str | None]
"""What an agent did: text by workspace path, `None` for a file that it removed."""


class EpisodeStatus(enum.Enum):
    """How an episode ended. Exactly one applies."""

    SUCCEEDED = "succeeded"
    """The agent finished and its work was graded (whatever the verdict)."""
    MAX_TURNS = "max_turns"
    """The turn limit was reached; the state left behind was graded."""
    MAX_CONTEXT_LIMIT_REACHED = "max_context_limit_reached"
    """The context was full; the state left behind was graded."""
    AGENT_TIMEOUT = "agent_timeout"
    """The episode's time ran out. Not a valid sample."""
    GRADER_TIMEOUT = "grader_timeout"
    """The hidden evaluation ran out of time: a verdict (reward 0), for a repair that hangs is no repair."""
    ERROR = "error"
    """Infrastructure failed. Never reward 0, never trained on."""
    CANCELLED = "cancelled"
    """The run no longer wanted the episode."""

    @property
    def is_valid_sample(self) -> bool:
        """Whether the trajectory may be trained on and its reward counted."""
        return self in _VALID_SAMPLES


_VALID_SAMPLES = frozenset(
    {
        EpisodeStatus.SUCCEEDED,
        EpisodeStatus.MAX_TURNS,
        EpisodeStatus.MAX_CONTEXT_LIMIT_REACHED,
        EpisodeStatus.GRADER_TIMEOUT,
    }
)


# --------------------------------------------------------------------------------------------------- tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightsVersion:
    """Identity of one set of policy weights.

    Attributes:
        number: Monotonic: 0 for the weights a run starts from, then one more per optimizer step.
        digest: Hexadecimal SHA-256 over names, shapes, dtypes and bytes of all parameters; empty if not computed.
    """

    number: int
    digest: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How tokens are drawn.

    Attributes:
        temperature: Logits are divided by it; 0 takes the most likely token.
        top_p: Smallest set of most likely tokens whose probability reaches it; 1 keeps all.
        top_k: Number of most likely tokens kept; 0 keeps all.
        max_new_tokens: Tokens of one completion at most.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 64


class FinishReason(enum.Enum):
    """Why a completion ended."""

    STOP = "stop"
    """The end-of-turn token was sampled; it is the last token of the completion."""
    LENGTH = "length"
    """`max_new_tokens` was reached."""
    CONTEXT = "context"
    """The context is full."""
    ABORT = "abort"
    """The engine was asked to stop; what had been generated is returned."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """Tokens a policy produced in one turn.

    Attributes:
        tokens: Sampled token ids, `[n]`.
        logprobs: Log-probability of each under the distribution it was sampled from, temperature included, `[n]`.
        finish_reason: Why it ended.
        weights_version: Number of the weights that produced it.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    weights_version: int


class PolicySession(Protocol):
    """One episode's conversation with a policy: an append-only list of tokens that keeps its model state."""

    async def generate(self, new_tokens: Sequence[int], sampling: SamplingParams) -> Completion:
        """Append `new_tokens` to the context, then sample until the end of the turn.

        The sampled tokens belong to the context afterwards; they are not passed again.
        """
        ...

    def close(self) -> None:
        """Free the session's model state. Idempotent."""
        ...


class Policy(Protocol):
    """Whatever turns tokens into tokens: the embedded engine or a remote server."""

    @property
    def context_length(self) -> int:
        """Tokens one session can hold."""
        ...

    async def open(self, session_id: str, seed: int) -> PolicySession:
        """Begin a conversation; waits while the engine has no place free.

        Args:
            session_id: Unique among the open sessions. Engines order work by it, so runs repeat exactly.
            seed: Seeds this session's sampling and nothing else.
        """
        ...


# ------------------------------------------------------------------------------------------------- learning


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One assistant turn and what it caused, in words; for people and logs, never tokenised again.

    Attributes:
        text: Decoded completion.
        tool_names: Tools of the well-formed calls, in order.
        num_malformed_calls: Calls that could not be read; each was reported to the policy.
        observations: Text of each tool result, in order.
        num_repeated_failures: Calls that failed although the very same call had failed before and no file was edited
            since.
        no_call: The policy ended the turn without calling, or trying to call, any tool.
    """

    text: str
    tool_names: tuple[str, ...]
    num_malformed_calls: int
    observations: tuple[str, ...]
    num_repeated_failures: int = 0
    no_call: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class OutsideRequests:
    """What an outside agent asked of the policy besides answers to a growing conversation. All are counts.

    Attributes:
        num_answered: Requests that were answered with a new completion.
        num_repeated: Requests that were sent again, and got the same answer again.
        num_dropped_answers: Answers that the agent left out of its conversation; the policy still sees them.
        num_ignored_settings: Settings of requests that change nothing here, and were ignored.
        num_refused: Requests that were refused; one ends the episode.
        num_rewritten: Those among them whose history was not the conversation so far.
    """

    num_answered: int = 0
    num_repeated: int = 0
    num_dropped_answers: int = 0
    num_ignored_settings: int = 0
    num_refused: int = 0
    num_rewritten: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Trajectory:
    """One episode as the trainer sees it: exactly the tokens the sampler saw and produced, in order.

    Attributes:
        task_id: The task attempted.
        sample_index: Which of the task's attempts this is, 0-based.
        tokens: int32 `[T]`.
        sampled: bool `[T]`: the policy produced this token (masked stretches lie in the middle, too).
        behaviour_logprobs: float32 `[T]`: log-probability under the sampling distribution, 0 where not sampled.
        weights_versions: int32 `[T]`: version that sampled the token, -1 where not sampled.
        routing: int16 `[T, moe_layers, k]` recorded by the sampler, -1 for none; or `None`.
        turns: The conversation in words.
        status: How the episode ended.
        reward: 1.0 or 0.0 for a valid sample, `None` otherwise.
        error: Cause in one line where the status is ERROR, AGENT_TIMEOUT or CANCELLED, else empty.
        test_statuses: Status per test as graded.
        seconds: Wall-clock seconds by phase (`start`, `generate`, `tools`, `grade`).
        seed: Sampling seed of the session.
        requests: What an outside agent asked for; `None` where the built-in one played.
    """

    task_id: str
    sample_index: int
    tokens: Int32Array
    sampled: BoolArray
    behaviour_logprobs: Float32Array
    weights_versions: Int32Array
    status: EpisodeStatus
    reward: float | None
    turns: tuple[Turn, ...] = ()
    routing: Int16Array | None = None
    error: str = ""
    test_statuses: Mapping[str, str] = field(default_factory=dict[str, str])
    seconds: Mapping[str, float] = field(default_factory=dict[str, float])
    seed: int = 0
    requests: OutsideRequests | None = None

    @property
    def num_sampled_tokens(self) -> int:
        """Tokens the policy produced."""
        return int(self.sampled.sum())


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """All attempts at one task, with their advantages.

    Attributes:
        task_id: Identifies the group.
        trajectories: The attempts, `n` of them.
        advantages: float32 `[n]`.
    """

    task_id: str
    trajectories: tuple[Trajectory, ...]
    advantages: Float32Array


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedMicroBatch:
    """Several trajectories packed into rows, as host arrays of shape `[rows, time]`.

    Attributes:
        tokens: int32, 0 in padding.
        segment_ids: int32, 1.. within a row, 0 in padding. Nothing crosses a segment's border.
        positions: int32, position within the segment, 0 in padding.
        loss_mask: float32, 1 where the token was sampled and its sequence is trained on. Position t is scored from
            the prediction made at t-1 of the same segment.
        advantages: float32, the sequence's advantage at every token of it.
        behaviour_logprobs: float32, 0 where not sampled.
        sequence_ids: int32, index of the trajectory in the step's batch, -1 in padding.
        routing: int16 `[rows, time, moe_layers, k]` or `None`.
    """

    tokens: Int32Array
    segment_ids: Int32Array
    positions: Int32Array
    loss_mask: Float32Array
    advantages: Float32Array
    behaviour_logprobs: Float32Array
    sequence_ids: Int32Array
    routing: Int16Array | None = None
