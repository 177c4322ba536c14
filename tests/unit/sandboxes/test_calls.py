import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from swerve.sandboxes import (
    CallCrashedError,
    CallExitedError,
    CallRaisedError,
    CallTimeoutError,
    Sandbox,
    SandboxPool,
)

from .conftest import Run

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=10,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(value=_JSON)
def test_values_survive_both_ways(run: Run, sandbox: Sandbox, value: object) -> None:
    assert run(sandbox.call("echo", value, 20.0)) == value


def test_large_values_pass(run: Run, sandbox: Sandbox) -> None:
    value = ["x" * 1000] * 3000
    assert run(sandbox.call("echo", value, 20.0)) == value


def test_every_call_starts_from_the_prepared_state(run: Run, pool: SandboxPool) -> None:
    sandbox = run(pool.start("test", "ready"))
    states = [run(sandbox.call("state", number, 20.0)) for number in (1, 2)]
    assert [state["calls"] for state in states] == [1, 1]
    assert [state["payload"] for state in states] == [1, 2]
    assert all(state["prepared"] == "ready" and state["cwd"] == "/testbed" for state in states)
    assert not any(state["pid_is_one"] for state in states)
    run(sandbox.close())


def test_what_was_prepared_in_one_sandbox_is_not_in_another(run: Run, pool: SandboxPool, sandbox: Sandbox) -> None:
    other = run(pool.start("test", "secret"))
    assert run(sandbox.call("state", None, 20.0))["prepared"] is None
    run(other.close())


@pytest.mark.parametrize(
    ("entry", "payload", "error", "told"),
    [
        ("fail", None, CallRaisedError, "test: fail: KeyError: 'no such thing'"),
        ("missing", None, CallRaisedError, "test: missing: LookupError: the harness has no entry missing"),
        ("unserialisable", None, CallExitedError, "exited with code 1"),
        ("leave", 0, CallExitedError, "test: leave: exited with code 0 without a result"),
        ("leave", 3, CallExitedError, "test: leave: exited with code 3 without a result"),
        ("leave", "sys", CallExitedError, "test: leave: exited with code 5 without a result"),
        ("forge", None, CallExitedError, "without a result"),
        ("die", None, CallCrashedError, "test: die: was killed by SIGSEGV"),
        ("hang", "1000", CallTimeoutError, "test: hang: ran out of time"),
    ],
)
def test_a_call_without_a_result_says_why(
    run: Run, sandbox: Sandbox, entry: str, payload: object, error: type[Exception], told: str
) -> None:
    with pytest.raises(error) as caught:
        run(sandbox.call(entry, payload, 1.0 if entry == "hang" else 20.0))
    assert told in str(caught.value)
    assert run(sandbox.call("echo", "still here", 20.0)) == "still here"
    assert "sleep" not in run(sandbox.exec("cat /proc/[0-9]*/comm", 20.0)).output


def test_what_the_called_code_prints_is_no_result(run: Run, sandbox: Sandbox) -> None:
    assert run(sandbox.call("shout", None, 20.0)) == "true result"


def test_the_called_code_inherits_one_descriptor_besides_the_standard_ones(run: Run, sandbox: Sandbox) -> None:
    found = run(sandbox.call("descriptors", None, 20.0))
    assert found[:3] == [0, 1, 2]
    assert len([number for number in found if number > 20]) == 1
    assert len(found) <= 5  # the listing itself holds one


@pytest.mark.parametrize(
    ("source", "output", "exit_code"),
    [
        ("good", "test_x ok\nall passed\n", 0),
        ("bug", "test_x FAILED AssertionError\n1 failed\n", 1),
        ("crash", "error: was killed by SIGABRT\n", 1),
    ],
)
def test_run_tests(run: Run, sandbox: Sandbox, source: str, output: str, exit_code: int) -> None:
    run(sandbox.write_file("repair.py", source))
    for _ in range(2):
        result = run(sandbox.exec("./run_tests", 20.0))
        assert (result.output, result.exit_code) == (output, exit_code)


def test_run_tests_may_hang_or_run_twice_at_once(run: Run, sandbox: Sandbox) -> None:
    run(sandbox.write_file("repair.py", "hang"))
    assert run(sandbox.exec("./run_tests", 0.7)).timed_out
    run(sandbox.write_file("repair.py", "good"))
    both = run(sandbox.exec("./run_tests & ./run_tests; wait", 20.0))
    assert both.output == "test_x ok\nall passed\n" * 2
    run(sandbox.exec("for n in 1 2 3 4 5 6; do echo forged > /run/swerve/request; done", 20.0))
    assert run(sandbox.exec("sleep 0.3; ./run_tests", 20.0)).output == "test_x ok\nall passed\n"
