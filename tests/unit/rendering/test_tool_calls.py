import random
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swerve.rendering import ParameterSchema, ToolSchema, parse_tool_calls, render_call, render_calls

SCHEMAS = {
    schema.name: schema
    for schema in (
        ToolSchema(
            name="edit",
            parameters={
                "path": ParameterSchema(required=True),
                "old": ParameterSchema(),
                "new": ParameterSchema(),
                "line": ParameterSchema(type="integer"),
                "span": ParameterSchema(type="array"),
                "flag": ParameterSchema(type="boolean"),
                "ratio": ParameterSchema(type="number"),
                "options": ParameterSchema(type="object"),
                "mode": ParameterSchema(choices=("view", "undo")),
            },
        ),
        ToolSchema(name="bash", parameters={"command": ParameterSchema(required=True)}),
        ToolSchema(name="finish"),
    )
}
LS = render_call("bash", {"command": "ls"})


def parse(text):
    return parse_tool_calls(text, SCHEMAS)


def said(text):
    """Calls as (name, arguments), and the number of malformed ones."""
    parsed = parse(text)
    return [(call.name, dict(call.arguments)) for call in parsed.calls], len(parsed.malformed)


LS_CALL = ("bash", {"command": "ls"})


def test_a_call_is_written_as_the_grammar_says():
    assert render_call("edit", {"path": "a.py", "new": "x\n  y"}) == (
        "<tool_call>\n<function=edit>\n<parameter=path>\na.py\n</parameter>\n<parameter=new>\nx\n  y\n</parameter>\n"
        "</function>\n</tool_call>"
    )
    assert render_calls([("finish", {}), ("finish", {})]) == "\n".join([render_call("finish", {})] * 2)


def test_text_and_several_calls():
    parsed = parse(f"I look first.\n\n{LS}\n{render_call('finish', {})}")
    assert [call.name for call in parsed.calls] == ["bash", "finish"]
    assert [call.index for call in parsed.calls] == [0, 1]
    assert parsed.text == "I look first."
    assert parse("no call at all").text == "no call at all"


@pytest.mark.parametrize(
    "broken",
    [
        "<function=a",
        "<function=a\n",
        "<tool_call>\n<function=a",
        "<tool_call>\n<function=a\n</tool_call>\n",
        "<tool_call>\n",
        "<tool_call></tool_call>",
        "<tool_call>\n<function=>\n</function>\n</tool_call>\n",
        "<tool_call>\n<function=unknown>\n</function>\n</tool_call>\n",
        "<tool_call>\n<function=bash>\n</function>\n</tool_call>\n",
        "<tool_call>\n<function=bash>\n<parameter=command>\nls",
        "<tool_call>\n<function=bash>\n<parameter=command\nls\n</parameter>\n</function>\n</tool_call>\n",
        "<tool_call>\n<function=bash>\nls\n</function>\n</tool_call>\n",
        "<tool_call>\n<function=bash>\n<parameter=cmd>\nls\n</parameter>\n</function>\n</tool_call>\n",
        render_call("edit", {"path": "a", "line": "three"}),
        '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>\n',
    ],
)
def test_a_broken_call_is_reported_and_its_neighbours_run(broken):
    assert said(broken + "\n" + LS) == ([LS_CALL], 1)
    assert said(LS + "\n" + broken) == ([LS_CALL], 1)
    parsed = parse(LS + "\n" + broken + "\n" + LS)
    assert [call.index for call in parsed.calls] == [0, 2]
    assert [call.index for call in parsed.malformed] == [1]
    assert "\n" not in parsed.malformed[0].error


@pytest.mark.parametrize(
    "value", ["    return x", "\tx\n\ty", "a\n", "\na", "\n", "", " ", "&lt;b&gt; &amp;", "12", "null"]
)
def test_a_value_survives_as_it_is(value):
    assert said(render_call("edit", {"path": "a", "new": value})) == ([("edit", {"path": "a", "new": value})], 0)


@pytest.mark.parametrize(
    "value", ["a </tool_call> b", "</function>", "</parameter>", "x </think> y", "<think>", "<tool_call>"]
)
def test_other_tags_may_stand_in_a_value(value):
    text = render_call("edit", {"path": "a", "old": value, "new": f"p\n{value}\nq"}) + "\n" + LS
    assert said(text) == ([("edit", {"path": "a", "old": value, "new": f"p\n{value}\nq"}), LS_CALL], 0)


_EDIT = "<tool_call>\n<function=edit>\n<parameter=path>\n"


