"""Runs a package's own tests against one replaced function; lives inside the sandbox, not inside Swerve.

The file stands alone: standard library and pytest only, no import of `swerve`. A sandbox image's warm interpreter
calls `preload` once; it imports the package and collects its tests. Each sandbox is a fork of that interpreter:

    preload ---- fork ---- prepare ---- fork ---- visible_tests     the agent's sandbox
        |                                         (as often as the agent likes)
        +------- fork ---- grade                                    the grader's sandbox, hidden tests still there
        +------- fork ---- survey, verdicts                         the task factory's sandbox

Nothing is imported or collected again: the text of `repair.py` is compiled, and its code object takes the place of
the function's wherever that function lives. Tests run through pytest's own protocol, in a worker process of their
own with a time limit for each; results come back over a pipe.
"""

# Descriptors and signals throughout; pathlib would only cost its import.
# ruff: noqa: PTH100, PTH118, PTH120, PTH123

from __future__ import annotations
import __future__

import ast
import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import select
import signal
import sys
import time
import types
from typing import Any

REPAIR_FILE = "repair.py"
CANARY = "canary"
CPU_LIMIT_S = 1.0
WALL_LIMIT_S = 8.0
MAX_NAME_CHARACTERS = 32
MAX_CAPTURED_VALUES = 16

_ERROR_NAMES = {"PatternError": "error"}
"""Errors that newer releases of Python renamed, back under their first name."""
_TEST_RUNNER_MODULES = frozenset({"_pytest", "iniconfig", "packaging", "pluggy", "py", "pygments", "pytest"})
_FUTURE_FLAGS = 0
for _name in __future__.all_feature_names:
    _FUTURE_FLAGS |= getattr(__future__, _name).compiler_flag


