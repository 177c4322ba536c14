import time

import pytest

from swerve.agents import TOOL_SCHEMAS, Toolbox
from swerve.agents.styles import shorten
from swerve.rendering import ToolCall

SOURCE = "def f(x):\n    y = x + 1\n    return y + 1\n"


@pytest.fixture
def toolbox(run, sandbox):
    run(sandbox.write_file("repair.py", SOURCE))
    return Toolbox(sandbox, command_timeout_s=5.0, max_observation_characters=400)


@pytest.fixture
def edit(do):
    def edit(command, path="repair.py", **arguments):
        return do("str_replace_editor", command=command, path=path, **arguments)

    return edit


def test_names_and_arguments_are_those_of_the_reference():
    assert {name: list(schema.parameters) for name, schema in TOOL_SCHEMAS.items()} == {
        "execute_bash": ["command"],
        "str_replace_editor": ["command", "path", "file_text", "old_str", "new_str", "insert_line", "view_range"],
        "think": ["thought"],
        "finish": ["message"],
    }
    assert TOOL_SCHEMAS["str_replace_editor"].parameters["command"].choices == (
        "view", "create", "str_replace", "insert", "undo_edit",
    )  # fmt: skip


def test_a_view_is_the_plain_text(edit):
    assert edit("view") == SOURCE.removesuffix("\n")
    assert edit("view", path="/testbed/repair.py") == SOURCE.removesuffix("\n")
    assert edit("view", view_range=[2, 2]) == "    y = x + 1"
    assert edit("view", view_range=[2, -1]) == "    y = x + 1\n    return y + 1"
    for wrong in ([0, 1], [9, -1], [2, 1], [1], ["1", "2"], [1, 2, 3]):
        assert edit("view", view_range=wrong).startswith("error: view_range"), wrong


def test_a_view_of_a_directory_lists_it(edit, do):
    do("execute_bash", command="mkdir -p src/deep && touch src/a.py src/deep/b.py src/.hidden")
    assert edit("view", path="src").splitlines() == [
        "/testbed/src", "/testbed/src/a.py", "/testbed/src/deep", "/testbed/src/deep/b.py",
    ]  # fmt: skip


def test_replacing_needs_text_that_occurs_exactly_once(edit):
    assert edit("str_replace", old_str="x + 1", new_str="x + 2") == "edited"
    assert edit("view") == SOURCE.replace("x + 1", "x + 2").removesuffix("\n")
    assert edit("str_replace", old_str="y", new_str="z") == "error: old_str occurs 2 times"
    assert edit("str_replace", old_str="absent", new_str="z") == "error: old_str not found"
    assert edit("str_replace", old_str="return", new_str="return") == "error: old_str and new_str are the same"
    assert edit("str_replace", old_str="", new_str="z") == "error: str_replace needs old_str"
    assert edit("str_replace", old_str="    return y + 1\n") == "edited"
    assert edit("str_replace", path="none.py", old_str="a", new_str="b").startswith("error: /testbed/none.py")


def test_every_edit_can_be_undone_and_no_more(edit, do):
    assert edit("undo_edit") == "error: nothing to undo"
    edit("str_replace", old_str="x + 1", new_str="x + 2")
    edit("insert", insert_line=0, new_str="# first")
    assert edit("create", path="new/file.py", file_text="a = 1\n") == "created"
    assert edit("view", path="new/file.py") == "a = 1"
    assert edit("undo_edit") == "undone"
    assert edit("view") == SOURCE.replace("x + 1", "x + 2").removesuffix("\n")
    assert edit("undo_edit", path="./repair.py") == "undone"
    assert edit("view") == SOURCE.removesuffix("\n")
    assert edit("undo_edit") == "error: nothing to undo"
    assert edit("undo_edit", path="new/file.py") == "undone"
    assert do("execute_bash", command="ls new").startswith("no output")


def test_inserting(edit):
    assert edit("insert", insert_line=1, new_str="    x = 2") == "edited"
    assert edit("view") == "def f(x):\n    x = 2\n    y = x + 1\n    return y + 1"
    assert edit("insert", insert_line=9, new_str="a") == "error: insert_line must be between 0 and 4"
    assert edit("insert", new_str="a") == "error: insert needs insert_line and new_str"


@pytest.mark.parametrize("path", ["../etc/passwd", "/etc/passwd", "/proc/self/environ"])
def test_files_outside_of_the_workspace_are_not_edited(edit, path):
    assert edit("create", path=path, file_text="x").startswith("error: ")
    assert edit("str_replace", path=path, old_str="root", new_str="x").startswith("error: ")


def test_commands_show_their_output_and_nothing_else(do):
    assert do("execute_bash", command="echo one; echo two >&2; exit 3") == "one\ntwo"
    assert do("execute_bash", command="false") == "no output, exit code 1"
    assert do("think", thought="hm") == "noted"
    assert do("finish") == "finished"


def test_the_limit_given_is_the_only_limit_of_a_command(run, sandbox):
    toolbox = Toolbox(sandbox, command_timeout_s=0.3, max_observation_characters=400)
    start = time.perf_counter()
    slow = ToolCall(name="execute_bash", arguments={"command": "echo begun; sleep 20"})
    assert run(toolbox.run(slow)) == "begun\nerror: timed out after 0.3 s, the processes were killed"
    assert time.perf_counter() - start < 10
    quiet = ToolCall(name="execute_bash", arguments={"command": "sleep 20"})
    assert run(toolbox.run(quiet)).startswith("error: timed out after 0.3 s")
    # Nothing on the way is more impatient than the caller.
    patient = Toolbox(sandbox, command_timeout_s=1e6, max_observation_characters=400)
    assert run(patient.run(ToolCall(name="execute_bash", arguments={"command": "sleep 0.5; echo done"}))) == "done"


def test_a_cut_observation_says_so(do):
    said = do("execute_bash", command="seq 1000")
    assert said.startswith("1\n2\n")
    assert said.endswith("1000")
    assert "characters left out]" in said
    assert len(said) < 450
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefg", 4) == "ab\n[3 characters left out]\nfg"


def test_repeating_a_failed_call_is_reported(edit, toolbox):
    wrong = {"old_str": "absent", "new_str": "z"}
    assert edit("str_replace", **wrong) == "error: old_str not found"
    assert edit("str_replace", old_str="missing", new_str="z") == "error: old_str not found"
    assert toolbox.num_repeated_failures == 0
    assert edit("str_replace", **wrong) == "error: old_str not found (this very call has failed before)"
    assert toolbox.num_repeated_failures == 1
