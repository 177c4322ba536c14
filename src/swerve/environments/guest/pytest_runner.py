"""Runs pytest's tests in worker processes and judges what they say; lives inside sandboxes, not inside Swerve.

The file stands alone: standard library and pytest only. The harnesses of environments whose tests are pytest's import
it. Tests share a process with the code under test, which may not be trusted: results come back over a pipe, each line
behind a secret; a text that reaches for the insides of that process is not run; and one more test, which must fail, is
run among the others.
"""

# Descriptors and signals throughout; pathlib would only cost its import.
# ruff: noqa: PTH100, PTH120

from __future__ import annotations

import ast
import contextlib
import importlib.abc
import importlib.machinery
import json
import os
import select
import signal
import sys
import time
import types
from collections.abc import Callable, Iterable
from typing import Any

CANARY = "canary"
CPU_LIMIT_S = 1.0
WALL_LIMIT_S = 8.0
MAX_CAPTURED_VALUES = 16
MAX_NAME_CHARACTERS = 32

_ERROR_NAMES = {"PatternError": "error"}
"""Errors that newer releases of Python renamed, back under their first name."""
TEST_RUNNER_MODULES = frozenset({"_pytest", "iniconfig", "packaging", "pluggy", "py", "pygments", "pytest"})

INTERNALS = frozenset(
    [
        "_getframe",
        "_pytest",
        "__base__",
        "__bases__",
        "__builtins__",
        "__closure__",
        "__code__",
        "__dict__",
        "__getattribute__",
        "__globals__",
        "__import__",
        "__loader__",
        "__mro__",
        "__reduce__",
        "__reduce_ex__",
        "__self__",
        "__spec__",
        "__subclasses__",
        "__traceback__",
        "__wrapped__",
        "_thread",
        "ag_frame",
        "atexit",
        "attrgetter",
        "breakpoint",
        "builtins",
        "compile",
        "cr_frame",
        "ctypes",
        "eval",
        "exec",
        "exc_info",
        "f_back",
        "f_builtins",
        "f_globals",
        "f_locals",
        "faulthandler",
        "fork",
        "gc",
        "gi_frame",
        "globals",
        "importlib",
        "inspect",
        "locals",
        "marshal",
        "methodcaller",
        "modules",
        "multiprocessing",
        "open",
        "os",
        "pickle",
        "posix",
        "pytest",
        "runpy",
        "setprofile",
        "settrace",
        "signal",
        "socket",
        "subprocess",
        "pytest_runner",
        "swerve_harness",
        "sys",
        "tb_frame",
        "threading",
        "traceback",
        "unittest",
        "vars",
    ]
)
"""Ways out of a function and into the process that tests it, which a repair may use only if the function did."""
_COMPUTED = "an attribute whose name is computed"

_ERRORS: dict[str, str] = {}
"""What each failing test raised, by its id."""


class Unusable(Exception):
    """A repaired text that cannot take the function's place. Its argument is the error name shown to the agent."""


class _TooMuchWork(BaseException):
    """A test that does more than the factory allows."""


# --------------------------------------------------------------------------------------------------- collecting


class OnlyKnownModules(importlib.abc.MetaPathFinder):
    """Lets in the standard library, pytest, the package's tree and declared requirements, and nothing else.

    So verdicts do not depend on what happens to be installed.
    """

    def __init__(self, root: str, allowed: frozenset[str]) -> None:
        self.root = root
        self.allowed = allowed

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """See `importlib.abc.MetaPathFinder`."""
        if path is not None or fullname in sys.stdlib_module_names:
            return None
        inside = [entry for entry in sys.path if entry.startswith(self.root)]
        spec = importlib.machinery.PathFinder.find_spec(fullname, inside)
        if spec is not None or fullname in self.allowed:
            return spec
        raise ModuleNotFoundError(f"No module named {fullname!r}", name=fullname)