_INTERNALS = frozenset(
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


class Unusable(Exception):
    """A repaired text that cannot take the function's place. Its argument is the error name shown to the agent."""


class _TooMuchWork(BaseException):
    """A test that does more than the factory allows."""


class _State:
    """What `preload` leaves behind for the forks."""

    def __init__(self) -> None:
        self.root = ""
        self.items: dict[str, Any] = {}
        self.functions: dict[tuple[str, str], list[tuple[int, types.FunctionType]]] = {}
        self.errors: dict[str, str] = {}
        self.session: Any = None
        self.prepared: dict[str, Any] = {}


_STATE = _State()


# ------------------------------------------------------------------------------------------------- preloading


class _OnlyKnownModules(importlib.abc.MetaPathFinder):
    """Lets in the standard library, pytest, the package's tree and declared requirements, and nothing else.

    So verdicts do not depend on what happens to be installed.
    """

    def __init__(self, root: str, allowed: frozenset[str]) -> None:
        self.root = root
        self.allowed = allowed

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
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
        _STATE.errors[node.nodeid] = _ERROR_NAMES.get(name, name)


def preload(args: dict[str, Any]) -> None:
    """Import the package and collect its tests; runs once, before any fork.

    Args:
        args: `root` (directory of the source tree), `import_paths` (relative to it), `modules` (dotted names),
            `tests` (relative paths to collect), `test_roots` (relative paths below which nothing is a function to
            repair), `requires` (importable names from outside the tree) and `keep` (ids of the tests to keep, or
            `None` for all).
    """
    root = _STATE.root = os.path.realpath(args["root"])
    os.environ.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", TZ="UTC", COLUMNS="80")
    os.environ.pop("PYTEST_ADDOPTS", None)
    time.tzset()
    sys.dont_write_bytecode = True
    os.chdir(root)
    sys.path[:0] = [os.path.normpath(os.path.join(root, entry)) for entry in args["import_paths"]]
    import pytest
    from _pytest.config import _prepareconfig

    sys.meta_path.insert(0, _OnlyKnownModules(root, _TEST_RUNNER_MODULES | frozenset(args["requires"])))
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        for module in args["modules"]:
            with contextlib.suppress(Exception, SystemExit, pytest.skip.Exception):
                importlib.import_module(module)
        options = "-q -s --assert=plain --tb=native --noconftest -c /dev/null -p no:cacheprovider -p no:warnings"
        config = _prepareconfig([*options.split(), f"--rootdir={root}", *args["tests"]], [_ShortReports()])
        config._do_configure()
        session = _STATE.session = pytest.Session.from_config(config)
        config.hook.pytest_sessionstart(session=session)
        with contextlib.suppress(pytest.UsageError):
            session.perform_collect()
    keep = None if args.get("keep") is None else set(args["keep"])
    _STATE.items = {item.nodeid: item for item in session.items if keep is None or item.nodeid in keep}
    session.items = list(_STATE.items.values())
    for node in {node for item in session.items for node in item.listchain() if isinstance(node, pytest.Package)}:
        # Its set-up would read `__init__.py`, which sandboxes hide.
        node.setup = _do_nothing
    _index_functions(root, tuple(os.path.join(root, path) for path in args["test_roots"]))
    gc.collect()
    gc.freeze()


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for what is not to happen."""


def _index_functions(root: str, test_paths: tuple[str, ...]) -> None:
    """Find the live function objects of the package, so that every alias and wrapped original is replaced."""
    for value in gc.get_objects():
        if isinstance(value, types.FunctionType):
            code = value.__code__
            file = os.path.normpath(code.co_filename)
            if file.startswith(root + os.sep) and not file.startswith(test_paths):
                key = (os.path.relpath(file, root), code.co_qualname)
                _STATE.functions.setdefault(key, []).append((code.co_firstlineno, value))


# ---------------------------------------------------------------------------------------- replacing a function


def find_function(function: dict[str, Any]) -> list[types.FunctionType]:
    """Live objects of a function given by `file`, `qualname` and `line` (of its `def`)."""
    found = _STATE.functions.get((function["file"], function["qualname"]), [])
    firsts = [first for first, _ in found if first <= function["line"]]
    return [value for first, value in found if firsts and first == max(firsts)]


def install(function: dict[str, Any], text: str) -> None:
    """Make a function behave as a text says.

    Args:
        function: `file`, `qualname`, `line`, and `source`: the text whose defaults are the live ones.
        text: One function definition without decorators.

    Raises:
        Unusable: The text is not that, or cannot be put in place.
    """
    objects = find_function(function)
    if not objects:
        raise LookupError(f"{function['file']}: no live function {function['qualname']} at line {function['line']}")
    node = _definition(text, function["qualname"])
    flags = objects[0].__code__.co_flags & _FUTURE_FLAGS
    code = _compile(node, function["qualname"], flags)
    new_defaults = ast.dump(node.args) != ast.dump(_definition(function["source"], function["qualname"]).args)
    for value in objects:
        if code.co_freevars != value.__code__.co_freevars:
            raise Unusable("TypeError")
        if new_defaults:
            value.__defaults__, value.__kwdefaults__ = _defaults(node, value.__globals__)
        value.__code__ = code


def _definition(text: str, qualname: str) -> ast.FunctionDef:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Unusable("SyntaxError" if not isinstance(error, SyntaxError) else type(error).__name__) from None
    if len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        raise Unusable("SyntaxError")
    node = tree.body[0]
    if node.name != qualname.rpartition(".")[2]:
        raise Unusable("NameError")
    if node.decorator_list:
        raise Unusable("SyntaxError")
    return node


def _compile(node: ast.FunctionDef, qualname: str, flags: int) -> types.CodeType:
    """Compile a definition inside the classes it belongs to, which private names and `super()` depend on."""
    names = qualname.split(".")
    module = ast.parse("")
    scope: ast.Module | ast.ClassDef = module
    for name in names[:-1]:
        inner_class = ast.parse(f"class {name}: pass").body[0]
        assert isinstance(inner_class, ast.ClassDef)
        scope.body = [inner_class]
        scope = inner_class
    scope.body = [node]
    try:
        code = compile(module, REPAIR_FILE, "exec", flags=flags, dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise Unusable("SyntaxError") from None
    for name in names:
        inner = [const for const in code.co_consts if isinstance(const, types.CodeType) and const.co_name == name]
        if len(inner) != 1:
            raise Unusable("SyntaxError")
        code = inner[0]
    return code


def _defaults(node: ast.FunctionDef, namespace: dict[str, Any]) -> tuple[Any, Any]:
    """Evaluate a definition's default values."""
    arguments = node.args
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    module = ast.parse(f"def {node.name}(): pass")
    bare = module.body[0]
    assert isinstance(bare, ast.FunctionDef)
    bare.args = arguments
    scope = dict(namespace)
    try:
        exec(compile(module, REPAIR_FILE, "exec", dont_inherit=True), scope)
    except Exception as error:
        raise Unusable(type(error).__name__) from None
    value = scope[node.name]
    return value.__defaults__, value.__kwdefaults__


def tampering(text: str, source: str) -> str:
    """What of the interpreter's insides a text reaches for although the function it replaces did not; empty if nothing.

    The repair shares a process with the tests and with whoever reports their results, so it may not look around there.
    """
    found = sorted(_reaches(text) - _reaches(source))
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
    return names & (_INTERNALS | {_COMPUTED})


# ------------------------------------------------------------------------------------------------ running tests


def _outcome(item: Any) -> tuple[str, str]:
    """Run one test through pytest's protocol: its status, and the name of the error if it did not pass."""
    from _pytest.runner import runtestprotocol

    _STATE.errors.pop(item.nodeid, None)
    reports = runtestprotocol(item, nextitem=None, log=False)
    error = _STATE.errors.get(item.nodeid, "")
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
) -> list[Any]:
    """Do jobs one after another in a worker process, a new one after each crash or time-out.

    Args:
        jobs: Callables that return JSON values, by custom `[status, error name]`.
        begin: Called first in each worker; `Unusable` from it is the outcome of every job.
        stop_on_failure: Leave the rest as `not_run` after the first job that did not pass.
        cpu_limit_s: Processor seconds of one job.
        wall_limit_s: Wall-clock seconds of one job.

    Returns:
        One value per job.
    """
    results: list[Any] = []
    while len(results) < len(jobs):
        fresh, cause = _worker(jobs, len(results), begin, stop_on_failure, cpu_limit_s, wall_limit_s)
        results.extend(fresh)
        if cause and len(results) < len(jobs):
            results.append([cause, "TimeoutError" if cause == "timeout" else "SystemExit"])
        if stop_on_failure and any(result[0] != "passed" for result in results):
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


