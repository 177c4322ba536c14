"""A whole package in a sandbox: laid out for the agent, judged by its tests; lives inside the sandbox, not in Swerve.

The file stands alone but for `pytest_runner` beside it. A sandbox image's warm interpreter calls `preload` once, which
reads the package's right tree into memory; the directory is hidden from then on. Each sandbox is a fork:

    preload ---- fork ---- prepare ---- fork ---- visible_tests, collect    the agent's sandbox: the tree is forgotten
        +------- fork ---- grade                                            the grader's sandbox
        +------- fork ---- survey, trial                                    the task factory's sandbox

Nothing of the package is imported before the fork that runs its tests: whatever text the agent left is what counts.
"""

# Descriptors and bytes throughout; pathlib would only cost its import.
# ruff: noqa: PTH100, PTH109, PTH103, PTH108, PTH110, PTH112, PTH114, PTH118, PTH120, PTH123, PTH208

from __future__ import annotations

import gc
import hashlib
import importlib
import os
import shutil
import stat
import sys
import sysconfig
import types
from typing import Any

import pytest_runner as runner
from pytest_runner import CANARY

CPU_LIMIT_S, WALL_LIMIT_S = 5.0, 20.0
"""Of one test; the first of a worker has the import of the package on top."""
MAX_COLLECTED_FILES = 256
MAX_COLLECTED_BYTES = 1 << 20
_WARM_MODULES = (
    *("argparse", "ast", "asyncio", "collections.abc", "concurrent.futures", "contextlib", "copy", "csv"),
    *("datetime", "decimal", "difflib", "doctest", "email.message", "enum", "fractions", "functools", "html"),
    *("inspect", "io", "itertools", "json", "locale", "logging", "math", "numbers", "operator", "pickle"),
    *("platform", "pprint", "queue", "random", "re", "secrets", "shlex", "statistics", "string", "struct"),
    *("tempfile", "textwrap", "threading", "traceback", "typing", "unicodedata", "unittest.mock"),
    *("urllib.parse", "uuid", "warnings", "weakref"),
)  # fmt: skip
"""Standard library that most tests import; loaded once."""
_UNREPEATABLE = runner.UNREPEATABLE - {"getpid", "gettempdir", "now", "time", "time_ns", "today", "utcnow"}
"""What tests may not call: many read the clock and repeat all the same, which the factory finds out by repeating."""
_ORDINARY = frozenset(
    (
        *("__bases__", "__dict__", "__mro__", "__reduce__", "__reduce_ex__", "__wrapped__", "attrgetter", "inspect"),
        *("locals", "methodcaller", "open", "os", "pickle", "sys", "traceback", "vars"),
    )
)
_PROCESS = frozenset({"_exit", "abort", "getppid", "kill", "killpg"})
INTERNALS = (runner.INTERNALS - _ORDINARY) | _PROCESS
"""What a repaired file may use only if it did before: less than of a lone function, for a module's work is wider."""


class _State:
    """What `preload` leaves behind for the forks."""

    def __init__(self) -> None:
        self.tree: dict[str, bytes] = {}
        self.import_paths: list[str] = []
        self.written: dict[str, str] = {}
        self.visible: list[str] = []
        self.roots: tuple[str, ...] = ()
        self.items: dict[str, Any] = {}


_STATE = _State()


def preload(args: dict[str, Any]) -> None:
    """Read the tree and load what tests need besides the package; runs once, before any fork.

    Args:
        args: `root` (directory of the tree), `files` (relative paths), `import_paths` (relative to the workspace) and
            `requires` (importable names from outside the tree and the standard library).
    """
    runner.set_environment()
    for path in args["files"]:
        with open(os.path.join(args["root"], path), "rb") as file:
            _STATE.tree[path] = file.read()
    _STATE.import_paths = args["import_paths"]
    importlib.import_module("pytest")
    for name in _WARM_MODULES:
        importlib.import_module(name)
    sysconfig.get_config_vars()  # imports a module that is named after this machine, which no list can hold
    sys.meta_path.insert(
        0, runner.OnlyKnownModules(os.path.realpath("/testbed"), runner.TEST_RUNNER_MODULES | set(args["requires"]))
    )
    gc.collect()
    gc.freeze()


def _write(files: dict[str, bytes]) -> None:
    for path, data in files.items():
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "wb") as file:
            file.write(data)