@pytest.mark.parametrize(
    "text",
    [
        _EDIT + "a\n<parameter=new>\n  x\n  y\n</parameter>\n</function>\n</tool_call>",
        _EDIT + "a\n</parameter>\n<parameter=new>\n  x\n  y\n</function>\n</tool_call>",
        _EDIT + "a\n</parameter>\n<parameter=new>\n  x\n  y\n</tool_call>",
        _EDIT + "a\n</parameter>\n<parameter=new>\n  x\n  y\n</parameter>\n</tool_call>",
        _EDIT + "a\n</parameter>\n<parameter=new>\n  x\n  y\n</parameter>\n</function>",
        _EDIT.replace("\n", "") + "a</parameter><parameter=new>\n  x\n  y</parameter></function></tool_call>",
    ],
)
def test_one_missing_closing_tag_loses_nothing(text):
    wanted = ("edit", {"path": "a", "new": "  x\n  y"})
    assert said(text) == ([wanted], 0)
    assert said(text + "\n" + LS) == ([wanted, LS_CALL], 0)


@pytest.mark.parametrize("length", range(len("<tool_call>"), len(LS) - len("</function>\n</tool_call>") + 1))
def test_a_call_cut_off_by_the_end_never_runs(length):
    assert said(LS[:length]) == ([], 1)


@pytest.mark.parametrize(
    ("text", "visible"),
    [
        (f"<think>\n{LS}\n</think>\n\nok {LS}", "ok"),
        (f"I would {LS} </think>\n\n{LS}", ""),
        (f"<tool_call> or so </think>{LS}", ""),
        (f"a <tool_call>\n<function=bash>\n<parameter=command>\n1 </think> b {LS}", "b"),
        (f"{LS}<think>{LS}", ""),
    ],
)
def test_a_call_inside_reasoning_is_no_call(text, visible):
    parsed = parse(text)
    assert [(call.name, call.arguments) for call in parsed.calls] == [LS_CALL]
    assert not parsed.malformed
    assert parsed.text == visible


def test_only_the_schema_decides_on_a_type():
    raw = {"path": "1", "line": " -7 ", "span": "[1, -1]", "flag": "true", "ratio": "1.5", "options": '{"a": 1}'}
    assert said(render_call("edit", raw)) == (
        [("edit", {"path": "1", "line": -7, "span": [1, -1], "flag": True, "ratio": 1.5, "options": {"a": 1}})],
        0,
    )
    for wrong in (
        {"line": "1.5"},
        {"span": "{}"},
        {"flag": "1"},
        {"ratio": "true"},
        {"options": "["},
        {"mode": "look"},
    ):
        assert said(render_call("edit", {"path": "a", **wrong})) == ([], 1), wrong
    assert parse(render_call("edit", {"path": "a", "mode": "look"})).malformed[0].error.endswith("one of view, undo")


def test_a_parameter_given_twice_is_no_call():
    twice = "<parameter=command>\nls\n</parameter>\n" * 2
    assert said(f"<tool_call>\n<function=bash>\n{twice}</function>\n</tool_call>") == ([], 1)


def test_a_schema_that_a_client_gives_is_shown_as_it_is_and_read_by_its_types():
    given = {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Find.",
            "strict": True,
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string", "description": "What."},
                    "limit": {"type": ["integer", "null"]},
                    "where": {"anyOf": [{"type": "string"}]},
                    "mode": {"type": "string", "enum": ["exact", "fuzzy"]},
                },
                "required": ["text"],
                "additionalProperties": False,
            },
        },
    }
    schema = ToolSchema.from_openai(given)
    assert schema.to_openai() == given
    call = render_call("search", {"text": "1", "limit": "3", "where": "7", "mode": "fuzzy"})
    parsed = parse_tool_calls(call, {"search": schema})
    assert parsed.calls[0].arguments == {"text": "1", "limit": 3, "where": "7", "mode": "fuzzy"}
    assert parse_tool_calls(render_call("search", {"limit": "3"}), {"search": schema}).malformed
    assert ToolSchema.from_openai(SCHEMAS["edit"].to_openai()).parameters == SCHEMAS["edit"].parameters
    for wrong in ({}, {"type": "function"}, {"type": "function", "function": {"name": "a b"}},
                  {"type": "function", "function": {"name": "a", "parameters": {"properties": {"x": 1}}}}):  # fmt: skip
        with pytest.raises(ValueError, match="tool"):
            ToolSchema.from_openai(wrong)


def test_the_schema_in_the_form_chat_templates_read():
    function = SCHEMAS["edit"].to_openai()["function"]
    assert function["parameters"]["required"] == ["path"]
    assert function["parameters"]["properties"]["mode"] == {
        "type": "string",
        "description": "",
        "enum": ["view", "undo"],
    }


PLAIN = st.text(st.characters(exclude_characters="<"), max_size=60)


@given(st.lists(st.tuples(PLAIN, PLAIN), min_size=1, max_size=4), PLAIN)
def test_what_is_written_is_read_back(edits, text):
    calls = [("edit", {"path": old, "new": new}) for old, new in edits]
    parsed = parse(text + "\n\n" + render_calls(calls))
    assert [(call.name, call.arguments) for call in parsed.calls] == calls
    assert not parsed.malformed
    assert parsed.text == text.strip()


