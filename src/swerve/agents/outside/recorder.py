"""Turns an agent's growing list of messages into one growing list of tokens, which is what the trainer sees.

    request: m0 m1 .. mk  -->  is m0 .. mj the conversation so far?  -->  render mj+1 .. mk alone  -->  policy
                                     | no: refused, the episode ends
    answer <-- text, calls <-- the sampled tokens, kept as they are; their log-probabilities, their weights' version

An agent that sends a request again gets the same answer again, also one that hung up before it came. An agent that
leaves its last answer out, as some do with answers in which they find no command, goes on with the answer in the
record: the policy sees what it said, and the trainer what the policy saw.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Sequence

from swerve.agents.outside.chat import Answer, Call, ChatMessage, ChatRequest, RefusedError, describe
from swerve.agents.transcript import Transcript
from swerve.rendering import ConversationRenderer, ParsedTurn, ToolSchema, parse_tool_calls
from swerve.types import (
    Completion,
    EpisodeStatus,
    FinishReason,
    OutsideRequests,
    PolicySession,
    SamplingParams,
    Turn,
)

_MAX_RESENT = 10
"""Times a request may come again: often enough for a client that retries, and an agent that asks for ever is told."""


class Recorder:
    """One episode's conversation between an agent and the policy."""

    def __init__(
        self,
        session: PolicySession,
        renderer_for: Callable[[tuple[ToolSchema, ...]], ConversationRenderer],
        transcript: Transcript,
        *,
        sampling: SamplingParams,
        max_turns: int,
        context_length: int,
    ) -> None:
        """Begin an empty conversation.

        Args:
            session: A fresh conversation with the policy; closed with the last answer.
            renderer_for: The renderer that tells the policy of some tools.
            transcript: Filled as the conversation goes on.
            sampling: How the policy's tokens are drawn.
            max_turns: Answers at most.
            context_length: Tokens the conversation may hold.
        """
        self.sampling = sampling
        self.ended: asyncio.Future[EpisodeStatus] = asyncio.get_running_loop().create_future()
        """Resolved, or failed with the cause, where the episode is over although the agent goes on."""
        self._session = session
        self._renderer_for = renderer_for
        self._renderer: ConversationRenderer | None = None
        self._transcript = transcript
        self._max_turns = max_turns
        self._context_length = context_length
        self._messages: list[ChatMessage] = []
        self._tools: tuple[ToolSchema, ...] = ()
        self._asked: ChatRequest | None = None
        self._answering: asyncio.Task[Answer] | None = None
        self._num_resent = 0
        self._unfinished = False
        self._is_full = False
        self._counts = OutsideRequests()

    @property
    def num_answers(self) -> int:
        """Answers given so far."""
        return self._counts.num_answered

    @property
    def status(self) -> EpisodeStatus:
        """What the episode's end is called if the agent ends it now, satisfied."""
        return EpisodeStatus.MAX_CONTEXT_LIMIT_REACHED if self._is_full else EpisodeStatus.SUCCEEDED

    def fail(self, cause: Exception) -> None:
        """End the episode with a cause; the first one counts."""
        if not self.ended.done():
            self.ended.set_exception(cause)

    def refuse(self, refusal: RefusedError) -> None:
        """Count a refusal and end the episode with it, unless it is over already."""
        if not self.ended.done():
            self._count(num_refused=1, num_rewritten=int(refusal.rewrites))
            self.fail(refusal)

    async def answer(self, request: ChatRequest) -> Answer:
        """Have the policy answer.

        Raises:
            RefusedError: The request does not go on from the conversation so far, or the episode is over.
        """
        if self.ended.done():
            raise RefusedError("the episode is over", status=403, code="episode_over")
        self._count(num_ignored_settings=len(request.ignored))
        if self._asked is not None and self._answering is not None and _same(self._asked, request):
            self._count(num_repeated=1)
            self._num_resent += 1
            if self._num_resent > _MAX_RESENT:
                raise RefusedError(f"the same request came {_MAX_RESENT} times again: an answer is sampled once")
            return await asyncio.shield(self._answering)
        if self._answering is not None and not self._answering.done():
            raise RefusedError("the policy is still answering another request: an episode is one conversation")
        self._check_room()
        new = self._new_messages(request)
        self._asked, self._num_resent = request, 0
        self._answering = asyncio.create_task(self._sample(new), name="answer an outside agent")
        return await asyncio.shield(self._answering)

    async def close(self) -> None:
        """Stop whatever still goes on, and leave the transcript as it is."""
        if self._answering is not None:
            self._answering.cancel()
            await asyncio.wait([self._answering])
            if not self._answering.cancelled():
                self._answering.exception()  # told in `ended` already
        if self.ended.done() and not self.ended.cancelled():
            self.ended.exception()
        else:
            self.ended.cancel()

    # ---------------------------------------------------------------------------------------------------- requests

    def _check_room(self) -> None:
        """End the episode at a request for more than it may have."""
        if self._is_full:
            self._end(EpisodeStatus.MAX_CONTEXT_LIMIT_REACHED)
            raise RefusedError("the policy's context is full", code="context_length_exceeded")
        if self.num_answers == self._max_turns:
            self._end(EpisodeStatus.MAX_TURNS)
            raise RefusedError(f"the {self._max_turns} turns of the episode are over", status=403, code="max_turns")

    def _new_messages(self, request: ChatRequest) -> tuple[ChatMessage, ...]:
        """The messages that go on from the conversation so far."""
        given, recorded = request.messages, self._messages
        if not recorded:
            self._tools = request.tools
            self._renderer = self._renderer_for(request.tools)
            if request.tools and not self._renderer.shows_tools:
                raise RefusedError(
                    f"the template {self._renderer.template.name} does not tell the policy of tools: "
                    "set agent.template to one that does, or give none"
                )
            if any(message.calls for message in given):
                raise RefusedError("a conversation cannot open with tool calls that the policy did not make")
            self._messages = list(given)
            return given
        if [tool.to_openai() for tool in request.tools] != [tool.to_openai() for tool in self._tools]:
            raise RefusedError("the tools are not those of the first request", rewrites=True)
        pairs = zip(recorded, given, strict=False)
        num_same = next(
            (i for i, (ours, theirs) in enumerate(pairs) if not ours.says_the_same(theirs)),
            min(len(recorded), len(given)),
        )
        dropped = num_same == len(recorded) - 1 < len(given) and given[num_same].role != "assistant"
        if num_same < len(recorded) and not dropped:
            raise RefusedError(
                f"the history was rewritten: {describe(given, num_same)}, it was {describe(recorded, num_same)}",
                rewrites=True,
            )
        new = given[num_same:]
        if not new:
            raise RefusedError("there is no message after the policy's last answer")
        if any(message.role == "assistant" for message in new):
            number = num_same + next(i for i, message in enumerate(new) if message.role == "assistant")
            raise RefusedError(f"{describe(given, number)} is an answer that the policy did not give", rewrites=True)
        if dropped:
            recorded.pop()
            self._count(num_dropped_answers=1)
        recorded.extend(new)
        turns = self._transcript.turns
        turns[-1] = dataclasses.replace(turns[-1], observations=tuple(message.content or "" for message in new))
        return new

    def _end(self, status: EpisodeStatus) -> None:
        if not self.ended.done():
            self.ended.set_result(status)

    def _count(self, **more: int) -> None:
        for name, number in more.items():
            self._counts = dataclasses.replace(self._counts, **{name: getattr(self._counts, name) + number})
        self._transcript.requests = self._counts

    # ---------------------------------------------------------------------------------------------------- sampling

    async def _sample(self, new: Sequence[ChatMessage]) -> Answer:
        try:
            return await self._sample_and_record(new)
        except Exception as error:
            self.fail(error)
            raise

    async def _sample_and_record(self, new: Sequence[ChatMessage]) -> Answer:
        renderer, transcript = self._renderer, self._transcript
        assert renderer is not None
        contents = [(message.role, message.content or "") for message in new]
        new_tokens = renderer.continuation(contents) if transcript.tokens else renderer.opening(contents)
        if self._unfinished:
            new_tokens.insert(0, renderer.tokenizer.end_of_turn_id)
        num_before = len(transcript.tokens) + len(new_tokens)
        if num_before >= self._context_length:
            self._is_full = True
            return self._recorded(ParsedTurn(calls=(), malformed=(), text=""), "", "length", num_before, 0)
        start = time.perf_counter()
        try:
            completion = await self._session.generate(new_tokens, self.sampling)
        finally:
            transcript.add_seconds("generate", start)
        transcript.append_given(new_tokens)
        transcript.append_completion(completion)
        return self._read(completion, renderer, num_before)

    def _read(self, completion: Completion, renderer: ConversationRenderer, num_before: int) -> Answer:
        tokens, reason = completion.tokens, completion.finish_reason
        end = renderer.tokenizer.end_of_turn_id
        text = renderer.tokenizer.decode(tokens[:-1] if tokens and tokens[-1] == end else tokens)
        self._unfinished = reason is not FinishReason.STOP
        self._is_full = reason is FinishReason.CONTEXT
        schemas = {tool.name: tool for tool in self._tools}
        parsed = parse_tool_calls(text, schemas) if schemas else ParsedTurn(calls=(), malformed=(), text=text)
        self._transcript.turns.append(
            Turn(
                text=text,
                tool_names=tuple(call.name for call in parsed.calls),
                num_malformed_calls=len(parsed.malformed),
                observations=(),
                no_call=bool(schemas) and not parsed.in_order,
            )
        )
        self._count(num_answered=1)
        if reason is FinishReason.ABORT:
            self._end(EpisodeStatus.CANCELLED)
            raise RefusedError("the policy stopped generating", status=503, code="cancelled")
        if self.num_answers == self._max_turns:
            self._session.close()  # nobody should wait for it while the agent runs its last commands
        words = "stop" if reason is FinishReason.STOP else "length"
        return self._recorded(parsed, text, words, num_before, len(tokens))

    def _recorded(self, parsed: ParsedTurn, text: str, reason: str, num_before: int, num_tokens: int) -> Answer:
        number = len(self._messages)
        calls = tuple(
            Call(id=f"call_{number}_{i}", name=call.name, arguments=json.dumps(call.arguments, ensure_ascii=False))
            for i, call in enumerate(parsed.calls)
        )
        self._messages.append(ChatMessage(role="assistant", content=text, calls=calls))
        return Answer(
            id=f"answer_{number}",
            content=text,
            calls=calls,
            finish_reason="tool_calls" if calls and reason == "stop" else reason,
            prompt_tokens=num_before,
            completion_tokens=num_tokens,
        )


def _same(one: ChatRequest, other: ChatRequest) -> bool:
    """Whether two requests ask for the same answer."""
    return one.messages == other.messages and one.tools == other.tools
