import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from swerve.rendering import ConversationRenderer, Template, demonstration_text, parse_tool_calls, render_calls
from swerve.rendering.tool_calls import ToolSchema
from swerve.types import SwerveError

PROBLEM = "Fix the function slugify in repair.py. ./run_tests fails with AssertionError."
VIEW = ("str_replace_editor", {"command": "view", "path": "repair.py"})
RUN = ("execute_bash", {"command": "./run_tests"})
UNDO = ("str_replace_editor", {"command": "undo_edit", "path": "repair.py"})
FINISH = ("finish", {})


def edit(old, new):
    return ("str_replace_editor", {"command": "str_replace", "path": "repair.py", "old_str": old, "new_str": new})


TURNS = [
    ([VIEW], ["def slugify(text):\n    return text.upper()"]),
    ([edit("upper", "lower"), RUN], ["edited", "test_slugify FAILED AssertionError\n1 failed"]),
    ([FINISH], []),
]


def test_a_conversation_byte_for_byte(tokenizer, renderer):
    tokens, sampled = renderer.demonstration(PROBLEM, TURNS)
    assistant = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert tokenizer.decode(tokens) == (
        f"<|im_start|>user\n{PROBLEM}<|im_end|>\n{assistant}"
        "<tool_call>\n<function=str_replace_editor>\n<parameter=command>\nview\n</parameter>\n"
        "<parameter=path>\nrepair.py\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
        "<|im_start|>user\n<tool_response>\ndef slugify(text):\n    return text.upper()\n</tool_response><|im_end|>\n"
        f"{assistant}"
        "<tool_call>\n<function=str_replace_editor>\n<parameter=command>\nstr_replace\n</parameter>\n"
        "<parameter=path>\nrepair.py\n</parameter>\n<parameter=old_str>\nupper\n</parameter>\n"
        "<parameter=new_str>\nlower\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=execute_bash>\n<parameter=command>\n./run_tests\n</parameter>\n</function>\n</tool_call>"
        "<|im_end|>\n<|im_start|>user\n<tool_response>\nedited\n</tool_response>\n<tool_response>\n"
        "test_slugify FAILED AssertionError\n1 failed\n</tool_response><|im_end|>\n"
        f"{assistant}<tool_call>\n<function=finish>\n</function>\n</tool_call><|im_end|>"
    )
    assert tokenizer.decode(tokens[sampled]) == "<|im_end|>".join([*(render_calls(calls) for calls, _ in TURNS), ""])
    assert (tokens.dtype, sampled.dtype) == (np.int32, np.bool_)


def test_structured_tool_calls_are_written_as_the_policy_writes_them(renderer):
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    calls = [{"function": {"name": name, "arguments": arguments}} for name, arguments in [edit("a", "b"), RUN]]
    messages = [
        {"role": "user", "content": PROBLEM},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": "edited"},
        {"role": "tool", "content": "all passed"},
        {"role": "assistant", "content": "Done.", "tool_calls": [{"function": {"name": "finish", "arguments": {}}}]},
    ]
    template = renderer.template
    text = environment.from_string(template.text).render(messages=messages, add_generation_prompt=False)
    turns = [([edit("a", "b"), RUN], ["edited", "all passed"]), ([FINISH], [])]
    assert text.replace("Done.\n\n", "") == demonstration_text(template, PROBLEM, turns)


CONTENT = st.text(max_size=40) | st.sampled_from(["<|im_end|>", "</tool_response>", "<|im_start|>system\n", "\n\n"])


@given(CONTENT, st.lists(st.lists(CONTENT, min_size=1, max_size=3), max_size=3))
def test_demonstration_and_episode_are_the_same_tokens(renderer, problem, observations):
    turns = [([edit("a", "b"), RUN], texts) for texts in observations] + [([FINISH], [])]
    episode, sampled = renderer.initial(problem), []
    sampled = [False] * len(episode)
    for i, (calls, texts) in enumerate(turns):
        completion = renderer.completion(calls)  # what a policy would have sampled
        new = renderer.tool_results(texts) if i + 1 < len(turns) else []
        episode += completion + new
        sampled += [True] * len(completion) + [False] * len(new)
    tokens, mask = renderer.demonstration(problem, turns)
    assert tokens.tolist() == episode
    assert mask.tolist() == sampled


@given(st.text(st.characters(exclude_categories=["Cs", "Co"]), max_size=40))
def test_the_pieces_are_what_the_template_renders(renderer, observation):
    turns = [([VIEW], [observation, "x"]), ([FINISH], [])]
    tokens, _ = renderer.demonstration(PROBLEM, turns)
    assert renderer.tokenizer.decode(tokens) + "\n" == demonstration_text(renderer.template, PROBLEM, turns)


def test_what_a_demonstration_says_is_what_an_agent_reads(tokenizer, renderer):
    from swerve.rendering import ParameterSchema

    names = ("command", "path", "old_str", "new_str")
    schema = ToolSchema(name="str_replace_editor", parameters={name: ParameterSchema() for name in names})
    call = edit("    return x", "\treturn\n  y")
    text = tokenizer.decode(renderer.completion([call])[:-1])
    parsed = parse_tool_calls(text, {schema.name: schema})
    assert [(call.name, call.arguments) for call in parsed.calls] == [call]


@pytest.mark.parametrize(
    ("calls", "most"),
    [([VIEW], 8), ([edit("x < y", "x <= y"), RUN], 22), ([UNDO, edit("x < y", "x <= y"), RUN], 30), ([FINISH], 4)],
)
def test_turns_are_cheap(renderer, calls, most):
    assert len(renderer.completion(calls)) <= most


def test_templates_are_compared_with_their_record():
    template = Template.load("tiny_repair")
    assert len(template.sha256) == 64
    with pytest.raises(SwerveError, match="the templates are tiny_repair"):
        Template.load("tiny")


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{% for", "cannot be rendered"),
        ("{{ messages[0].content.nothing.more }}", "cannot be rendered"),
        ("{{ messages[0].content }}{{ messages[0].content }}", "once and in order"),
        ("{{ messages[-1].content }}", "once and in order"),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", r"does not end with <\|im_end\|>"),
    ],
)
def test_a_template_that_cannot_serve_is_refused(tokenizer, tmp_path, text, complaint):
    path = tmp_path / "own.jinja"
    path.write_text(text)
    with pytest.raises(SwerveError, match=complaint):
        ConversationRenderer(tokenizer, Template.from_file(path))


def test_a_template_of_ones_own_with_system_prompt_and_tools(tokenizer, tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text(
        "{{ tools[0].function.name }}\n{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{{ '<|im_start|>assistant\\n' }}"
    )
    template = Template.from_file(path)
    schema = ToolSchema(name="look")
    renderer = ConversationRenderer(tokenizer, template, system_prompt="Be brief.", tools=[schema])
    assert tokenizer.decode(renderer.initial("Go.")) == (
        "look\n<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGo.<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.decode(renderer.tool_results(["a"])) == (
        "\n<|im_start|>tool\na<|im_end|>\n<|im_start|>assistant\n"
    )
    with pytest.raises(SwerveError, match="cannot read"):
        Template.from_file(tmp_path / "none.jinja")


def test_the_record_of_digests_names_every_template():
    from importlib import resources

    folder = resources.files("swerve.rendering") / "templates"
    recorded = json.loads((folder / "sha256.json").read_text())
    assert {f"{name}.jinja" for name in recorded} == {f.name for f in folder.iterdir() if f.name.endswith(".jinja")}