def _changed(files: dict[str, bytes], changes: dict[str, str | None]) -> dict[str, bytes]:
    """Files with some texts changed; `None` is no file."""
    result = dict(files)
    for path, text in changes.items():
        if text is None:
            result.pop(path, None)
        else:
            result[path] = text.encode("utf-8", "surrogateescape")
    return result


# ------------------------------------------------------------------------------------- the agent's sandbox


def prepare(payload: dict[str, Any]) -> None:
    """Lay out the workspace in the working directory, importable by Python, and forget what the agent must not find.

    Args:
        payload: `files` (texts to write in place of the right ones, `None` for files that are not to be there),
            `visible` (ids of the tests that `./run_tests` runs) and `roots` (what `collect` looks at).
    """
    files = _changed(_STATE.tree, payload["files"])
    _write(files)
    paths = [os.path.normpath(os.path.join(os.getcwd(), entry)) for entry in _STATE.import_paths]
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])
    _STATE.written = {path: hashlib.sha256(data).hexdigest() for path, data in files.items()}
    _STATE.visible, _STATE.roots = payload["visible"], tuple(payload["roots"])
    _STATE.tree = {}


def visible_tests(payload: Any = None) -> dict[str, Any]:
    """Run the visible tests on the workspace as it is: what `./run_tests` prints."""
    results = run_tests(_STATE.visible)
    lines = [f"{identifier} {status.upper()} {error}".rstrip() for identifier, status, error in results]
    bad = [line for line, (_, status, _) in zip(lines, results, strict=True) if status != "passed"]
    lines = [*bad, f"{len(bad)} of {len(results)} failed" if bad else f"all {len(results)} passed"]
    return {"text": "\n".join(lines) + "\n", "exit_code": int(bool(bad))}


def collect(payload: Any = None) -> dict[str, str | None]:
    """Text of every file below the sources that is not as it was at the start; `None` for one that is gone.

    Bytes that are no UTF-8 are escaped as lone surrogates. Links, files of more than `MAX_COLLECTED_BYTES`, and all
    after the first `MAX_COLLECTED_FILES` do not count.
    """
    found: dict[str, str | None] = {}
    present: set[str] = set()
    for path in _source_files():
        present.add(path)
        data = _read(path)
        if data is not None and hashlib.sha256(data).hexdigest() != _STATE.written.get(path):
            if len(found) == MAX_COLLECTED_FILES:
                break
            found[path] = data.decode("utf-8", "surrogateescape")
    gone = [path for path in _STATE.written if path.startswith(_STATE.roots) and path not in present]
    return found | dict.fromkeys(gone)


def _source_files() -> list[str]:
    paths = []
    for root in _STATE.roots:
        if not root.endswith("/"):
            paths += [root] if os.path.lexists(root) else []
            continue
        for directory, folders, names in os.walk(root):
            folders[:] = sorted(name for name in folders if name != "__pycache__")
            paths += [os.path.join(directory, name) for name in sorted(names) if not name.endswith(".pyc")]
    return paths