BROKEN = ("<tool_call>\n<function=bash>\n<parameter=cmd>\n", "<tool_call>\n<function=a")


@given(st.lists(st.sampled_from([LS, *BROKEN, "words"]), max_size=8))
def test_every_opening_yields_one_call_or_one_report(parts):
    parsed = parse("\n".join(parts))
    assert len(parsed.calls) == parts.count(LS)
    assert len(parsed.in_order) == len(parts) - parts.count("words")
    assert [call.index for call in parsed.in_order] == list(range(len(parsed.in_order)))


FRAGMENTS = (
    "<tool_call>", "</tool_call>", "<function=bash>", "<function=edit>", "<function=", "</function>", "</parameter>",
    "<parameter=path>", "<parameter=command>", "<parameter=", "<think>", "</think>", "<|im_end|>", "\n", "\n\n", " ",
    "    x", ">", "<", "=", "ls", "\ufffd", "\x00", "é", "[1, 2]", "-3",
)  # fmt: skip
CALLS = (("bash", {"command": "ls"}), ("edit", {"path": "a", "new": "  b\n</parameter>"}), ("finish", {}))


def mutated(rng):
    """A conversation's turn, then bent: characters cut, doubled, moved; or just a heap of fragments."""
    if rng.random() < 0.5:
        return "".join(rng.choices(FRAGMENTS, k=rng.randrange(1, 40)))
    text = render_calls(rng.choices(CALLS, k=rng.randrange(1, 4)))
    for _ in range(rng.randrange(1, 6)):
        i, j = sorted((rng.randrange(len(text) + 1), rng.randrange(len(text) + 1)))
        j = min(j, i + 12)
        text = rng.choice([text[:i] + text[j:], text[:j] + text[i:], text[:i] + rng.choice(FRAGMENTS) + text[i:]])
    return text


def never_raises(num_inputs):
    rng = random.Random(20)
    for _ in range(num_inputs):
        text = mutated(rng)
        parsed = parse(text)
        assert len(parsed.in_order) <= text.count("<tool_call>") + text.count("<function="), text
        for call in parsed.in_order:
            assert call.index == parsed.in_order.index(call), text
        # A well-formed call on its own lines is never lost, whatever stands before it, unless that is open reasoning.
        if text.rfind("<think>") <= text.rfind("</think>"):
            assert [call.name for call in parse(text + "\n" + LS).calls[-1:]] == ["bash"], text


def test_no_text_of_100_000_makes_the_reader_raise_or_lose_a_call():
    never_raises(100_000)


@given(st.lists(st.sampled_from(FRAGMENTS) | st.text(max_size=8), max_size=30).map("".join))
def test_whatever_is_read_is_read_again_when_it_is_written_again(text):
    """What a text means does not depend on how it was written: its calls, rendered well, are the same calls."""
    calls = [(call.name, call.arguments) for call in parse(text).calls]
    if all(isinstance(value, str) and "<" not in value for _, values in calls for value in values.values()):
        again = parse(render_calls(calls))
        assert [(call.name, call.arguments) for call in again.calls] == calls
        assert not again.malformed


@given(st.lists(st.sampled_from(CALLS), min_size=1, max_size=4), st.data())
def test_half_a_turn_runs_only_what_the_whole_one_would_have_run(calls, data):
    """Cut anywhere: the calls that are whole run as they are, at most one is reported, and no half of one runs."""
    text = render_calls(calls)
    cut = data.draw(st.integers(0, len(text)))
    parsed = parse(text[:cut])
    num_whole = len(parsed.calls)
    assert [(call.name, call.arguments) for call in parsed.calls] == calls[:num_whole]
    assert len(parsed.malformed) <= 1
    assert len(parsed.in_order) >= text[:cut].count("<function=")


@given(PLAIN, st.sampled_from(["", "\n", "\n\n", "  \n"]), st.sampled_from(["", "\n", "\n\n", "\n  "]))
def test_exactly_one_newline_goes_at_each_end(value, before, after):
    written = f"{before}{value}{after}"
    text = f"<tool_call>\n<function=bash>\n<parameter=command>{written}</parameter>\n</function>\n</tool_call>"
    wanted = written.removeprefix("\n").removesuffix("\n")
    assert said(text) == ([("bash", {"command": wanted})], 0)


@pytest.mark.parametrize("unit", [*BROKEN, "<tool_call>", "<think>", "</think>", _EDIT + "x\n<parameter=new>\n"])
def test_long_nonsense_is_read_in_linear_time(unit):
    start = time.process_time()
    parse(unit * (200_000 // len(unit)))
    assert time.process_time() - start < 2.0
