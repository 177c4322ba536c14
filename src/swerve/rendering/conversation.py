"""Conversations as token ids, written once and only ever appended to.

A template file decides every byte around a problem statement and around tool results. It is rendered once, with
stand-ins for the contents; an episode then concatenates ready pieces, and what the policy generated is never rendered
again. Demonstrations are built from the same pieces, so training data and episodes agree token for token.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from swerve.rendering.tokenizer import TURN_END, Tokenizer
from swerve.rendering.tool_calls import ToolSchema, render_calls
from swerve.types import BoolArray, Int32Array, SwerveError

# Stand-ins for contents while a template is rendered; private-use characters, which no template holds.
_PROBLEM, _COMPLETION, _FIRST_RESULT, _SECOND_RESULT = "\ue000", "\ue001", "\ue002", "\ue003"

DemonstrationTurn = tuple[Sequence[tuple[str, Mapping[str, str]]], Sequence[str]]
"""Calls `(tool, parameters)` of one assistant turn, and the observations they led to (none after the last turn)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """A conversation template, used byte for byte.

    Attributes:
        name: File name without its suffix.
        text: Jinja source, in the form Hugging Face calls a chat template.
        sha256: Hexadecimal digest of the file.
    """

    name: str
    text: str
    sha256: str

    @classmethod
    def load(cls, name: str) -> Template:
        """Read a template that ships with Swerve and compare it with its recorded digest.

        Raises:
            SwerveError: There is no such template, or the file is not the recorded one.
        """
        folder = resources.files("swerve.rendering") / "templates"
        recorded: dict[str, str] = json.loads((folder / "sha256.json").read_text(encoding="utf-8"))
        if name not in recorded:
            raise SwerveError(f"there is no template {name!r}; the templates are {', '.join(sorted(recorded))}")
        data = (folder / f"{name}.jinja").read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        if digest != recorded[name]:
            raise SwerveError(
                f"template {name}.jinja has SHA-256 {digest}, {recorded[name]} is recorded in sha256.json"
            )
        return cls(name=name, text=data.decode(), sha256=digest)

    @classmethod
    def from_file(cls, path: str | Path) -> Template:
        """Read a template of the user's own.

        Raises:
            SwerveError: The file cannot be read.
        """
        path = Path(path)
        try:
            data = path.read_bytes()
            text = data.decode()
        except (OSError, UnicodeDecodeError) as error:
            raise SwerveError(f"{path}: cannot read the conversation template: {error}") from None
        return cls(name=path.stem, text=text, sha256=hashlib.sha256(data).hexdigest())


def demonstration_text(template: Template, problem: str, turns: Sequence[DemonstrationTurn]) -> str:
    """A whole conversation as text, for training a tokenizer on; policies are trained on `demonstration`.

    Args:
        template: Of the conversation.
        problem: The problem statement.
        turns: Calls and observations per turn.
    """
    messages: list[dict[str, Any]] = [{"role": "user", "content": problem}]
    for calls, observations in turns:
        messages.append({"role": "assistant", "content": render_calls(calls)})
        messages += [{"role": "tool", "content": observation} for observation in observations]
    return _render(template, messages, (), add_generation_prompt=False)


class ConversationRenderer:
    """Turns contents into the tokens of a conversation, for one tokenizer and one template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: Template,
        *,
        system_prompt: str | None = None,
        tools: Sequence[ToolSchema] = (),
    ) -> None:
        """Render the template once and keep its pieces.

        Args:
            tokenizer: Of the policy.
            template: Of the conversation.
            system_prompt: Content of a system message, if the conversation has one.
            tools: Handed to the template, which may list them.

        Raises:
            SwerveError: The template cannot be rendered, or does not keep contents apart and in order.
        """
        self.tokenizer = tokenizer
        self.template = template
        head: list[dict[str, Any]] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        head.append({"role": "user", "content": _PROBLEM})
        tail = [
            {"role": "assistant", "content": _COMPLETION},
            {"role": "tool", "content": _FIRST_RESULT},
            {"role": "tool", "content": _SECOND_RESULT},
        ]
        opening = self._split(_render(template, head, tools), (_PROBLEM,))
        contents = (_PROBLEM, _COMPLETION, _FIRST_RESULT, _SECOND_RESULT)
        whole = self._split(_render(template, head + tail, tools), contents)
        after_completion = whole[2]
        if not after_completion.startswith(TURN_END):
            raise SwerveError(f"template {template.name}: an assistant turn does not end with {TURN_END}")
        encode = tokenizer.encode
        self._before_problem, self._after_problem = encode(opening[0]), encode(opening[1])
        self._before_results = encode(after_completion.removeprefix(TURN_END))
        self._between_results, self._after_results = encode(whole[3]), encode(whole[4])

    def initial(self, problem_statement: str) -> list[int]:
        """Tokens from the start of the conversation to where the policy takes its first turn."""
        return [*self._before_problem, *self.tokenizer.encode_content(problem_statement), *self._after_problem]

    def tool_results(self, observations: Sequence[str]) -> list[int]:
        """Tokens that follow a completion which ended its turn, up to where the policy takes its next one.

        Args:
            observations: Text of each tool result, at least one.
        """
        if not observations:
            raise ValueError("a turn is followed by at least one observation")
        tokens = list(self._before_results)
        for i, observation in enumerate(observations):
            if i:
                tokens += self._between_results
            tokens += self.tokenizer.encode_content(observation)
        return tokens + self._after_results

    def completion(self, calls: Sequence[tuple[str, Mapping[str, str]]]) -> list[int]:
        """Tokens a policy samples to make these calls and end its turn."""
        return [*self.tokenizer.encode(render_calls(calls)), self.tokenizer.end_of_turn_id]

    def demonstration(self, problem: str, turns: Sequence[DemonstrationTurn]) -> tuple[Int32Array, BoolArray]:
        """A whole conversation, as an episode with these turns would have recorded it.

        Args:
            problem: The problem statement.
            turns: Calls and observations per turn; the observations of the last turn are left out.

        Returns:
            tokens: int32 `[T]`, ending with the last turn's end-of-turn token.
            sampled: bool `[T]`, true where the policy would have produced the token.
        """
        tokens = self.initial(problem)
        sampled = [False] * len(tokens)
        for i, (calls, observations) in enumerate(turns):
            completion = self.completion(calls)
            tokens += completion
            sampled += [True] * len(completion)
            if i + 1 < len(turns):
                results = self.tool_results(observations)
                tokens += results
                sampled += [False] * len(results)
        return np.asarray(tokens, np.int32), np.asarray(sampled, np.bool_)

    def _split(self, text: str, contents: Sequence[str]) -> list[str]:
        """The stretches around the contents, each of which must appear once and in order."""
        pieces: list[str] = []
        for content in contents:
            before, found, text = text.partition(content)
            if not found or content in text:
                raise SwerveError(f"template {self.template.name}: it does not write every message once and in order")
            pieces.append(before)
        return [*pieces, text]


def _render(
    template: Template,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[ToolSchema],
    *,
    add_generation_prompt: bool = True,
) -> str:
    from jinja2 import TemplateError

    try:
        return _compiled(template.text).render(
            messages=messages,
            tools=[tool.to_openai() for tool in tools] or None,
            add_generation_prompt=add_generation_prompt,
            enable_thinking=False,
        )
    except TemplateError as error:
        raise SwerveError(f"template {template.name}: cannot be rendered: {error}") from None


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    return ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(source)
