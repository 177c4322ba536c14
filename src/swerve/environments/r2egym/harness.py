"""Hides, collects and grades inside an image of the R2E-Gym layout; lives in the sandbox, not in Swerve.

The file stands alone: standard library only, no import of `swerve`. An image holds a repository in /testbed with its
own interpreter in /testbed/.venv, `run_tests.sh` in one of three places and the tests, `r2e_tests`, in another.

    preload          digests of the untouched files; nothing of the tests is read into memory
    prepare          the agent's sandbox: tests and recorded results are deleted, git knows the base commit alone
    collect          what of all that the agent left counts as work
    grade            another sandbox, nothing deleted: work is applied, canaries are planted, run_tests.sh runs

Where `run_tests.sh` runs pytest, a plugin that was loaded before any code under test reports each result over a pipe,
with a secret in front; what is printed counts for nothing. Where it runs something else, what that prints is parsed
strictly.
"""

# The guest has no use for pathlib, whose import costs more than most calls here.
# ruff: noqa: PTH103, PTH106, PTH108, PTH112, PTH114, PTH117, PTH118, PTH120, PTH123, PTH208

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import re
import secrets
import select
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from io import BufferedReader
from typing import Any

TESTBED = "/testbed"
HOME = "/root"
"""Of the user whom images were made by."""
PLACES = ("", HOME, TESTBED)
"""Where images keep the script and the tests, in the order they are looked for."""
SCRIPT, TESTS = "run_tests.sh", "r2e_tests"
HIDDEN = (
    SCRIPT,
    TESTS,
    "expected_test_output.json",
    "execution_result.json",
    "parsed_commit.json",
    "syn_issue.json",
    "modified_files.json",
    "modified_entities.json",
)
"""Names, in any of the places, of what tells the tests, their results or the fix."""
CANARY = "canary"
STATUSES = {"PASSED": "passed", "FAILED": "failed", "ERROR": "error"}
"""Words of a test summary that count, and the status each stands for; skipped and expected failures do not count."""
SUMMARY = "short test summary info"

