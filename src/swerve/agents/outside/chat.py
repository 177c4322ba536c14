"""The OpenAI chat protocol, as far as a recorded conversation allows it: reading requests, writing answers.

What a request says besides its messages falls into three kinds. Settings that would change what is sampled are the
recipe's: a request that asks for another value is refused. Settings that change nothing here are ignored and counted.
Settings that are unknown are refused, too, since nobody can say of which kind they are. `null` asks for nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swerve.agents.outside.http import Request, Response, json_response
from swerve.rendering import ToolSchema
from swerve.types import SamplingParams, SwerveError

MODEL = "swerve"
"""The one model there is, as requests name it."""

_IGNORED = frozenset(
    {
        "metadata", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "seed",
        "service_tier", "store", "user",
    }
)  # fmt: skip
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "stop": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto",),
    "min_p": (0,),
}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class RefusedError(SwerveError):
    """A request that is not answered; the message says why, to the agent and in the trajectory.

    Attributes:
        status: HTTP status code.
        code: Machine-readable name, where clients know one.
        rewrites: The request's history is not the conversation so far.
    """

    def __init__(self, message: str, *, status: int = 400, code: str = "refused", rewrites: bool = False) -> None:
        """See the attributes."""
        super().__init__(message)
        self.status, self.code, self.rewrites = status, code, rewrites

    def response(self) -> Response:
        """The refusal as OpenAI clients read it."""
        error = {"message": str(self), "type": "invalid_request_error", "code": self.code, "param": None}
        return json_response({"error": error}, self.status)


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A tool call of an answer.

    Attributes:
        id: Unique in the episode.
        name: The tool.
        arguments: JSON text of an object.
    """

    id: str
    name: str
    arguments: str

    def says_the_same(self, other: Call) -> bool:
        """Whether the other is this call, however its JSON is spaced."""
        return (self.id, self.name) == (other.id, other.name) and _loaded(self.arguments) == _loaded(other.arguments)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatMessage:
    """One message of a request.

    Attributes:
        role: `system`, `user`, `assistant` or `tool`.
        content: Its text; `None` where an assistant's message has calls only.
        calls: Tool calls of an assistant's message.
        answers: Id of the call that a tool's message answers.
    """

    role: str
    content: str | None
    calls: tuple[Call, ...] = ()
    answers: str = ""

    def says_the_same(self, given: ChatMessage) -> bool:
        """Whether what a request gives back is this message.

        An answer may come back as its text, as its calls, or as both; space around its text does not count.
        """
        if self.role != "assistant" or given.role != "assistant":
            return self == given
        same_text = given.content is None or given.content.strip() == (self.content or "").strip()
        same_calls = len(given.calls) == len(self.calls) and all(map(Call.says_the_same, self.calls, given.calls))
        if given.content is None or (given.content.strip() == "" and given.calls):
            return bool(given.calls) and same_calls
        return same_text and (same_calls or not given.calls)


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatRequest:
    """A request for the next answer.

    Attributes:
        messages: The conversation as the agent sees it.
        tools: The tools that the policy is to be told of.
        stream: The answer is wanted as server-sent events.
        stream_usage: With a last event that counts tokens.
        ignored: Names of the settings that were ignored.
    """

    messages: tuple[ChatMessage, ...]
    tools: tuple[ToolSchema, ...] = ()
    stream: bool = False
    stream_usage: bool = False
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """What the policy said.

    Attributes:
        id: Unique in the episode.
        content: The whole text, calls included.
        calls: The calls in it that could be read, where the request gave tools.
        finish_reason: `stop`, `tool_calls` or `length`.
        prompt_tokens: Tokens before the answer.
        completion_tokens: Tokens of it.
    """

    id: str
    content: str
    calls: tuple[Call, ...]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int

    def response(self, request: ChatRequest) -> Response:
        """The answer in the form that a request wants."""
        headers = {"x-swerve-ignored": ", ".join(request.ignored)} if request.ignored else {}
        common = {"id": self.id, "created": 0, "model": MODEL}
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.calls
        ]
        if not request.stream:
            message = {"role": "assistant", "content": self.content} | ({"tool_calls": calls} if calls else {})
            choice = {"index": 0, "message": message, "finish_reason": self.finish_reason, "logprobs": None}
            return json_response(
                {**common, "object": "chat.completion", "choices": [choice], "usage": usage}, headers=headers
            )
        delta: dict[str, Any] = {"role": "assistant", "content": self.content}
        if calls:
            delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
        choices: list[list[dict[str, Any]]] = [
            [{"index": 0, "delta": delta, "finish_reason": None}],
            [{"index": 0, "delta": {}, "finish_reason": self.finish_reason}],
        ]
        events = [{**common, "object": "chat.completion.chunk", "choices": one} for one in choices]
        if request.stream_usage:
            events.append({**common, "object": "chat.completion.chunk", "choices": [], "usage": usage})
        text = "".join(f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events) + "data: [DONE]\n\n"
        return Response(
            body=text.encode("utf-8", "replace"), content_type="text/event-stream; charset=utf-8", headers=headers
        )


