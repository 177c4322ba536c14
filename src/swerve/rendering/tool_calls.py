"""The tool-call grammar of Qwen's XML format: writing calls, reading them back, and saying what is wrong with one.

    [text]<tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

The reader never raises and never lets one broken call take another one with it:

- Every call that opens yields exactly one `ToolCall` or one `MalformedCall`, in the order of the text.
- A call ends where the next one opens (`<tool_call>` followed by `<function=`), whatever is missing in between. So
  this sequence is the one thing a value cannot hold; any other tag may stand in a value.
- One missing closing tag loses nothing. A call that the text's end cuts off is malformed: half an edit never runs.
- A value loses exactly one newline at each end. Nothing is unescaped; only the tool's schema decides on a type.
- Reasoning is cut first: calls before a lone `</think>`, or between `<think>` and `</think>`, are no calls.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_MARKER = re.compile(r"<tool_call>|</?think>|^[ \t]*<function=", re.MULTILINE)
_CALL_START = re.compile(r"<tool_call>\s*<function=|(?<=</tool_call>)\s*<function=")
_HEADER = re.compile(r"<tool_call>\s*<function=([^<>\s]+)>")
_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>")
_PARAMETER_LINE = re.compile(r"(?<=\n)<parameter=([^<>\s]+)>\n")
_SPACE = re.compile(r"\s*")
_VALUE_CLOSED = re.compile(r"</parameter>(?=\s*(?:<parameter=|</function>))")
_CALL_CLOSED = re.compile(r"</function>(?=\s*</tool_call>)")
_ANY_CLOSE = re.compile(r"</parameter>(?=\s*</tool_call>)|</function>|</tool_call>")
_BLOCK_END = re.compile(r"</tool_call>|(?=</think>)")
_CLOSE_CALL = re.compile(r"\s*</tool_call>")


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterSchema:
    """One parameter of a tool.

    Attributes:
        type: JSON schema type: `string`, `integer`, `number`, `boolean`, `array` or `object`.
        description: For the model.
        required: Whether a call without it is malformed.
        choices: The only values allowed, if not empty.
    """

    type: str = "string"
    description: str = ""
    required: bool = False
    choices: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolSchema:
    """What a tool is called and takes.

    Attributes:
        name: As it stands in `<function=NAME>`.
        description: For the model.
        parameters: By name, in the order in which they are shown.
        given: The entry of an OpenAI-style `tools` list that it was read from, if it was; shown as it is.
    """

    name: str
    description: str = ""
    parameters: Mapping[str, ParameterSchema] = field(default_factory=dict)
    given: Mapping[str, Any] | None = None

    @classmethod
    def from_openai(cls, entry: Mapping[str, Any]) -> ToolSchema:
        """Read an entry of an OpenAI-style `tools` list; a parameter whose type is not plain is read as text.

        Raises:
            ValueError: It is none.
        """
        function = entry.get("function")
        if entry.get("type") != "function" or not isinstance(function, Mapping):
            raise ValueError("a tool is an object of type function")
        name, schema = function.get("name"), function.get("parameters") or {}
        properties = schema.get("properties", {}) if isinstance(schema, Mapping) else None
        if not isinstance(name, str) or not re.fullmatch(r"[^<>\s]+", name):
            raise ValueError(f"a tool is called {name!r}")
        if not isinstance(properties, Mapping) or not all(isinstance(one, Mapping) for one in properties.values()):
            raise ValueError(f"the parameters of the tool {name} are no JSON schema")
        required = schema.get("required") or ()
        parameters = {
            key: ParameterSchema(
                type=_plain_type(one.get("type")),
                description=str(one.get("description", "")),
                required=key in required,
                choices=tuple(choice for choice in one.get("enum") or () if isinstance(choice, str)),
            )
            for key, one in properties.items()
        }
        return cls(
            name=name, description=str(function.get("description") or ""), parameters=parameters, given=dict(entry)
        )

    def to_openai(self) -> dict[str, Any]:
        """The tool as an entry of an OpenAI-style `tools` list, which chat templates read."""
        if self.given is not None:
            return dict(self.given)
        properties: dict[str, Any] = {}
        for name, parameter in self.parameters.items():
            properties[name] = {"type": parameter.type, "description": parameter.description}
            if parameter.choices:
                properties[name]["enum"] = list(parameter.choices)
        required = [name for name, parameter in self.parameters.items() if parameter.required]
        schema = {"type": "object", "properties": properties, "required": required}
        return {
            "type": "function",
            "function": {"name": self.name, "description": self.description, "parameters": schema},
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """A call that can be run.

    Attributes:
        name: The tool.
        arguments: Values by parameter name, of the types the schema states.
        index: Place among all calls of the turn, malformed ones included.
    """

    name: str
    arguments: Mapping[str, Any]
    index: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class MalformedCall:
    """A call that cannot be run.

    Attributes:
        error: What is wrong, in one line, for the policy to read.
        text: The call as written.
        index: Place among all calls of the turn.
    """

    error: str
    text: str
    index: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedTurn:
    """What a completion says.

    Attributes:
        calls: Calls to run, in order.
        malformed: Calls to report back, in order.
        text: What stands outside of calls and of reasoning.
    """

    calls: tuple[ToolCall, ...]
    malformed: tuple[MalformedCall, ...]
    text: str

    @property
    def in_order(self) -> list[ToolCall | MalformedCall]:
        """All calls in the order of the text; each gets one observation."""
        return sorted((*self.calls, *self.malformed), key=lambda call: call.index)


def render_call(name: str, parameters: Mapping[str, str]) -> str:
    """Write one call, exactly as a policy is expected to.

    Args:
        name: The tool.
        parameters: Values by name, written in this order.
    """
    values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def render_calls(calls: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """Write the calls of one turn, one after another."""
    return "\n".join(render_call(name, parameters) for name, parameters in calls)


def parse_tool_calls(text: str, schemas: Mapping[str, ToolSchema]) -> ParsedTurn:
    """Read the calls of one completion.

    Args:
        text: The completion without its end-of-turn token.
        schemas: The tools on offer, by name.

    Returns:
        Calls, malformed calls and the text between them. Never raises, whatever the text.
    """
    starts = [match.start() for match in _CALL_START.finditer(text)]
    found: list[ToolCall | MalformedCall] = []
    outside: list[str] = []
    position = 0
    while marker := _MARKER.search(text, position):
        outside.append(text[position : marker.start()])
        kind = marker.group()
        if kind == "</think>":
            found.clear()
            outside.clear()
            position = marker.end()
        elif kind == "<think>":
            close = text.find("</think>", marker.end())
            position = len(text) if close < 0 else close + len("</think>")
        else:
            following = bisect_left(starts, marker.start() + 1)
            limit = starts[following] if following < len(starts) else len(text)
            call, position = _read_call(text, marker.start(), limit, schemas, index=len(found))
            found.append(call)
    outside.append(text[position:])
    return ParsedTurn(
        calls=tuple(call for call in found if isinstance(call, ToolCall)),
        malformed=tuple(call for call in found if isinstance(call, MalformedCall)),
        text="".join(outside).strip(),
    )


_TYPES = ("string", "integer", "number", "boolean", "array", "object")


def _plain_type(declared: Any) -> str:
    """The type of a parameter as declared; of a list such as `["integer", "null"]`, the first that is one."""
    for one in declared if isinstance(declared, list) else [declared]:
        if one in _TYPES:
            return one
    return "string"


class _CallError(Exception):
    """Why a call cannot be run."""


def _read_call(
    text: str, start: int, limit: int, schemas: Mapping[str, ToolSchema], *, index: int
) -> tuple[ToolCall | MalformedCall, int]:
    """Read the call that opens at `start` and ends no later than `limit`; also returns where it ends."""
    try:
        name, raw, end = _read_parts(text, start, limit, schemas)
    except _CallError as error:
        # At least one character is consumed, so that the reader always moves on.
        closing = _BLOCK_END.search(text, start + 1, limit)
        end = closing.end() if closing else limit
        return MalformedCall(error=str(error), text=text[start:end], index=index), end
    try:
        return ToolCall(name=name, arguments=_typed_arguments(raw, schemas[name]), index=index), end
    except _CallError as error:
        return MalformedCall(error=str(error), text=text[start:end], index=index), end


def _read_parts(
    text: str, start: int, limit: int, schemas: Mapping[str, ToolSchema]
) -> tuple[str, list[tuple[str, str]], int]:
    header = _HEADER.match(text, start, limit)
    if header is None:
        raise _CallError("a call opens with <tool_call> and <function=NAME>, each on its own line")
    name = header.group(1)
    if name not in schemas:
        raise _CallError(f"there is no tool {name}; the tools are {', '.join(schemas)}")
    known = schemas[name].parameters
    raw: list[tuple[str, str]] = []
    position = header.end()
    while True:
        position = _skip_space(text, position, limit)
        if parameter := _PARAMETER.match(text, position, limit):
            value, position = _read_value(text, parameter.end(), limit, known)
            raw.append((parameter.group(1), value))
        elif text.startswith("</function>", position, limit):
            position += len("</function>")
            closing = _CLOSE_CALL.match(text, position, limit)
            return name, raw, closing.end() if closing else position
        elif text.startswith("</tool_call>", position, limit):
            return name, raw, position + len("</tool_call>")
        elif position >= limit:
            raise _CallError("the call is cut off: </parameter> or </function> is missing")
        else:
            raise _CallError(f"the call of {name} holds text outside of its parameters")


def _read_value(text: str, start: int, limit: int, known: Mapping[str, ParameterSchema]) -> tuple[str, int]:
    """Read one value; also returns where the reading goes on (after `</parameter>` if there is one)."""
    closings = (_VALUE_CLOSED.search(text, start, limit), _CALL_CLOSED.search(text, start, limit))
    ends = [match.start() for match in closings if match]
    for match in _PARAMETER_LINE.finditer(text, start, min(ends, default=limit)):
        if match.group(1) in known:  # the next parameter opens although this one was never closed
            ends.append(match.start())
            break
    if not ends:
        match = _ANY_CLOSE.search(text, start, limit)
        if match is None:
            raise _CallError("the call is cut off: </parameter> or </function> is missing")
        ends.append(match.start())
    end = min(ends)
    value = text[start:end].removeprefix("\n").removesuffix("\n")
    return value, end + len("</parameter>") if text.startswith("</parameter>", end) else end


def _skip_space(text: str, position: int, limit: int) -> int:
    match = _SPACE.match(text, position, limit)
    return match.end() if match else position


def _typed_arguments(raw: Sequence[tuple[str, str]], schema: ToolSchema) -> dict[str, Any]:
    """Values in the types the schema states, and nothing guessed beyond it."""
    arguments: dict[str, Any] = {}
    for key, value in raw:
        parameter = schema.parameters.get(key)
        if parameter is None:
            raise _CallError(f"{schema.name} has no parameter {key}; it takes {', '.join(schema.parameters) or 'none'}")
        if key in arguments:
            raise _CallError(f"{schema.name} got the parameter {key} twice")
        arguments[key] = _coerce(value, parameter, f"parameter {key} of {schema.name}")
    for key, parameter in schema.parameters.items():
        if parameter.required and key not in arguments:
            raise _CallError(f"{schema.name} needs the parameter {key}")
    return arguments


def _coerce(value: str, parameter: ParameterSchema, what: str) -> Any:
    if parameter.type == "string":
        if parameter.choices and value not in parameter.choices:
            raise _CallError(f"{what} must be one of {', '.join(parameter.choices)}")
        return value
    if parameter.type == "integer":
        if re.fullmatch(r"\s*[-+]?[0-9]{1,18}\s*", value):
            return int(value)
        raise _CallError(f"{what} must be an integer")
    try:
        loaded = json.loads(value)
    except (ValueError, RecursionError):
        raise _CallError(f"{what} must be a JSON {parameter.type}") from None
    expected: Mapping[str, Any] = {"number": (int, float), "boolean": bool, "array": list, "object": dict}
    wanted = expected.get(parameter.type, object)
    if not isinstance(loaded, wanted) or (isinstance(loaded, bool) and parameter.type == "number"):
        raise _CallError(f"{what} must be a JSON {parameter.type}")
    return loaded