MAX_FILE_BYTES = 1 << 20
MAX_FILES = 2000
_INTERNAL_ERROR = 3
"""What pytest ends with when it is itself at fault."""
_MAX_LOG_BYTES = 16 << 20
_SEARCH_PATH = (
    f"{TESTBED}/.venv/bin:{HOME}/.venv/bin:{HOME}/.local/bin:{HOME}/.cargo/bin:"
    "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)
_COLOUR = re.compile(r"\x1b\[[0-9;]*m|\r")

_NEVER_DIRECTORIES = frozenset({".git", ".venv", "__pycache__", "tests", "Tests", "test", "Test", TESTS})
_NEVER_NAMES = frozenset(
    {
        *HIDDEN,
        "conftest.py",
        "sitecustomize.py",
        "usercustomize.py",
        "pytest.ini",
        ".pytest.ini",
        "tox.ini",
        "setup.cfg",
        "pyproject.toml",
        "pyvenv.cfg",
    }
)
_NEVER_SUFFIXES = (".pyc", ".pyo", ".pth", ".egg-link", ".so", ".pyd")
_LEFTOVERS = frozenset({"build", "dist", "node_modules", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis"})
"""Directories of what tools leave behind: nothing new in them is anybody's work."""
_WORDS = (
    r"\b_pytest\b",
    r"\bpytest_runtest\w*",
    r"\bPYTEST_(?:CURRENT_TEST|ADDOPTS|PLUGINS)\b",
    r"\br2e_tests\b",
    r"\brun_tests\.sh\b",
    SUMMARY,
)
"""What a repair has no business with, unless the file mentioned it before."""

_PLUGIN = """
import json
import os


def _reporter():
    settings = int(os.environ.pop("SWERVE_RESULTS"))
    told = json.loads(os.pread(settings, 4096, 0).decode())
    os.close(settings)
    for name, value in told["restore"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    descriptor = os.dup(told["descriptor"])
    os.close(told["descriptor"])
    os.set_inheritable(descriptor, False)
    token, owner = told["token"].encode(), os.getpid()

    def tell(*record):
        data = token + json.dumps(record).encode() + b"\\n"
        while data and os.getpid() == owner:
            data = data[os.write(descriptor, data):]

    return tell


_tell = _reporter()
_tell("loaded")


def pytest_runtest_logreport(report):
    _tell("test", report.nodeid, report.when, report.outcome, hasattr(report, "wasxfail"))


def pytest_collectreport(report):
    if report.failed:
        _tell("broken", report.nodeid)


def pytest_sessionfinish(session, exitstatus):
    _tell("end", int(exitstatus))
"""


class _State:
    """What `preload` leaves behind for the forks."""

    def __init__(self) -> None:
        self.base: dict[str, str] = {}


_STATE = _State()


# ----------------------------------------------------------------------------------------- what counts as work


def counts(path: str) -> bool:
    """Whether a file of the repository may be part of a repair: no tests, and nothing that steers how tests run."""
    *directories, name = path.split("/")
    if not _NEVER_DIRECTORIES.isdisjoint(directories) or any(part.endswith(".egg-info") for part in directories):
        return False
    is_test = name.startswith("test_") or name.endswith("_test.py")
    return not is_test and name not in _NEVER_NAMES and not name.endswith(_NEVER_SUFFIXES)


def _files() -> Iterator[str]:
    """Files of the repository that may be part of a repair, relative to it, sorted."""
    for directory, directories, names in os.walk(TESTBED):
        directories[:] = sorted(set(directories) - _NEVER_DIRECTORIES)
        for name in sorted(names):
            path = os.path.relpath(os.path.join(directory, name), TESTBED)
            if counts(path):
                yield path


def _open(path: str) -> BufferedReader | None:
    """A regular file of the repository, or `None` where it is anything else or cannot be read."""
    try:
        descriptor = os.open(os.path.join(TESTBED, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    file = open(descriptor, "rb")  # noqa: SIM115 - closed by who asks
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return file
    file.close()
    return None


def _digest(path: str) -> str | None:
    file = _open(path)
    if file is None:
        return None
    with file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _text(path: str) -> str | None:
    """A file's text, `None` where there is none or too much of it."""
    file = _open(path)
    if file is None:
        return None
    with file:
        data = file.read(MAX_FILE_BYTES + 1)
    return data.decode("utf-8", "surrogateescape") if len(data) <= MAX_FILE_BYTES else None


def preload(args: Any) -> None:
    """Remember what the repository holds before anybody touches it; runs once, before any fork."""
    _STATE.base = {path: digest for path in _files() if (digest := _digest(path)) is not None}


def collect(payload: Any) -> dict[str, str | None]:
    """What an agent did: text of files it changed or added, `None` for those it removed or made something else of.

    Bytes that are no UTF-8 are escaped as lone surrogates. Files of more than `MAX_FILE_BYTES` do not count.
    """
    work: dict[str, str | None] = {}
    present = set()
    for path in _files():
        digest = _digest(path)
        if digest is None:
            continue
        present.add(path)
        known = path in _STATE.base
        if digest == _STATE.base.get(path) or (not known and not _LEFTOVERS.isdisjoint(path.split("/")[:-1])):
            continue
        text = _text(path)
        if text is not None and len(work) < MAX_FILES:
            work[path] = text
    return work | {path: None for path in _STATE.base if path not in present}


# ----------------------------------------------------------------------------------------- the agent's sandbox


def prepare(payload: dict[str, Any]) -> None:
    """Make this sandbox fit for an agent: no hidden test, no recorded result, no commit but the base.

    Args:
        payload: `base_commit`, which the repository must be at unless it is empty.
    """
    _set_environment()
    _find(SCRIPT), _find(TESTS)
    for path in _everywhere(HIDDEN):
        _remove(path)
    _forget_history(payload["base_commit"])


def _set_environment() -> None:
    """Programs of the repository first, as its image means it; pytest loads what the repository's tests want."""
    os.environ["PATH"] = _SEARCH_PATH
    os.environ.pop("PYTEST_DISABLE_PLUGIN_AUTOLOAD", None)
    os.environ.update(PAGER="cat", GIT_PAGER="cat", PIP_PROGRESS_BAR="off", TQDM_DISABLE="1")
    if os.access(HOME, os.R_OK | os.W_OK | os.X_OK):
        os.environ["HOME"] = HOME


def _everywhere(names: tuple[str, ...]) -> list[str]:
    paths = [f"{place}/{name}" for place in PLACES for name in names]
    return [path for path in paths if os.path.lexists(path)]


def _remove(path: str, keep: str = "") -> None:
    """Remove a file, or all files below a directory and, where that can be done, their directories.

    An overlay without user attributes neither removes directories of the image nor makes others in their place.

    Args:
        path: What.
        keep: A directory; those that it has, too, are not touched, so that they can be filled again.
    """
    if not os.path.isdir(path) or os.path.islink(path):
        os.unlink(path)
        return
    for directory, directories, names in os.walk(path, topdown=False):
        for name in directories:
            if os.path.islink(os.path.join(directory, name)):
                names.append(name)
        for name in names:
            os.unlink(os.path.join(directory, name))
        if not keep or not os.path.isdir(os.path.join(keep, os.path.relpath(directory, path))):
            with contextlib.suppress(OSError):
                os.rmdir(directory)


def _find(name: str) -> str:
    found = _everywhere((name,))
    if not found:
        raise RuntimeError(f"the image has no {name} in /, {HOME} or {TESTBED}: it is none of R2E-Gym's")
    return os.path.realpath(found[0])


def _forget_history(base_commit: str) -> None:
    """Leave the commit that is checked out and nothing else in the repository: later ones hold the fix."""
    old, new = f"{TESTBED}/.git", f"{TESTBED}/.git-base"
    if not os.path.isdir(old) or os.path.islink(old) or shutil.which("git") is None:
        if os.path.lexists(old):
            _remove(old)
        return
    head = _git("-C", TESTBED, "rev-parse", "HEAD")
    if base_commit and head != base_commit:
        raise RuntimeError(f"the image's repository is at commit {head}, the task begins at {base_commit}")
    _git("init", "--quiet", "--bare", "--template=", new)
    _git("--git-dir", new, "fetch", "--quiet", "--no-tags", "--depth", "1", f"file://{old}", "HEAD")
    _git("--git-dir", new, "update-ref", "--no-deref", "HEAD", head)
    _git("--git-dir", new, "config", "core.bare", "false")
    os.unlink(f"{new}/FETCH_HEAD")
    _remove(old, keep=new)
    shutil.copytree(new, old, dirs_exist_ok=True)
    shutil.rmtree(new)
    _git("-C", TESTBED, "reset", "--quiet")


def _git(*arguments: str) -> str:
    """Run git without any of the image's or a user's settings, and without asking whose the files are."""
    settings = {"safe.directory": "*", "gc.auto": "0", "init.defaultBranch": "base", "advice.detachedHead": "false"}
    variables = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_COUNT": str(len(settings))}
    for index, (key, value) in enumerate(settings.items()):
        variables |= {f"GIT_CONFIG_KEY_{index}": key, f"GIT_CONFIG_VALUE_{index}": value}
    done = subprocess.run(
        ["git", *arguments], env=os.environ | variables, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )
    if done.returncode != 0:
        told = " ".join(done.stderr.decode("utf-8", "replace").split())[:300]
        raise RuntimeError(f"git {' '.join(arguments)}: {told or done.returncode}")
    return done.stdout.decode().strip()


# ---------------------------------------------------------------------------------------- the grader's sandbox


def grade(payload: dict[str, Any]) -> dict[str, Any]:
    """Judge a repair by the image's tests.

    Args:
        payload: `work`: text by path, `None` for what is to be removed.

    Returns:
        `statuses` (test, as the dataset names it, to status), `canary` (`failed` if every planted test that must fail
        did, and one ran) and `num_results`, the canary's included; or why the repair is refused, under `tampering`.
    """
    _set_environment()
    script, tests = _find(SCRIPT), _find(TESTS)
    work = {path: text for path, text in payload["work"].items() if counts(path)}
    if reason := tampering(work):
        return {"statuses": {}, CANARY: "not_run", "num_results": 0, "tampering": reason}
    _forget_history("")
    for path, text in work.items():
        _apply(path, text)
    with open(script, "rb") as file:
        text = file.read()
    canaries = _plant(tests)
    # As the images are used: the script and the tests lie in the repository while they run.
    if script != f"{TESTBED}/{SCRIPT}":
        with open(f"{TESTBED}/{SCRIPT}", "wb") as file:
            file.write(text)
    if b"pytest" in text:
        records, log = _run(plugin=True)
        if not any(record[0] in ("test", "broken") for record in records) and (
            ["end", _INTERNAL_ERROR] in records or "INTERNALERROR>" in log
        ):
            raise RuntimeError(f"pytest failed before it ran a test: {' '.join(log.split())[-400:]}")
        return _verdict(*_reported(records), canaries)
    _, log = _run(plugin=False)
    if log.count(SUMMARY) > 1:
        return {"statuses": {}, CANARY: "not_run", "num_results": 0, "tampering": "prints a test summary of its own"}
    return _verdict(summary_statuses(log), True, canaries)


def tampering(work: dict[str, str | None]) -> str:
    """What of a repair reaches for how it is tested rather than for the fault; empty if nothing does."""
    for path, text in work.items():
        first = path.partition("/")[0]
        if not os.path.lexists(f"{TESTBED}/{first}") and _shadows(first.removesuffix(".py")):
            return f"{path} takes the place of a module that the tests are run with"
        if text is None:
            continue
        before = _text(path) or ""
        for word in _WORDS:
            found = re.search(word, text)
            if found is not None and re.search(word, before) is None:
                return f"{path} mentions {found.group()}"
        if path.endswith(".py") and _yes_men(text) > _yes_men(before):
            return f"{path} defines a comparison that is always true"
    return ""


def _shadows(name: str) -> bool:
    """Whether a module of this name is the interpreter's own or installed for the tests."""
    if name in sys.stdlib_module_names:
        return True
    libraries = [
        f"{TESTBED}/.venv/lib/{version}/site-packages"
        for version in _entries(f"{TESTBED}/.venv/lib")
        if version.startswith("python")
    ]
    return any(name in {entry.partition(".")[0] for entry in _entries(library)} for library in libraries)


def _entries(directory: str) -> list[str]:
    try:
        return os.listdir(directory)
    except OSError:
        return []


def _yes_men(text: str) -> int:
    """How many `__eq__` of a text answer yes to everything, and `__ne__` no."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0
    answers = {"__eq__": True, "__ne__": False}
    number = 0
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name in answers:
            last = node.body[-1]
            value = last.value if isinstance(last, ast.Return) else None
            number += isinstance(value, ast.Constant) and value.value is answers[node.name]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
            names = {target.id for target in node.targets if isinstance(target, ast.Name)}
            body = node.value.body
            number += any(isinstance(body, ast.Constant) and body.value is answers.get(name, "") for name in names)
    return number


def _apply(path: str, text: str | None) -> None:
    """Write or remove one file of the repository; nothing outside it."""
    target = os.path.join(TESTBED, path)
    parent = os.path.dirname(target)
    if os.path.isabs(path) or ".." in path.split("/") or not (os.path.realpath(parent) + "/").startswith(f"{TESTBED}/"):
        raise RuntimeError(f"{path}: is no plain path of the repository")
    if text is None or os.path.islink(target):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(target)
    if text is not None:
        if os.path.isdir(target):
            _remove(target)
        os.makedirs(parent, exist_ok=True)
        with open(target, "wb") as file:
            file.write(text.encode("utf-8", "surrogateescape"))


def _plant(tests: str) -> set[str]:
    """Copy the tests into the repository, a test that must fail at the end of each file; return those tests' names."""
    target = f"{TESTBED}/{TESTS}"
    if tests != target:
        if os.path.lexists(target):
            _remove(target)
        shutil.copytree(tests, target, ignore=shutil.ignore_patterns("__pycache__", "*.pyc"), dirs_exist_ok=True)
    names = set()
    for name in sorted(os.listdir(target)):
        if re.fullmatch(r"test_.*\.py|.*_test\.py", name):
            case, test = f"Test{secrets.token_hex(6)}", f"test_{secrets.token_hex(6)}"
            code = f"\n\nimport unittest as _{case}\n\n\nclass {case}(_{case}.TestCase):\n"
            code += f"    def {test}(self):\n        self.assertEqual({secrets.randbits(40)}, {secrets.randbits(40)})\n"
            with open(f"{target}/{name}", "a", encoding="utf-8") as file:
                file.write(code)
            names.add(test)
    if not names:
        raise RuntimeError(f"the image's {TESTS} holds no test file")
    return names


def _verdict(statuses: dict[str, str], complete: bool, canaries: set[str]) -> dict[str, Any]:
    found = {name: status for name, status in statuses.items() if not any(canary in name for canary in canaries)}
    planted = {status for name, status in statuses.items() if name not in found}
    canary = "crashed" if not complete else "missing" if not planted else "passed"
    if complete and planted == {"failed"}:
        canary = "failed"
    return {"statuses": found, CANARY: canary, "num_results": len(found) + bool(planted)}


# ------------------------------------------------------------------------------------------------- running tests


def _run(*, plugin: bool) -> tuple[list[list[Any]], str]:
    """Run the script in the repository: records of the plugin, and what was printed.

    The caller's time limit ends it, and every process of the sandbox with it.
    """
    reader, writer = os.pipe()
    settings = os.memfd_create("settings")
    token = secrets.token_hex(16)
    environment = dict(os.environ)
    if plugin:
        directory = tempfile.mkdtemp(prefix=".results-", dir="/tmp")
        module = f"results_{secrets.token_hex(6)}"
        with open(f"{directory}/{module}.py", "w", encoding="ascii") as file:
            file.write(_PLUGIN)
        restore = {name: environment.get(name) for name in ("PYTHONPATH", "PYTEST_PLUGINS")}
        # A variable would stay readable in /proc for as long as the process lives.
        os.write(settings, json.dumps({"descriptor": writer, "token": token, "restore": restore}).encode())
        environment |= {"SWERVE_RESULTS": str(settings), "PYTHONPATH": directory, "PYTEST_PLUGINS": module}
    shell = shutil.which("bash") or "/bin/sh"
    process = subprocess.Popen(
        [shell, SCRIPT],
        cwd=TESTBED,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=(writer, settings) if plugin else (),
        start_new_session=True,
    )
    os.close(writer)
    os.close(settings)
    assert process.stdout is not None
    output = process.stdout.fileno()
    data = _pump(process, [reader, output])
    os.close(reader)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    log = data[output].decode("utf-8", "replace")
    if not plugin and process.returncode in (126, 127):
        raise RuntimeError(f"{SCRIPT} cannot be run: {' '.join(log.split())[-300:]}")
    prefix = token.encode()
    lines = [line[len(prefix) :] for line in data[reader].split(b"\n") if line.startswith(prefix)]
    records = [json.loads(line) for line in lines]
    if plugin and ["loaded"] not in records:
        raise RuntimeError(f"{SCRIPT} ran no pytest that reports its results: {' '.join(log.split())[-300:]}")
    return records, log


def _pump(process: subprocess.Popen[bytes], descriptors: list[int]) -> dict[int, bytes]:
    """Take what a process writes until it has ended; what its children still hold open is not waited for."""
    data = {descriptor: bytearray() for descriptor in descriptors}
    waiting = set(descriptors)
    ended = False
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], 0.0 if ended else 0.05)
        for descriptor in ready:
            chunk = os.read(descriptor, 1 << 16)
            if not chunk:
                waiting.discard(descriptor)
            elif len(data[descriptor]) < _MAX_LOG_BYTES:
                data[descriptor] += chunk
        if ended and not ready:
            break
        ended = process.poll() is not None
    process.wait()
    return {descriptor: bytes(found) for descriptor, found in data.items()}


def _reported(records: list[list[Any]]) -> tuple[dict[str, str], bool]:
    """Status per test by the plugin's records, and whether pytest came to its end."""
    by_node: dict[str, str] = {}
    for kind, *rest in records:
        if kind == "broken":
            by_node[rest[0]] = "error"
        elif kind == "test":
            node, when, outcome, expected_to_fail = rest
            if outcome == "failed":
                by_node[node] = "failed" if when == "call" else by_node.get(node, "error").replace("passed", "error")
            elif outcome == "passed" and when == "call" and not expected_to_fail:
                by_node.setdefault(node, "passed")
    statuses: dict[str, str] = {}
    # A name may stand for several tests; the worst of them counts, as in a summary, which is read from top to bottom.
    for wanted in ("passed", "error", "failed"):
        statuses |= {test_name(node): wanted for node, status in by_node.items() if status == wanted}
    return statuses, any(record[0] == "end" for record in records)


def test_name(node: str) -> str:
    """A test's name in the dataset: its id without the file, joined by dots."""
    return ".".join(node.split("::")[1:]).split(" - ")[0].strip()


def summary_statuses(log: str) -> dict[str, str]:
    """Status per test by the summary that ends a run of pytest with `-rA`; empty where there is none."""
    statuses: dict[str, str] = {}
    _, _, summary = _COLOUR.sub("", log).partition(SUMMARY)
    for line in summary.splitlines():
        word, _, node = line.partition(" ")
        if word in STATUSES and node:
            statuses[test_name(node)] = STATUSES[word]
    return statuses