class _ShortReports:
    """A pytest plugin that reports outcomes alone, and remembers what each failing test raised.

    Nobody reads the text of a failure here, and formatting it costs more than most tests do.
    """

    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        import pytest

        skipped = call.excinfo is not None and isinstance(call.excinfo.value, pytest.skip.Exception)
        outcome = "passed" if call.excinfo is None else "skipped" if skipped else "failed"
        return pytest.TestReport(item.nodeid, item.location, {}, outcome, None, call.when)

    def pytest_exception_interact(self, node: Any, call: Any, report: Any) -> None:
        name: str = call.excinfo.type.__name__
        _ERRORS[node.nodeid] = _ERROR_NAMES.get(name, name)


def set_environment() -> None:
    """Make tests repeatable: their time zone, the width of their terminal, no plugins from elsewhere, no byte code."""
    os.environ.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", TZ="UTC", COLUMNS="80")
    os.environ.pop("PYTEST_ADDOPTS", None)
    time.tzset()
    sys.dont_write_bytecode = True


def collect(root: str, paths: Iterable[str], *, conftest: bool = False) -> Any:
    """Collect tests with no settings of anybody's.

    Args:
        root: Directory that test ids are relative to.
        paths: Files and directories to collect, relative to it.
        conftest: Whether `conftest.py` files count.

    Returns:
        pytest's session; files that cannot be imported are not in it.
    """
    import pytest
    from _pytest.config import _prepareconfig

    options = [
        "-q",
        "-s",
        "--assert=plain",
        "--tb=native",
        "-c",
        "/dev/null",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:warnings",
    ]
    options += [] if conftest else ["--noconftest"]
    config = _prepareconfig([*options, f"--rootdir={root}", *paths], [_ShortReports()])
    config._do_configure()
    session = pytest.Session.from_config(config)
    config.hook.pytest_sessionstart(session=session)
    with contextlib.suppress(pytest.UsageError):
        session.perform_collect()
    return session


# --------------------------------------------------------------------------------------------------- tampering


def tampering(text: str, source: str, internals: frozenset[str] = INTERNALS) -> str:
    """What of the interpreter's insides a text reaches for although the one it replaces did not; empty if nothing.

    The repair shares a process with the tests and with whoever reports their results, so it may not look around there.
    """
    found = sorted((_reaches(text) - _reaches(source)) & (internals | {_COMPUTED}))
    return f"reaches for {', '.join(found)}" if found else ""


