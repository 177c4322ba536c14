"""The CodeAct agent: ask the policy, run what it calls, append what came of it, until it finishes.

        render ---> generate ---> parse ---> run tools ---> observations
                       ^                                         |
                       +------------- append ------------------- +

The token list only grows. What the policy generated is kept as it is and read once; only tool results are rendered.
"""

from __future__ import annotations

import time

from swerve.agents.styles import ERROR, FINISH
from swerve.agents.tools import Toolbox
from swerve.agents.transcript import Transcript
from swerve.rendering import ConversationRenderer, MalformedCall, ParsedTurn, parse_tool_calls
from swerve.types import Completion, EpisodeStatus, FinishReason, PolicySession, SamplingParams, Turn

NO_CALL = "error: no tool call; call a tool, or finish"


class CodeActAgent:
    """Plays one episode after another with the same settings; keeps nothing between them.

    What a policy is shown, and what its calls may say, is the style of the toolbox it is given.
    """

    def __init__(self, renderer: ConversationRenderer, sampling: SamplingParams, *, max_turns: int) -> None:
        """Set up the agent.

        Args:
            renderer: Of the policy's conversations.
            sampling: How the policy's tokens are drawn.
            max_turns: Assistant turns of an episode at most.
        """
        self._renderer = renderer
        self._sampling = sampling
        self._max_turns = max_turns

    async def run(
        self,
        problem_statement: str,
        session: PolicySession,
        toolbox: Toolbox,
        transcript: Transcript,
        *,
        context_length: int,
    ) -> EpisodeStatus:
        """Play an episode; whoever calls bounds its time.

        Args:
            problem_statement: What the policy is told.
            session: A fresh conversation with the policy.
            toolbox: Bound to the episode's sandbox.
            transcript: Filled as the episode goes on.
            context_length: Tokens the conversation may hold.

        Returns:
            SUCCEEDED (the policy finished), MAX_TURNS, MAX_CONTEXT_LIMIT_REACHED, or CANCELLED (the policy stopped).
        """
        new_tokens = self._renderer.initial(problem_statement)
        for turn_number in range(1, self._max_turns + 1):
            if len(transcript.tokens) + len(new_tokens) >= context_length:
                return EpisodeStatus.MAX_CONTEXT_LIMIT_REACHED
            completion = await self._generate(session, new_tokens, transcript)
            if turn_number == self._max_turns:
                session.close()  # nobody should wait for it while its last commands run
            text = self._text(completion)
            if completion.finish_reason in _ENDS_EPISODE:
                transcript.turns.append(Turn(text=text, tool_names=(), num_malformed_calls=0, observations=()))
                return _ENDS_EPISODE[completion.finish_reason]

            parsed = parse_tool_calls(text, toolbox.style.tools)
            finished, observations = await self._act(text, parsed, toolbox, transcript)
            if finished:
                return EpisodeStatus.SUCCEEDED
            if turn_number < self._max_turns:
                new_tokens = self._renderer.tool_results(observations)
                if completion.finish_reason is FinishReason.LENGTH:
                    new_tokens.insert(0, self._renderer.tokenizer.end_of_turn_id)
        return EpisodeStatus.MAX_TURNS

    async def _generate(self, session: PolicySession, new_tokens: list[int], transcript: Transcript) -> Completion:
        start = time.perf_counter()
        try:
            completion = await session.generate(new_tokens, self._sampling)
        finally:
            transcript.add_seconds("generate", start)
        transcript.append_given(new_tokens)
        transcript.append_completion(completion)
        return completion

    def _text(self, completion: Completion) -> str:
        """Text of a completion without the token that ended its turn."""
        tokens = completion.tokens
        if tokens and tokens[-1] == self._renderer.tokenizer.end_of_turn_id:
            tokens = tokens[:-1]
        return self._renderer.tokenizer.decode(tokens)

    async def _act(
        self, text: str, parsed: ParsedTurn, toolbox: Toolbox, transcript: Transcript
    ) -> tuple[bool, list[str]]:
        """Run a turn's calls in order, up to a `finish`, and record the turn even where one of them is cut short."""
        start = time.perf_counter()
        num_repeated_before = toolbox.num_repeated_failures
        names: list[str] = []
        observations: list[str] = []
        finished = False
        try:
            for call in parsed.in_order:
                if isinstance(call, MalformedCall):
                    observations.append(ERROR + call.error)
                    continue
                names.append(call.name)
                observations.append(await toolbox.run(call))
                if call.name == FINISH:
                    finished = True
                    break
            if not observations:
                observations.append(NO_CALL)
        finally:
            transcript.add_seconds("tools", start)
            transcript.turns.append(
                Turn(
                    text=text,
                    tool_names=tuple(names),
                    num_malformed_calls=len(parsed.malformed),
                    observations=tuple(observations),
                    num_repeated_failures=toolbox.num_repeated_failures - num_repeated_before,
                    no_call=not parsed.in_order,
                )
            )
        return finished, observations


_ENDS_EPISODE = {
    FinishReason.CONTEXT: EpisodeStatus.MAX_CONTEXT_LIMIT_REACHED,
    FinishReason.ABORT: EpisodeStatus.CANCELLED,
}