def json_object(request: Request) -> dict[str, Any]:
    """The JSON object in a request's body.

    Raises:
        RefusedError: There is none.
    """
    try:
        value = json.loads(request.body)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise RefusedError("the request's body is no JSON object")
    return value


def read_chat(body: Mapping[str, Any], sampling: SamplingParams) -> ChatRequest:
    """Read the body of a request for an answer.

    Args:
        body: JSON object.
        sampling: How the recipe samples.

    Raises:
        RefusedError: It asks for what the recipe decides, or for what nobody knows.
    """
    asked = {key: value for key, value in body.items() if value is not None}
    if asked.get("model") != MODEL:
        raise RefusedError(
            f"model {asked.get('model')!r}: the only one is {MODEL!r}", status=404, code="model_not_found"
        )
    ignored = _check_settings(asked, sampling)
    messages = asked.get("messages")
    if not isinstance(messages, list) or not messages:
        raise RefusedError("messages must be a list of at least one message")
    options = asked.get("stream_options", {})
    return ChatRequest(
        messages=tuple(_message(number, one) for number, one in enumerate(messages)),
        tools=_tools(asked.get("tools", [])),
        stream=bool(asked.get("stream", False)),
        stream_usage=isinstance(options, dict) and bool(options.get("include_usage", False)),
        ignored=ignored,
    )


def _check_settings(asked: Mapping[str, Any], sampling: SamplingParams) -> tuple[str, ...]:
    """Names of the settings to ignore."""
    ours = {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
    ignored: list[str] = []
    for key, value in asked.items():
        if key in ("model", "messages", "tools", "stream", "stream_options"):
            continue
        if key in ours:
            if value != ours[key]:
                raise RefusedError(
                    f"{key} = {value}: the recipe samples with {ours[key]:g}; the agent must not set {key}"
                )
        elif key in _NEUTRAL:
            if value not in _NEUTRAL[key]:
                raise RefusedError(f"{key} = {json.dumps(value)}: the recipe decides how answers are sampled")
        elif key in ("max_tokens", "max_completion_tokens"):
            if not isinstance(value, int) or value < sampling.max_new_tokens:
                raise RefusedError(
                    f"{key} = {value}: the recipe lets an answer have {sampling.max_new_tokens} tokens "
                    "(rollout.max_new_tokens); the agent must not set less"
                )
            ignored.append(key)
        elif key in _IGNORED:
            ignored.append(key)
        else:
            raise RefusedError(f"{key}: an unknown setting; it can be neither honoured nor ignored")
    return tuple(ignored)


def _tools(entries: Any) -> tuple[ToolSchema, ...]:
    try:
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise ValueError("tools is a list of objects")
        return tuple(ToolSchema.from_openai(entry) for entry in entries)
    except ValueError as error:
        raise RefusedError(f"tools: {error}") from None


def _message(number: int, message: Any) -> ChatMessage:
    what = f"message {number}"
    role = _ROLES.get(message.get("role", "")) if isinstance(message, dict) else None
    if role is None:
        raise RefusedError(f"{what}: a message has a role: system, user, assistant or tool")
    content = _text(what, message.get("content"))
    calls = message.get("tool_calls") or []
    if content is None and not (role == "assistant" and calls):
        raise RefusedError(f"{what}: a message of role {role} has content")
    if calls and role != "assistant":
        raise RefusedError(f"{what}: only an assistant's message has tool_calls")
    return ChatMessage(
        role=role,
        content=content,
        calls=tuple(_call(what, call) for call in calls),
        answers=str(message.get("tool_call_id") or "") if role == "tool" else "",
    )


def _text(what: str, content: Any) -> str | None:
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        return "".join(str(part.get("text", "")) for part in content)
    raise RefusedError(f"{what}: its content must be text; the policy reads nothing else")


def _call(what: str, call: Any) -> Call:
    match call:
        case {"id": str(key), "function": {"name": str(name), "arguments": str(arguments)}}:
            return Call(id=key, name=name, arguments=arguments)
    raise RefusedError(f"{what}: a tool call has an id and a function with name and arguments")


def _loaded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def describe(messages: Sequence[ChatMessage], number: int) -> str:
    """Words for a message in complaints: its place, its role and how it begins."""
    if number >= len(messages):
        return f"message {number} is missing"
    message = messages[number]
    beginning = " ".join((message.content or "").split())[:60]
    return f"message {number} ({message.role}, {beginning!r})"
