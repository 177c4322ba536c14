"""The numbered style: what full-size models are shown. The plain one is pinned by the tests of the tools."""

import pytest

from swerve.agents import NUMBERED, STYLES, Toolbox
from swerve.rendering import parse_tool_calls, render_call

LONG = "".join(f"line {i}\n" for i in range(1, 301))


@pytest.fixture
def toolbox(run, sandbox):
    run(sandbox.write_file("long.py", LONG))
    return Toolbox(sandbox, command_timeout_s=5.0, max_observation_characters=600, style=NUMBERED)


@pytest.fixture
def edit(do):
    def edit(command, path="long.py", **arguments):
        return do("str_replace_editor", command=command, path=path, **arguments)

    return edit


def test_lines_are_numbered_and_what_is_left_out_can_be_asked_for(edit):
    seen = edit("view").splitlines()
    assert seen[0] == "/testbed/long.py, 300 lines:"
    assert seen[1] == "     1\tline 1"
    last = len(seen) - 2
    assert seen[last] == f"{last:>6}\tline {last}"
    assert seen[-1] == f"[lines {last + 1} to 300 are left out: ask for them with view_range]"
    assert len("\n".join(seen)) <= 600
    assert edit("view", view_range=[299, -1]).splitlines()[1:] == ["   299\tline 299", "   300\tline 300"]
    assert edit("view", view_range=[299, 999]).splitlines()[1:] == ["   299\tline 299", "   300\tline 300"]
    assert edit("view", view_range=[0, 3]) == "error: view_range must be [first, last] with first between 1 and 300"


def test_numbers_are_those_of_grep(edit, do, run, sandbox):
    """A form feed, as some sources have, ends a line for Python's `splitlines` and for nobody else."""
    run(sandbox.write_file("feed.py", "a\n\x0cb\nc"))
    assert edit("view", path="feed.py").startswith("/testbed/feed.py, 3 lines:\n")
    assert edit("insert", path="feed.py", insert_line=3, new_str="d").endswith("     3\tc\n     4\td")
    assert do("execute_bash", command="grep -n d feed.py") == "4:d\n[exit code 0]"
    assert run(sandbox.read_file("feed.py")) == "a\n\x0cb\nc\nd\n"


def test_one_long_line_is_cut_in_its_middle(edit, run, sandbox):
    run(sandbox.write_file("wide.py", "x" * 5000 + "\nshort\n"))
    seen = edit("view", path="wide.py")
    assert "characters left out]" in seen
    assert seen.endswith("[lines 2 to 2 are left out: ask for them with view_range]")
    assert len(seen) < 700


def test_an_edit_shows_where_it_was(edit):
    assert edit("str_replace", old_str="line 100\n", new_str="line 100\nnew\n") == (
        "edited /testbed/long.py; it now reads:\n"
        + "".join(f"{n:>6}\tline {n}\n" for n in range(96, 101))
        + "   101\tnew\n"
        + "\n".join(f"{n + 1:>6}\tline {n}" for n in range(101, 106))
    )
    assert edit("insert", insert_line=0, new_str="first").splitlines()[1] == "     1\tfirst"
    assert edit("undo_edit") == "undone: the last edit of /testbed/long.py"
    assert edit("create", path="new.py", file_text="a\nb\n") == "created /testbed/new.py, 2 lines"
    assert edit("create", path="empty.py", file_text="") == "created /testbed/empty.py, 0 lines"
    assert edit("view", path="empty.py") == "/testbed/empty.py is empty"
    assert edit("str_replace", path="new.py", old_str="a\nb\n", new_str="") == "edited /testbed/new.py; it is empty"


def test_a_text_that_occurs_often_is_placed(edit):
    assert edit("str_replace", old_str="line 30", new_str="x") == (
        "error: old_str occurs 2 times in /testbed/long.py, in lines 30, 300; take in more of its surroundings"
    )
    assert "in lines 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, ...;" in edit("str_replace", old_str="line ", new_str="x")
    assert edit("str_replace", old_str="absent", new_str="x").startswith(
        "error: old_str not found in /testbed/long.py;"
    )


def test_a_command_tells_its_exit_code_and_keeps_it_when_cut(do):
    assert do("execute_bash", command="echo a; false") == "a\n[exit code 1]"
    assert do("execute_bash", command="true") == "[exit code 0]"
    shout = do("execute_bash", command="seq 1000; exit 3")
    assert shout.startswith("1\n2\n")
    assert shout.endswith("1000\n[exit code 3]")
    assert len(shout) <= 600
    assert do("execute_bash", command="cd /tmp && X=7").endswith("0]")
    assert do("execute_bash", command="pwd; echo $X") == "/tmp\n7\n[exit code 0]"  # one shell


def test_all_arguments_of_the_reference_are_understood(do):
    assert do("execute_bash", command="sleep 9", timeout=0.2).startswith("error: timed out after 0.2 s")
    assert do("execute_bash", command="echo a", timeout=1e9, is_input="false") == "a\n[exit code 0]"
    assert do("execute_bash", command="C-c", is_input="true").startswith("error: no command is waiting for input")
    assert do("execute_bash", command="ls", timeout=-1) == "error: timeout must be above 0"
    assert list(NUMBERED.tools["execute_bash"].parameters) == ["command", "is_input", "timeout"]
    text = render_call("execute_bash", {"command": "ls", "is_input": "false", "timeout": "12.5"})
    (call,) = parse_tool_calls(text, NUMBERED.tools).calls
    assert call.arguments == {"command": "ls", "is_input": "false", "timeout": 12.5}
    assert parse_tool_calls(text, STYLES["plain"].tools).malformed


def test_a_command_that_fails_again_in_the_same_way_is_reported(do, edit, toolbox):
    assert do("execute_bash", command="cat absent").endswith("[exit code 1]")
    assert do("execute_bash", command="cat absent").endswith("[exit code 1] (this very call has failed before)")
    assert toolbox.num_repeated_failures == 1
    edit("create", path="other.py", file_text="a\n")
    assert do("execute_bash", command="cat absent").endswith("[exit code 1]")  # something has changed since
    assert do("execute_bash", command="date +%N; false").endswith("[exit code 1]")
    assert do("execute_bash", command="date +%N; false").endswith("[exit code 1]")  # it says something else
    assert toolbox.num_repeated_failures == 1