def _test_job(item: Any) -> Any:
    return lambda: _outcome(item)


# ------------------------------------------------------------------------------------- the agent's sandbox


def prepare(payload: dict[str, Any]) -> None:
    """Make this fork fit for an agent: no right version of the function, no hidden test, in memory.

    Args:
        payload: `function` (with `source`, the broken text), `visible` (ids of the visible tests) and `files` (path
            to text, written into the working directory).
    """
    install(payload["function"], payload["function"]["source"])
    visible = {identifier: _STATE.items[identifier] for identifier in payload["visible"]}
    _forget_hidden_tests(visible)
    _STATE.prepared = {"function": payload["function"], "items": visible}
    for path, text in payload["files"].items():
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)


def _forget_hidden_tests(visible: dict[str, Any]) -> None:
    """Drop all other tests, and whatever of the test modules the visible ones do not reach by name."""
    visible_functions = {id(_underlying(item)) for item in visible.values()}
    modules: dict[int, types.ModuleType] = {}
    for identifier, item in _STATE.items.items():
        modules.setdefault(id(item.module), item.module)
        function = _underlying(item)
        if isinstance(function, types.FunctionType):
            function.__dict__.pop("pytestmark", None)
            if id(function) not in visible_functions and not function.__code__.co_freevars:
                function.__code__ = _do_nothing.__code__
        if identifier not in visible and getattr(item, "callspec", None) is not None:
            item.callspec.params.clear()
    _STATE.items = visible
    _STATE.session.items = list(visible.values())
    for module in modules.values():
        roots = [_underlying(item) for item in visible.values() if item.module is module]
        classes = [item.cls for item in visible.values() if item.module is module and item.cls is not None]
        _prune(module, roots, classes)


def _underlying(item: Any) -> Any:
    """The plain function behind a test, below classes and decorators."""
    function = item.obj if item.cls is None else getattr(item.cls, item.originalname or item.name, None)
    function = getattr(function, "__func__", function)
    while function is not None and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