def _reaches(text: str) -> set[str]:
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return set()
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Import):
            names.update(part for alias in node.names for part in alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            names.update((node.module or "").split("."))
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") in ("getattr", "setattr", "delattr"):
            name = getattr(node.args[1], "value", None) if len(node.args) > 1 else None
            names.add(name if isinstance(name, str) else _COMPUTED)
    return names


# ------------------------------------------------------------------------------------------------ running tests


def outcome(item: Any) -> tuple[str, str]:
    """Run one test through pytest's protocol: its status, and the name of the error if it did not pass."""
    from _pytest.runner import runtestprotocol

    _ERRORS.pop(item.nodeid, None)
    reports = runtestprotocol(item, nextitem=None, log=False)
    error = _ERRORS.get(item.nodeid, "")
    by_phase = {report.when: report.outcome for report in reports}
    if by_phase.get("setup") == "skipped" or by_phase.get("call") == "skipped":
        return "skipped", ""
    if by_phase.get("setup") != "passed":
        return "error", error or "Error"
    if by_phase.get("call") != "passed":
        return "failed", error or "Error"
    if by_phase.get("teardown") != "passed":
        return "error", error or "Error"
    return ("passed", "") if len(reports) == 3 else ("error", "Error")


def run(
    jobs: list[Any],
    begin: Any = None,
    stop_on_failure: bool = False,
    cpu_limit_s: float = CPU_LIMIT_S,
    wall_limit_s: float = WALL_LIMIT_S,
    stop_on_loss: bool = False,
) -> list[Any]:
    """Do jobs one after another in a worker process, a new one after each crash or time-out.

    Args:
        jobs: Callables that return JSON values, by custom `[status, error name]`.
        begin: Called first in each worker; `Unusable` from it is the outcome of every job.
        stop_on_failure: Leave the rest as `not_run` after the first job that did not pass.
        cpu_limit_s: Processor seconds of one job.
        wall_limit_s: Wall-clock seconds of one job.
        stop_on_loss: Leave the rest as `not_run` after the first job that crashed or ran out of time.

    Returns:
        One value per job.
    """
    results: list[Any] = []
    while len(results) < len(jobs):
        fresh, cause = _worker(jobs, len(results), begin, stop_on_failure, cpu_limit_s, wall_limit_s)
        results.extend(fresh)
        if cause and len(results) < len(jobs):
            results.append([cause, "TimeoutError" if cause == "timeout" else "SystemExit"])
        lost = bool(cause) and stop_on_loss
        if lost or (stop_on_failure and any(result[0] != "passed" for result in results)):
            results.extend([["not_run", ""]] * (len(jobs) - len(results)))
        elif not cause and not fresh:
            raise RuntimeError("a test worker ended without a result")
    return results


def _worker(jobs: list[Any], first: int, begin: Any, stop: bool, cpu: float, wall: float) -> tuple[list[Any], str]:
    """Fork a worker for the jobs from `first` on; return what it reported and, if it died, why."""
    reader, writer = os.pipe()
    token = os.urandom(16).hex().encode()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            os.setsid()
            null = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(null, descriptor)
            _work(jobs, first, begin, stop, cpu, writer, token)
        finally:
            os._exit(0)
    os.close(writer)
    results: list[Any] = []
    cause = ""
    try:
        buffer = b""
        deadline = time.monotonic() + wall
        while len(results) < len(jobs) - first:
            ready = select.select([reader], [], [], max(0.0, deadline - time.monotonic()))[0]
            if not ready:
                cause = "timeout"
                break
            chunk = os.read(reader, 65536)
            if not chunk:
                break
            buffer += chunk
            *lines, buffer = buffer.split(b"\n")
            if not all(line.startswith(token) for line in lines):
                cause = "tampered"
                break
            results.extend(json.loads(line[len(token) :]) for line in lines)
            if lines:
                deadline = time.monotonic() + wall
    finally:
        os.close(reader)
        with contextlib.suppress(OSError):
            os.killpg(pid, signal.SIGKILL)
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    stopped = stop and bool(results) and results[-1][0] != "passed"
    if not cause and len(results) < len(jobs) - first and not stopped:
        over_time = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF
        cause = "timeout" if over_time else "crashed"
    return results, cause


def _work(jobs: list[Any], first: int, begin: Any, stop: bool, cpu: float, writer: int, token: bytes) -> None:
    try:
        if begin is not None:
            begin()
        unusable = None
    except Unusable as error:
        unusable = ["invalid", str(error)]
    for job in jobs[first:]:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, cpu)
        result = unusable or job()
        signal.setitimer(signal.ITIMER_PROF, 0)
        data = token + json.dumps(result).encode() + b"\n"
        while data:
            data = data[os.write(writer, data) :]
        if stop and result[0] != "passed":
            break


def job_of(item: Any) -> Any:
    """A job for `run` that runs a test."""
    return lambda: outcome(item)


def display_name(identifier: str) -> str:
    """A test's name as agents see it: without file, class and parameters."""
    name = identifier.partition("[")[0].rpartition("::")[2]
    return name[:MAX_NAME_CHARACTERS].rstrip("_")


# --------------------------------------------------------------------------------------------------- the canary


class _Stranger:
    """Equal to nothing but itself."""


