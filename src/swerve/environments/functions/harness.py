"""Runs a package's own tests against one replaced function; lives inside the sandbox, not inside Swerve.

The file stands alone but for `pytest_runner` beside it: no import of `swerve`. A sandbox image's warm interpreter
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
# ruff: noqa: PTH118, PTH123

from __future__ import annotations
import __future__

import ast
import contextlib
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import types
from typing import Any

import pytest_runner as runner
from pytest_runner import CANARY, Unusable

REPAIR_FILE = "repair.py"
_FUTURE_FLAGS = 0
for _name in __future__.all_feature_names:
    _FUTURE_FLAGS |= getattr(__future__, _name).compiler_flag


class _State:
    """What `preload` leaves behind for the forks."""

    def __init__(self) -> None:
        self.root = ""
        self.items: dict[str, Any] = {}
        self.functions: dict[tuple[str, str], list[tuple[int, types.FunctionType]]] = {}
        self.session: Any = None
        self.prepared: dict[str, Any] = {}


_STATE = _State()


# ------------------------------------------------------------------------------------------------- preloading


def preload(args: dict[str, Any]) -> None:
    """Import the package and collect its tests; runs once, before any fork.

    Args:
        args: `root` (directory of the source tree), `import_paths` (relative to it), `modules` (dotted names),
            `tests` (relative paths to collect), `test_roots` (relative paths below which nothing is a function to
            repair), `requires` (importable names from outside the tree) and `keep` (ids of the tests to keep, or
            `None` for all).
    """
    root = _STATE.root = os.path.realpath(args["root"])
    runner.set_environment()
    os.chdir(root)
    sys.path[:0] = [os.path.normpath(os.path.join(root, entry)) for entry in args["import_paths"]]
    import pytest

    sys.meta_path.insert(0, runner.OnlyKnownModules(root, runner.TEST_RUNNER_MODULES | frozenset(args["requires"])))
    with open(os.devnull, "w") as null, contextlib.redirect_stdout(null), contextlib.redirect_stderr(null):
        for module in args["modules"]:
            with contextlib.suppress(Exception, SystemExit, pytest.skip.Exception):
                importlib.import_module(module)
        session = _STATE.session = runner.collect(root, args["tests"])
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
        results = runner.run([runner.job_of(item) for item in items.values()], lambda: install(function, text))
    lines = []
    for identifier, (status, error) in zip(items, results, strict=True):
        name = runner.display_name(identifier)
        lines.append(f"{name} ok" if status == "passed" else f"{name} FAILED {error or status}")
    num_failed = sum(status != "passed" for status, _ in results)
    lines.append(f"{num_failed} failed" if num_failed else "all passed")
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------------- the grader's sandbox


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
    if reason := runner.tampering(payload["text"], function["source"]):
        statuses = dict.fromkeys(payload["tests"], "not_run")
        return {"statuses": statuses, CANARY: "not_run", "num_results": len(statuses) + 1, "tampering": reason}
    jobs = [runner.job_of(_STATE.items[identifier]) for identifier in payload["tests"]]
    objects = find_function(function)
    probe = _STATE.items[payload["probe"]]
    canary = runner.Canary(probe, lambda code: any(code is value.__code__ for value in objects))
    results = runner.run(
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
        return lambda: runner.survey(_STATE.items[identifier], codes.get, payload["max_calls"])

    results = runner.run([job(identifier) for identifier in _STATE.items])
    rows = []
    for identifier, result in zip(_STATE.items, results, strict=True):
        calls, entered = (result[2], result[3]) if len(result) == 4 else (0, [])
        rows.append({"id": identifier, "status": result[0], "calls": calls, "functions": entered})
    return rows


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

        jobs = [runner.job_of(_STATE.items[identifier]) for identifier in case["tests"]]
        results.append(runner.run(jobs, begin, stop_on_failure=case["stop_on_failure"]))
    return results
