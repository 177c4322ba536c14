"""Runs the tests of a `mini` task; lives inside the sandbox, not inside Swerve.

The file stands alone: standard library only, no import of `swerve`. A test is one line, `NAME: CALL == VALUE`, where
the value of a hidden test is a digest: the repaired text shares a process with this file's memory, and must find
nothing there that it could return. Tests run in a child, a new one after each that ended or hung it; what comes back
are literals, and the comparison is made here, type by type. A test has a budget of lines, so a repair that loops for
ever fails the same way every time.
"""

# Descriptors and signals throughout; pathlib would only cost its import.
# ruff: noqa: PTH123

from __future__ import annotations

import ast
import hashlib
import json
import os
import select
import signal
import sys
import time
from typing import Any

REPAIR_FILE = "repair.py"
CANARY = "canary"
DIGEST = "sha256:"
MAX_LINES_RUN = 20_000
WALL_LIMIT_S = 3.0
MAX_RESULT_BYTES = 1 << 16

_PREPARED: list[str] = []


def preload(args: dict[str, Any]) -> None:
    """Nothing is needed beyond this file's own imports."""


def prepare(payload: dict[str, Any]) -> None:
    """Make this fork fit for an agent.

    Args:
        payload: `visible` (the visible tests) and `files` (path to text, written into the working directory).
    """
    _PREPARED[:] = payload["visible"]
    for path, text in payload["files"].items():
        with open(path, "w", encoding="utf-8", newline="") as file:
            file.write(text)


def visible_tests(payload: Any = None) -> str:
    """Run the visible tests against the working directory's `repair.py`: what `./run_tests` prints."""
    try:
        with open(REPAIR_FILE, encoding="utf-8", newline="") as file:
            text = file.read()
    except FileNotFoundError:
        results = ["FileNotFoundError"] * len(_PREPARED)
    except (OSError, UnicodeDecodeError):
        results = ["SyntaxError"] * len(_PREPARED)
    else:
        results = outcomes(text, _PREPARED)
    lines = []
    for test, error in zip(_PREPARED, results, strict=True):
        name = test.partition(":")[0]
        lines.append(f"{name} FAILED {error}" if error else f"{name} ok")
    num_failed = sum(bool(error) for error in results)
    lines.append(f"{num_failed} failed" if num_failed else "all passed")
    return "\n".join(lines) + "\n"


def grade(payload: dict[str, Any]) -> dict[str, Any]:
    """Judge a repaired text.

    Args:
        payload: `text` and `tests`.

    Returns:
        `statuses` (test to `passed`, `failed` or `timeout`), `canary` (status of a test that must fail: the first one,
        with a value drawn here) and `num_results`.
    """
    tests = payload["tests"]
    canary = f"{CANARY}: {_split(tests[0])[0]} == {os.urandom(6).hex()!r}"
    *statuses, found = map(_status, outcomes(payload["text"], [*tests, canary]))
    return {"statuses": dict(zip(tests, statuses, strict=True)), CANARY: found, "num_results": len(statuses) + 1}


def outcomes(text: str, tests: list[str]) -> list[str]:
    """Run tests.

    Args:
        text: Source that defines the function.
        tests: Each `NAME: CALL == VALUE`.

    Returns:
        Per test the name of the error it fails with; empty if it passes.
    """
    pairs = [_split(test) for test in tests]
    calls = [call for call, _ in pairs]
    answers: list[dict[str, Any]] = []
    while len(answers) < len(calls):
        fresh, cause = _ask_child(text, calls[len(answers) :])
        answers += fresh
        missing = len(calls) - len(answers)
        # What hangs once would hang again, and has failed already.
        answers += [{"error": cause}] * (missing if cause == "TimeoutError" else min(missing, 1))
    return [_judge(*pair, answer) for pair, answer in zip(pairs, answers, strict=True)]


def _judge(call: str, value: str, answer: dict[str, Any]) -> str:
    """Compare what a call gave with what it should give; the name of the error, or nothing."""
    if answer.get("error"):
        return str(answer["error"])
    try:
        found = ast.literal_eval(answer["value"])
    except (KeyError, ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return "AssertionError"
    if value.startswith(DIGEST):
        return "" if digest(call, found) == value else "AssertionError"
    return "" if canonical(found) == canonical(ast.literal_eval(value)) else "AssertionError"


def digest(call: str, value: Any) -> str:
    """What stands for the value of a hidden test."""
    return DIGEST + hashlib.sha256(f"{call} == {canonical(value)}".encode()).hexdigest()[:24]


def canonical(value: Any) -> str:
    """A text that is equal for equal literals of equal types, whatever the order of a mapping."""
    if isinstance(value, dict):
        return "{" + ", ".join(sorted(f"{canonical(key)}: {canonical(value[key])}" for key in value)) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(canonical, value))})"
    return repr(value)


def _status(error: str) -> str:
    return "timeout" if error == "TimeoutError" else "failed" if error else "passed"


def _split(test: str) -> tuple[str, str]:
    call, _, value = test.partition(": ")[2].rpartition(" == ")
    return call, value


def _ask_child(text: str, calls: list[str]) -> tuple[list[dict[str, Any]], str]:
    """What a child of its own says that calls give: answers in order and, if some are missing, why."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            for call in calls:
                line = json.dumps(_evaluate(text, call)).encode()
                os.write(writer, (line if len(line) < MAX_RESULT_BYTES else b'{"error": "SystemExit"}') + b"\n")
        finally:
            os._exit(0)
    os.close(writer)
    answers: list[dict[str, Any]] = []
    cause, data = "TimeoutError", b""
    deadline = time.monotonic() + WALL_LIMIT_S
    while len(answers) < len(calls) and (left := deadline - time.monotonic()) > 0:
        if not select.select([reader], [], [], left)[0]:
            continue
        part = os.read(reader, MAX_RESULT_BYTES)
        *lines, data = (data + part).split(b"\n")
        answers += map(_answer, lines)
        if not part or len(data) > MAX_RESULT_BYTES:
            cause = "SystemExit"
            break
        if lines:
            deadline = time.monotonic() + WALL_LIMIT_S
    os.close(reader)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return answers[: len(calls)], cause


def _answer(line: bytes) -> dict[str, Any]:
    """One answer of a child; whatever is none counts as its end."""
    try:
        answer = json.loads(line)
    except ValueError:
        answer = None
    return answer if isinstance(answer, dict) else {"error": "SystemExit"}


def _evaluate(text: str, call: str) -> dict[str, str]:
    """Define the function and make the call, within a budget of lines; runs in the child."""
    left = MAX_LINES_RUN

    def trace(frame: Any, event: str, _: Any) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0:
            raise RuntimeError("out of lines")
        return trace

    namespace: dict[str, Any] = {"__name__": "repair"}
    try:
        program = compile(text, REPAIR_FILE, "exec")
        sys.settrace(trace)
        exec(program, namespace)
        value = eval(call, namespace)
        sys.settrace(None)
        return {"value": repr(value)}
    except BaseException as error:
        sys.settrace(None)
        return {"error": "TimeoutError" if left < 0 else type(error).__name__}
