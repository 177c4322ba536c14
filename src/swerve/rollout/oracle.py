"""A policy that knows the answer: it plays a task's gold patch, so that everything around a policy can be tried.

Whatever lies between a policy and its reward works if this one earns 1: template, tools, sandbox, collection, grader.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from swerve.rendering import ConversationRenderer
from swerve.types import Completion, FinishReason, SamplingParams, Work

Call = tuple[str, Mapping[str, str]]

_CONTEXT_LENGTH = 1 << 24


def gold_calls(gold: Work) -> list[list[Call]]:
    """The turns that make some work: a look around, one turn of edits, the tests, and the end.

    Args:
        gold: New text by path, `None` for files to remove.
    """
    edits: list[Call] = []
    for path, text in sorted(gold.items()):
        if text is None:
            edits.append(("execute_bash", {"command": f"rm -- '{path}'"}))
        else:
            edits.append(("str_replace_editor", {"command": "create", "path": path, "file_text": text}))
    look: list[Call] = [("execute_bash", {"command": "ls"})]
    return [look, edits, [("execute_bash", {"command": "./run_tests | tail -n 5"})], [("finish", {})]]


class OraclePolicy:
    """Says the same turns in every conversation; its log-probabilities are 0, for it is certain."""

    def __init__(self, renderer: ConversationRenderer, turns: Sequence[Sequence[Call]]) -> None:
        """Put the turns into tokens.

        Args:
            renderer: Of the conversations.
            turns: Calls per turn.
        """
        self._turns = [renderer.completion(calls) for calls in turns]

    @property
    def context_length(self) -> int:
        """More tokens than any conversation has."""
        return _CONTEXT_LENGTH

    async def open(self, session_id: str, seed: int) -> _Session:
        """See `Policy.open`; nothing is drawn, so the seed is of no use."""
        return _Session(self._turns)

    def warmup(self, *, truncated: bool = False) -> None:
        """Nothing has to be compiled."""

    def shutdown(self) -> None:
        """Nothing runs."""


class _Session:
    def __init__(self, turns: Sequence[list[int]]) -> None:
        self._turns = iter(turns)

    async def generate(self, new_tokens: Sequence[int], sampling: SamplingParams) -> Completion:
        """The next turn; after the last one, an end."""
        tokens = next(self._turns, None)
        if tokens is None:
            return Completion(tokens=(), logprobs=(), finish_reason=FinishReason.ABORT, weights_version=0)
        logprobs = (0.0,) * len(tokens)
        return Completion(tokens=tuple(tokens), logprobs=logprobs, finish_reason=FinishReason.STOP, weights_version=0)

    def close(self) -> None:
        """Nothing is held."""
