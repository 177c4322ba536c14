import hashlib
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2.sandbox import ImmutableSandboxedEnvironment

from swerve.rendering import (
    ConversationRenderer,
    ParameterSchema,
    Template,
    ToolSchema,
    demonstration_text,
    parse_tool_calls,
    render_calls,
)
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
    with pytest.raises(SwerveError, match="the templates are codeact, tiny_repair"):
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
    assert set(recorded) == {file.name for file in folder.iterdir()} - {"sha256.json"}
    for name, digest in recorded.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest


CODEACT_GOLDEN = """\
<|im_start|>system
# Tools

These functions are at your disposal:

<tools>
{"type": "function", "function": {"name": "bash", "description": "Run <it> & see.", "parameters": {"type": "object", \
"properties": {"command": {"type": "string", "description": ""}}, "required": ["command"]}}}
{"type": "function", "function": {"name": "finish", "description": "", "parameters": {"type": "object", \
"properties": {}, "required": []}}}
</tools>

A call is written like this, every tag on a line of its own:

<tool_call>
<function=NAME>
<parameter=FIRST_KEY>
its value
</parameter>
<parameter=SECOND_KEY>
a value
of several lines
</parameter>
</function>
</tool_call>

- NAME and the keys are those of the list above; every required parameter must be given.
- A value stands as it is between its tags: nothing is quoted or escaped, and indentation counts.
- Lists and numbers are written as JSON.
- What you want to say about a call comes before it; nothing follows the last call of a turn.
- Several calls may follow each other; they run in order, and each gets its own response.

Be brief.<|im_end|>
<|im_start|>user
Fix <this>.<|im_end|>
<|im_start|>assistant
<think>

</think>

<tool_call>
<function=bash>
<parameter=command>
ls
</parameter>
</function>
</tool_call><|im_end|>
<|im_start|>user
<tool_response>
a.py
</tool_response>
<tool_response>
b.py
</tool_response><|im_end|>
<|im_start|>assistant
<think>

</think>

"""


def test_the_codeact_template_byte_for_byte(tokenizer):
    tools = [
        ToolSchema(name="bash", description="Run <it> & see.", parameters={"command": ParameterSchema(required=True)}),
        ToolSchema(name="finish"),
    ]
    renderer = ConversationRenderer(tokenizer, Template.load("codeact"), system_prompt="Be brief.", tools=tools)
    tokens = [
        *renderer.initial("Fix <this>."),
        *renderer.completion([("bash", {"command": "ls"})]),
        *renderer.tool_results(["a.py", "b.py"]),
    ]
    assert tokenizer.decode(tokens) == CODEACT_GOLDEN
    assert renderer.shows_tools
    assert "<|im_start|>system\n# Tools" in tokenizer.decode(
        ConversationRenderer(tokenizer, Template.load("codeact"), tools=tools).initial("x")
    )
    bare = ConversationRenderer(tokenizer, Template.load("codeact"))
    assert tokenizer.decode(bare.initial("x")).startswith("<|im_start|>user\nx<|im_end|>")
    assert not ConversationRenderer(tokenizer, Template.load("tiny_repair"), tools=tools).shows_tools


def test_the_system_prompt_of_codeact_is_a_recorded_file_and_names_no_tool_that_is_not_there():
    template = Template.load("codeact")
    assert len(template.system_prompt_sha256) == 64
    assert "/testbed" in template.system_prompt
    assert not template.system_prompt.endswith("\n")
    assert Template.load("tiny_repair").system_prompt == ""


ROLES = st.sampled_from(["user", "tool", "system"])


@given(st.lists(st.tuples(ROLES, CONTENT), min_size=1, max_size=4))
def test_messages_of_any_roles_are_what_the_template_renders(tokenizer, renderer, messages):
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(renderer.template.text)
    listed = [{"role": role, "content": content} for role, content in messages]
    before = [{"role": "user", "content": "Go."}, {"role": "assistant", "content": "ls"}]
    whole = template.render(messages=[*before, *listed], add_generation_prompt=True)
    start = template.render(messages=before, add_generation_prompt=False).removesuffix("\n")
    assert start + tokenizer.decode(renderer.continuation(messages)) == whole
    opening = template.render(messages=listed, add_generation_prompt=True)
    assert tokenizer.decode(renderer.opening(messages)) == opening
    with pytest.raises(ValueError, match="1 to 6000 messages"):
        renderer.continuation([])