def _read(path: str) -> bytes | None:
    """Bytes of a regular file that no link leads to, or `None`."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with open(descriptor, "rb") as file:
        regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        data = file.read(MAX_COLLECTED_BYTES + 1) if regular else b""
    return data if regular and len(data) <= MAX_COLLECTED_BYTES else None


# ------------------------------------------------------------------------------------------------ running tests


def _begin(tests: list[str]) -> Any:
    """What a worker does first: import the package as it lies in the workspace, and collect."""
    files = sorted({identifier.partition("::")[0] for identifier in tests})

    def begin() -> None:
        root = os.getcwd()
        sys.path[:0] = [os.path.normpath(os.path.join(root, entry)) for entry in _STATE.import_paths]
        session = runner.collect(root, [path for path in files if os.path.exists(path)], conftest=True)
        _STATE.items = {item.nodeid: item for item in session.items}

    return begin


def _job(identifier: str) -> Any:
    def job() -> Any:
        item = _STATE.items.get(identifier)
        return ["missing", "ImportError"] if item is None else runner.outcome(item)

    return job


def run_tests(tests: list[str], *, stop_on_loss: bool = False) -> list[tuple[str, str, str]]:
    """Id, status and error name of tests, run on the workspace as it is."""
    results = runner.run(
        [_job(identifier) for identifier in tests],
        _begin(tests),
        stop_on_loss=stop_on_loss,
        cpu_limit_s=CPU_LIMIT_S,
        wall_limit_s=WALL_LIMIT_S,
    )
    return [(identifier, *result) for identifier, result in zip(tests, results, strict=True)]


def _lay_out(changes: dict[str, str | None]) -> None:
    """Make the workspace the right tree with some texts changed, and nothing else."""
    for name in os.listdir("."):
        if os.path.isdir(name) and not os.path.islink(name):
            shutil.rmtree(name)
        else:
            os.unlink(name)
    _write(_changed(_STATE.tree, changes))


# ------------------------------------------------------------------------------------- the grader's sandbox


def grade(payload: dict[str, Any]) -> dict[str, Any]:
    """Judge an agent's work by visible and hidden tests.

    Args:
        payload: `files` (what is broken at the start), `work` (what the agent changed, nothing but sources), `tests`
            (ids, the first of which the canary watches) and `stop_on_failure`.

    Returns:
        As `environments/functions/harness.py`: `statuses`, `errors`, `canary`, whose status must be `failed`, and
        `num_results`; and `tampering` where a text reaches for the insides of the process and is not run.
    """
    tests, work = payload["tests"], payload["work"]
    start = _changed(_STATE.tree, payload["files"])
    reason = _tampering(work, start)
    if not reason:
        try:
            _lay_out(payload["files"] | work)
        except OSError as error:
            reason = f"{error.filename} cannot be laid out: {error.strerror}"
    if reason:
        statuses = dict.fromkeys(tests, "not_run")
        return {"statuses": statuses, CANARY: "not_run", "num_results": len(statuses) + 1, "tampering": reason}
    watched = {os.path.abspath(path) for path in work or payload["files"]}

    def canary() -> Any:
        probe = _STATE.items.get(tests[0])
        if probe is None:
            return ["missing", "ImportError"]
        return runner.Canary(probe, lambda code: code.co_filename in watched).outcome()

    results = runner.run(
        [*map(_job, tests), canary],
        _begin(tests),
        stop_on_failure=payload["stop_on_failure"],
        cpu_limit_s=CPU_LIMIT_S,
        wall_limit_s=WALL_LIMIT_S,
    )
    names = [*tests, CANARY]
    return {
        "statuses": {name: result[0] for name, result in zip(names[:-1], results, strict=False)},
        "errors": {name: result[1] for name, result in zip(names, results, strict=True) if result[1]},
        CANARY: results[-1][0],
        "num_results": len(results),
    }


def _tampering(work: dict[str, str | None], start: dict[str, bytes]) -> str:
    for path, text in work.items():
        before = start.get(path, b"").decode("utf-8", "replace")
        reason = runner.tampering(text or "", before, INTERNALS) if path.endswith(".py") else ""
        if reason:
            return f"{path} {reason}"
    return ""


# ------------------------------------------------------------------------------------- the factory's sandbox


def survey(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Run every test of the right tree once and say what code it enters.

    Args:
        payload: `tests` (files that may hold tests), `sources` (files whose code is of interest) and `max_calls`
            (calls one test may make).

    Returns:
        Per test, in collection order: `id`, `status`, `calls` and `entered`, as `path:first line` of its code.
    """
    _lay_out({})
    _begin(payload["tests"])()
    sources = {os.path.abspath(path): path for path in payload["sources"]}
    keys: dict[types.CodeType, str | None] = {}

    def key_of(code: types.CodeType) -> str | None:
        if code not in keys:
            path = sources.get(code.co_filename)
            keys[code] = None if path is None or code.co_name == "<module>" else f"{path}:{code.co_firstlineno}"
        return keys[code]

    def job(item: Any) -> Any:
        return lambda: runner.survey(item, key_of, payload["max_calls"], _UNREPEATABLE)

    items = _STATE.items
    results = runner.run([job(item) for item in items.values()], cpu_limit_s=CPU_LIMIT_S, wall_limit_s=WALL_LIMIT_S)
    return [
        {
            "id": identifier,
            "status": result[0],
            "calls": result[2] if len(result) == 4 else 0,
            "entered": result[3] if len(result) == 4 else [],
        }
        for identifier, result in zip(items, results, strict=True)
    ]


def trial(payload: dict[str, Any]) -> dict[str, list[str]]:
    """Status and error name per test of the right tree with some texts changed.

    Args:
        payload: `files` (the changes), `tests` (ids) and `stop_on_loss` (leave the rest as `not_run` after the first
            that crashes or runs out of time).
    """
    _lay_out(payload["files"])
    return {
        identifier: [status, error]
        for identifier, status, error in run_tests(payload["tests"], stop_on_loss=payload["stop_on_loss"])
    }