class Canary:
    """A test that must fail: it asserts that some value the repaired code returned equals a value it never saw.

    An honest repair's values do not. One that returns objects equal to everything, and one that
    makes pytest report success, betray themselves: the canary passes.
    """

    def __init__(self, probe: Any, watches: Callable[[types.CodeType], bool]) -> None:
        """Set the canary up.

        Args:
            probe: A test that runs the repaired code.
            watches: Whether a piece of code is of the repair.
        """
        self.probe = probe
        self.watches = watches
        self.captured: list[Any] = []

    def watch(self) -> None:
        """Run one test again and keep what the repaired code returns or yields."""

        def profile(frame: Any, event: str, value: Any) -> None:
            if event == "return" and len(self.captured) < MAX_CAPTURED_VALUES and self.watches(frame.f_code):
                self.captured.append(value)

        stranger = _Stranger()
        sys.setprofile(profile)
        outcome(self.probe)
        if sys.getprofile() is not profile:
            self.captured = [_AlwaysEqual()]
        sys.setprofile(None)

        def must_fail() -> None:
            assert any(_equals(value, stranger, 3) for value in self.captured)

        self.function = must_fail

    def outcome(self) -> tuple[str, str]:
        """Run the canary through the same protocol as the tests."""
        import pytest

        self.watch()
        parent = self.probe.getparent(pytest.Module)
        name = "test_" + os.urandom(6).hex()
        return outcome(pytest.Function.from_parent(parent, name=name, callobj=self.function))


class _AlwaysEqual:
    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return True


def _equals(value: Any, stranger: Any, depth: int) -> bool:
    try:
        if bool(value == stranger) or not bool(value != stranger):
            return True
    except Exception:
        return False
    if depth and isinstance(value, dict):
        return any(_equals(entry, stranger, depth - 1) for pair in list(value.items())[:64] for entry in pair)
    if depth and isinstance(value, (list, tuple, set, frozenset)):
        return any(_equals(entry, stranger, depth - 1) for entry in list(value)[:64])
    return False


# ---------------------------------------------------------------------------------------------------- surveying

UNREPEATABLE = frozenset(
    (
        "fork",
        "fork_exec",
        "getpid",
        "getrandbits",
        "gettempdir",
        "now",
        "posix_spawn",
        "random",
        "sleep",
        "start_joinable_thread",
        "start_new_thread",
        "time",
        "time_ns",
        "today",
        "urandom",
        "utcnow",
    )
)
"""Built-in functions whose callers do not repeat, or not in a sandbox."""


def survey(
    item: Any,
    key_of: Callable[[types.CodeType], Any],
    max_calls: int,
    unrepeatable_calls: frozenset[str] = UNREPEATABLE,
) -> list[Any]:
    """Run a test once and note what code it enters.

    Args:
        item: The test.
        key_of: Sortable name of a piece of code, or `None` for code that is of no interest.
        max_calls: Function calls it may make; a repeatable measure of its time.
        unrepeatable_calls: Built-in functions that it may not call.

    Returns:
        Its status, the name of its error, the calls it made, and the names of what it entered, sorted. A test that
        calls what it may not has status `unrepeatable`.
    """
    entered: set[Any] = set()
    num_calls = 0
    unrepeatable = False
    runner = os.path.dirname(os.path.abspath(sys.modules["_pytest"].__file__ or ""))

    def profile(frame: Any, event: str, value: Any) -> None:
        nonlocal num_calls, unrepeatable
        if event == "call":
            num_calls += 1
            key = key_of(frame.f_code)
            if key is not None:
                entered.add(key)
            if num_calls > max_calls:
                raise _TooMuchWork
        elif event == "c_call":
            num_calls += 1
            if value.__name__ in unrepeatable_calls and not frame.f_code.co_filename.startswith(runner):
                unrepeatable = True

    sys.setprofile(profile)
    try:
        status, error = outcome(item)
    except _TooMuchWork:
        status, error = "too_long", ""
    finally:
        sys.setprofile(None)
    if num_calls > max_calls:
        status = "too_long"
    return ["unrepeatable" if unrepeatable else status, error, num_calls, sorted(entered)]
