"""Conversations as token ids, written once and only ever appended to.

A template file decides every byte around a problem statement and around tool results. It is rendered once per
sequence of roles, with stand-ins for the contents; an episode then concatenates ready pieces, and what the policy
generated is never rendered again. Demonstrations are built from the same pieces, so training data and episodes agree
token for token.
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

_STAND_IN = 0xE000
"""First of the stand-ins for contents while a template is rendered: private-use characters, which no template holds."""
_MAX_MESSAGES = 6000
"""Messages rendered at once; there are no more such characters."""

Message = tuple[str, str]
"""Role and content of a message that the policy did not sample."""
DemonstrationTurn = tuple[Sequence[tuple[str, Mapping[str, str]]], Sequence[str]]
"""Calls `(tool, parameters)` of one assistant turn, and the observations they led to (none after the last turn)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Template:
    """A conversation template, used byte for byte.

    Attributes:
        name: File name without its suffix.
        text: Jinja source, in the form Hugging Face calls a chat template.
        sha256: Hexadecimal digest of the file.
        system_prompt: Content of the system message that belongs to it; empty where none does.
        system_prompt_sha256: Hexadecimal digest of that file, or empty.
    """

    name: str
    text: str
    sha256: str
    system_prompt: str = ""
    system_prompt_sha256: str = ""

    @classmethod
    def load(cls, name: str) -> Template:
        """Read a template that ships with Swerve: `NAME.jinja` and its system prompt, `NAME.system.md`, if it has one.

        Raises:
            SwerveError: There is no such template, or a file is not the recorded one.
        """
        folder = resources.files("swerve.rendering") / "templates"
        recorded: dict[str, str] = json.loads((folder / "sha256.json").read_text(encoding="utf-8"))
        if f"{name}.jinja" not in recorded:
            names = sorted(file.removesuffix(".jinja") for file in recorded if file.endswith(".jinja"))
            raise SwerveError(f"there is no template {name!r}; the templates are {', '.join(names)}")
        texts = {}
        for file in (f"{name}.jinja", f"{name}.system.md"):
            data = (folder / file).read_bytes() if file in recorded else b""
            digest = hashlib.sha256(data).hexdigest()
            if data and digest != recorded[file]:
                raise SwerveError(f"template {file} has SHA-256 {digest}, {recorded[file]} is recorded in sha256.json")
            texts[file] = data.decode()
        text, system_prompt = texts.values()
        return cls(
            name=name,
            text=text,
            sha256=recorded[f"{name}.jinja"],
            system_prompt=system_prompt.removesuffix("\n"),
            system_prompt_sha256=recorded.get(f"{name}.system.md", ""),
        )

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
        self._tools = tuple(tools)
        self._head: list[dict[str, Any]] = [{"role": "system", "content": system_prompt}] if system_prompt else []
        self._pieces: dict[tuple[tuple[str, ...], bool], list[list[int]]] = {}
        self.initial("")
        self.tool_results(["", ""])

    @property
    def shows_tools(self) -> bool:
        """Whether the template tells the policy of the tools it is given."""
        messages = [*self._head, {"role": "user", "content": ""}]
        return bool(self._tools) and self._render(messages) != _render(self.template, messages, ())

    def initial(self, problem_statement: str) -> list[int]:
        """Tokens from the start of the conversation to where the policy takes its first turn."""
        return self.opening([("user", problem_statement)])

    def opening(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of messages at the start of a conversation, up to where the policy takes its first turn.

        Args:
            messages: After the system prompt, where there is one; at least one.
        """
        return self._tokens(messages, continuing=False)

    def tool_results(self, observations: Sequence[str]) -> list[int]:
        """Tokens that follow a completion which ended its turn, up to where the policy takes its next one.

        Args:
            observations: Text of each tool result, at least one.
        """
        return self.continuation([("tool", observation) for observation in observations])

    def continuation(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of messages that follow a completion which ended its turn, up to where the policy takes its next one.

        Args:
            messages: At least one.
        """
        return self._tokens(messages, continuing=True)

    def _tokens(self, messages: Sequence[Message], *, continuing: bool) -> list[int]:
        if not 0 < len(messages) <= _MAX_MESSAGES:
            raise ValueError(f"a turn is preceded by 1 to {_MAX_MESSAGES} messages, not {len(messages)}")
        roles = tuple(role for role, _ in messages)
        if (roles, continuing) not in self._pieces:
            self._pieces[roles, continuing] = self._pieces_around(roles, continuing)
        pieces = self._pieces[roles, continuing]
        tokens = list(pieces[0])
        for (_, content), piece in zip(messages, pieces[1:], strict=True):
            tokens += self.tokenizer.encode_content(content)
            tokens += piece
        return tokens

    def _pieces_around(self, roles: Sequence[str], continuing: bool) -> list[list[int]]:
        """Tokens before, between and after the contents of messages: one piece more than there are messages."""
        before = ["user", "assistant"] if continuing else []
        all_roles = [*before, *roles]
        contents = [chr(_STAND_IN + i) for i in range(len(all_roles))]
        messages = [{"role": role, "content": content} for role, content in zip(all_roles, contents, strict=True)]
        pieces = self._split(self._render([*self._head, *messages]), contents)[len(before) :]
        if continuing:
            if not pieces[0].startswith(TURN_END):
                raise SwerveError(f"template {self.template.name}: an assistant turn does not end with {TURN_END}")
            pieces[0] = pieces[0].removeprefix(TURN_END)
        return [self.tokenizer.encode(piece) for piece in pieces]

    def _render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        return _render(self.template, messages, self._tools)

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

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    # As chat templates expect it: keys in their order, no character spelt out for the sake of HTML.
    environment.filters["tojson"] = functools.partial(json.dumps, ensure_ascii=False)
    return environment.from_string(source)