def _prune(module: types.ModuleType, functions: list[Any], classes: list[type]) -> None:
    """Delete the globals of a test module that no kept function reaches."""
    namespace = vars(module)
    names: set[str] = set()
    todo: list[Any] = [value.__code__ for value in functions if isinstance(value, types.FunctionType)]
    for cls in classes:
        todo += [cls.__mro__] + [value for value in vars(cls).values()]
    seen: set[int] = set()
    while todo:
        value = todo.pop()
        value = getattr(value, "__func__", value)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, types.FunctionType):
            todo.append(value.__code__)
        elif isinstance(value, types.CodeType):
            todo += [const for const in value.co_consts if isinstance(const, types.CodeType)]
            fresh = [name for name in value.co_names if name in namespace and name not in names]
            names.update(fresh)
            todo += [namespace[name] for name in fresh]
        elif isinstance(value, type) and value.__module__ == module.__name__:
            todo += list(vars(value).values())
        elif isinstance(value, (tuple, list)):
            todo += [entry for entry in value if isinstance(entry, (type, types.FunctionType))]
    kept_values = {id(namespace[name]) for name in names} | {id(cls) for cls in classes}
    for name in list(namespace):
        value = namespace[name]
        is_fixture = type(value).__name__ in ("FixtureFunctionDefinition", "FixtureFunctionMarker")
        if name.startswith("__") or isinstance(value, types.ModuleType) or id(value) in kept_values or is_fixture:
            continue
        del namespace[name]


def visible_tests(payload: Any = None) -> str:
    """Run the visible tests against the working directory's `repair.py`: what `./run_tests` prints."""
    function = _STATE.prepared["function"]
    items = _STATE.prepared["items"]
    try:
        with open(REPAIR_FILE, encoding="utf-8", newline="") as file:
            text = file.read()
    except FileNotFoundError:
        text = None
    except (OSError, UnicodeDecodeError):
        text = "\0"
    if text is None:
        results: list[Any] = [["error", "FileNotFoundError"]] * len(items)
    else:
        results = run([_test_job(item) for item in items.values()], lambda: install(function, text))
    lines = []
    for identifier, (status, error) in zip(items, results, strict=True):
        name = display_name(identifier)
        lines.append(f"{name} ok" if status == "passed" else f"{name} FAILED {error or status}")
    num_failed = sum(status != "passed" for status, _ in results)
    lines.append(f"{num_failed} failed" if num_failed else "all passed")
    return "\n".join(lines) + "\n"


def display_name(identifier: str) -> str:
    """A test's name as agents see it: without file, class and parameters."""
    name = identifier.partition("[")[0].rpartition("::")[2]
    return name[:MAX_NAME_CHARACTERS].rstrip("_")


# ------------------------------------------------------------------------------------- the grader's sandbox


class _Stranger:
    """Equal to nothing but itself."""


class _Canary:
    """A test that must fail: it asserts that some value the function returned equals a value it never saw.

    An honest function's values do not. A function that returns objects equal to everything, and one that makes
    pytest report success, betray themselves: the canary passes.
    """

    def __init__(self, objects: list[types.FunctionType], probe: Any) -> None:
        self.objects = objects
        self.probe = probe
        self.captured: list[Any] = []

    def watch(self) -> None:
        """Run one test again and keep what the function returns or yields."""
        codes = {value.__code__ for value in self.objects}

        def profile(frame: Any, event: str, value: Any) -> None:
            if event == "return" and frame.f_code in codes and len(self.captured) < MAX_CAPTURED_VALUES:
                self.captured.append(value)

        stranger = _Stranger()
        sys.setprofile(profile)
        _outcome(self.probe)
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
        return _outcome(pytest.Function.from_parent(parent, name=name, callobj=self.function))


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


def grade(payload: dict[str, Any]) -> dict[str, Any]:
    """Judge a repaired text by visible and hidden tests.

    Args:
        payload: `function` (with `source`), `text`, `tests` (ids), `probe` (the test the canary watches) and
            optionally `stop_on_failure`.

    Returns:
        `statuses` (id to status; `passed` is the only good one), `errors` (id to error name) and `canary`, whose
        status must be `failed`. A text that reaches for the insides of the process is not run: `tampering` says why.
    """
    function = payload["function"]
    missing = [identifier for identifier in payload["tests"] if identifier not in _STATE.items]
    if missing:
        raise LookupError(f"the image does not hold the test {missing[0]}")
    if not find_function(function):
        raise LookupError(f"the image does not hold the function {function['qualname']} of {function['file']}")
    if reason := tampering(payload["text"], function["source"]):
        statuses = dict.fromkeys(payload["tests"], "not_run")
        return {"statuses": statuses, CANARY: "not_run", "num_results": len(statuses) + 1, "tampering": reason}
    jobs = [_test_job(_STATE.items[identifier]) for identifier in payload["tests"]]
    canary = _Canary(find_function(function), _STATE.items[payload["probe"]])
    results = run(
        [*jobs, canary.outcome],
        lambda: install(function, payload["text"]),
        stop_on_failure=payload.get("stop_on_failure", True),
    )
    names = [*payload["tests"], CANARY]
    return {
        "statuses": {name: result[0] for name, result in zip(names[:-1], results, strict=False)},
        "errors": {name: result[1] for name, result in zip(names, results, strict=True) if result[1]},
        CANARY: results[-1][0],
        "num_results": len(results),
    }


# ------------------------------------------------------------------------------------- the factory's sandbox

_UNREPEATABLE = frozenset(
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


def survey(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """Run every test once and say which functions it enters.

    Args:
        payload: `functions`: list of `file`, `qualname`, `line`; `max_calls`: calls one test may make.

    Returns:
        Per test, in collection order: `id`, `status`, `calls` (a repeatable measure of its cost) and `functions`
        (indices into the argument). Tests that sleep, fork, start threads, read the clock or draw random numbers
        have status `unrepeatable`.
    """
    codes: dict[types.CodeType, int] = {}
    for index, function in enumerate(payload["functions"]):
        codes.update(dict.fromkeys((value.__code__ for value in find_function(function)), index))

    def job(identifier: str) -> Any:
        return lambda: _survey_one(identifier, codes, payload["max_calls"])

    results = run([job(identifier) for identifier in _STATE.items])
    rows = []
    for identifier, result in zip(_STATE.items, results, strict=True):
        calls, entered = (result[2], result[3]) if len(result) == 4 else (0, [])
        rows.append({"id": identifier, "status": result[0], "calls": calls, "functions": entered})
    return rows


def _survey_one(identifier: str, codes: dict[types.CodeType, int], max_calls: int) -> list[Any]:
    item = _STATE.items[identifier]
    entered: set[int] = set()
    num_calls = 0
    unrepeatable = False
    runner = os.path.dirname(os.path.abspath(sys.modules["_pytest"].__file__ or ""))

    def profile(frame: Any, event: str, value: Any) -> None:
        nonlocal num_calls, unrepeatable
        if event == "call":
            num_calls += 1
            index = codes.get(frame.f_code)
            if index is not None:
                entered.add(index)
            if num_calls > max_calls:
                raise _TooMuchWork
        elif event == "c_call":
            num_calls += 1
            if value.__name__ in _UNREPEATABLE and not frame.f_code.co_filename.startswith(runner):
                unrepeatable = True

    sys.setprofile(profile)
    try:
        status, error = _outcome(item)
    except _TooMuchWork:
        status, error = "too_long", ""
    finally:
        sys.setprofile(None)
    if num_calls > max_calls:
        status = "too_long"
    return ["unrepeatable" if unrepeatable else status, error, num_calls, sorted(entered)]


def verdicts(payload: dict[str, Any]) -> list[list[list[str]]]:
    """Run tests against many texts.

    Args:
        payload: `cases`: each with `function` (with `source`), `text`, `tests` (ids) and `stop_on_failure`.

    Returns:
        Per case, per test: `[status, error name]`.
    """
    results = []
    for case in payload["cases"]:
        function, text = case["function"], case["text"]

        def begin(function: dict[str, Any] = function, text: str = text) -> None:
            install(function, text)

        jobs = [_test_job(_STATE.items[identifier]) for identifier in case["tests"]]
        results.append(run(jobs, begin, stop_on_failure=case["stop_on_failure"]))
    return results
