"""The `repository` family: minted from a package made here, solved, attacked, and minted again to the same bytes."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from swerve.cli.main import main
from swerve.environments import Grader, load_tasks
from swerve.environments.archives import fetch
from swerve.environments.cheats import play_all
from swerve.environments.repository import RepositoryEnvironment
from swerve.environments.repository.environment import release_of, without_tests
from swerve.sandboxes import SandboxPool
from swerve.sandboxes.apptainer import find_apptainer
from swerve.types import EpisodeStatus, SwerveError, Task

from ..sandboxes.roots import APPTAINER_BIN, build_root, build_sif, tool

_CORE = """\
\"\"\"Numbers.\"\"\"


# Café: text that is not ASCII, above a function that is.
def clamp(value, low, high):
    if value < low:
        return low
    return high if value > high else value


class Counter:
    def __init__(self):
        self.total = 0

    def add(self, number):
        self.total = self.total + number
        return self.total
"""
_TEXT = """\
import re


def words(text):
    return [word for word in re.split(r"\\W+", text) if word]


def title(text):
    return " ".join(word.capitalize() for word in words(text))
"""
_OLD_TEXT = _TEXT.replace(" if word]", "]")
_OLD_CORE = _CORE.replace("self.total + number", "self.total - number")
_TEST_CORE = """\
import sys
import pytest
from tiny import core

@pytest.mark.parametrize("value", {1, 2, 3, "a"} - {"a"})
def test_clamp_inside(value):
    assert core.clamp(value, 0, 5) == value

@pytest.mark.parametrize("value", [-1, 9])
def test_clamp_outside(value):
    assert core.clamp(value, 0, 5) in (0, 5)

def test_clamp_low():
    assert core.clamp(-1, 0, 5) == 0

class TestCounter:
    def test_add(self):
        counter = core.Counter()
        assert counter.add(2) == 2 and counter.add(3) == 5

    def test_empty(self, fresh):
        assert fresh.total == 0

def test_only_while_somebody_watches():
    assert sys.getprofile() is not None

def test_crashes_when_nobody_watches():
    if sys.getprofile() is None:
        import os
        os._exit(1)

def test_sleeps():
    import time
    time.sleep(0)
"""
_TEST_TEXT = """\
from tiny.text import title, words

def test_words():
    assert words("a b") == ["a", "b"]

def test_words_at_the_end():
    assert words("a b.") == ["a", "b"]

def test_title():
    assert title("some words") == "Some Words"
"""
_CONFTEST = """\
import pytest

@pytest.fixture
def fresh():
    from tiny.core import Counter
    return Counter()
"""
_FILES = {
    "PKG-INFO": "Metadata-Version: 2.1\nName: tiny-package\nVersion: {version}\nLicense: MIT\n",
    "CHANGES.md": "1.1: words no longer ends with an empty word\n",
    "pyproject.toml": "[project]\nname = 'tiny-package'\n",
    "docs/conf.py": "x = 1\n",
    "tiny/__init__.py": "__version__ = '{version}'\n",
    "tiny/core.py": _CORE,
    "tiny/text.py": _TEXT,
    "tiny/data.txt": "data\n",
    "tests/conftest.py": _CONFTEST,
    "tests/test_core.py": _TEST_CORE,
    "tests/test_text.py": _TEST_TEXT,
}
_RECIPE = """
[factory]
per_package = 12
[[package]]
name = "tiny-package"
version = "1.1"
previous_version = "1.0"
"""


def _write_archive(folder: Path, version: str, changes: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(folder / f"tiny_package-{version}.tar.gz", "w:gz") as archive:
        for name, text in (_FILES | changes).items():
            data = text.replace("{version}", version).encode()
            entry = tarfile.TarInfo(f"tiny_package-{version}/{name}")
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))


@pytest.fixture(scope="module")
def minted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder with the task file of a minting, its lock and the archives in their cache."""
    folder = tmp_path_factory.mktemp("minted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWERVE_CACHE_DIR", str(folder / "cache"))
        patch.setenv("PIP_NO_INDEX", "1")
        fetched = folder / "cache" / "archives" / "fetched"
        _write_archive(fetched, "1.1", {})
        _write_archive(fetched, "1.0", {"tiny/text.py": _OLD_TEXT, "tiny/core.py": _OLD_CORE, "CHANGES.md": ""})
        (folder / "recipe.toml").write_text(_RECIPE)
        assert main(["tasks", "mint", "--recipe", f"{folder}/recipe.toml", "--out", f"{folder}/t.jsonl"]) == 0
        yield folder


@pytest.fixture(scope="module")
def tasks(minted: Path) -> list[Task]:
    return load_tasks(minted / "t.jsonl")


def play(task: Task, act: Any) -> Any:
    """Let `act(sandbox, environment, grader)` work in the sandbox that an agent would have."""

    async def run() -> Any:
        environment = RepositoryEnvironment([task])
        async with SandboxPool(environment.images()) as pool:
            sandbox = await pool.start(task.image, environment.prepare_payload(task))
            return await act(sandbox, environment, Grader(pool, environment))

    return asyncio.run(run())


def test_what_is_minted(minted: Path, tasks: list[Task]) -> None:
    origins = [task.provenance for task in tasks]
    assert len(tasks) >= 6 and len({task.id for task in tasks}) == len(tasks)
    undone = [(origin.previous_version, origin.file) for origin in origins if not origin.mutation]
    assert undone == [("1.0", "tiny/__init__.py"), ("1.0", "tiny/core.py"), ("1.0", "tiny/text.py")]
    whole, core, text = (task for task in tasks if not task.provenance.mutation)
    add, at_the_end = "tests/test_core.py::TestCounter::test_add", "tests/test_text.py::test_words_at_the_end"
    assert whole.fail_to_pass == (add, at_the_end)
    assert (core.fail_to_pass, text.fail_to_pass) == ((add,), (at_the_end,))
    for task in tasks:
        assert (task.family, task.workspace, task.provenance.license) == ("repository", {}, "MIT")
        assert task.fail_to_pass and task.pass_to_pass and task.limits.max_turns == 30
        assert not any(word in name for name in task.pass_to_pass for word in ("only_while", "crashes", "sleeps"))
    assert not (minted / "t.journal.jsonl").exists()


def test_the_files_of_a_release(tasks: list[Task]) -> None:
    layout = release_of(tasks[0]).layout
    assert layout.roots == ("tiny/",) and layout.import_paths == (".",)
    assert layout.sources == ("tiny/__init__.py", "tiny/core.py", "tiny/text.py")
    assert set(layout.files) == set(_FILES) - {"PKG-INFO", "CHANGES.md", "docs/conf.py"}
    for path, editable in {
        "tiny/core.py": True, "tiny/new/part.py": True, "tiny/conftest.py": False, "tiny/tests/x.py": False,
        "tests/test_core.py": False, "other.py": False, "tiny/../x.py": False, "/tiny/x.py": False, "pytest.py": False,
    }.items():  # fmt: skip
        assert layout.is_editable(path) == editable, path


def test_nothing_done_fails_and_the_gold_patch_passes(minted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tasks", "verify", f"{minted}/t.jsonl", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["graded"] and told["tasks"] >= 6 and told["faults"] == {}


def test_the_lock_makes_the_same_bytes_even_after_an_interruption(minted: Path) -> None:
    arguments = ["tasks", "mint", "--lock", f"{minted}/t.lock.toml", "--out", f"{minted}/again.jsonl"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("swerve.environments.repository.journal.Journal.remove", lambda self: None)
        assert main(arguments) == 0
    assert (minted / "again.jsonl").read_bytes() == (minted / "t.jsonl").read_bytes()
    journal = minted / "again.journal.jsonl"
    lines = journal.read_bytes().split(b"\n")
    journal.write_bytes(b"\n".join(lines[:6]) + b"\n" + lines[6][:20])
    (minted / "again.jsonl").unlink()
    assert main(arguments) == 0
    assert (minted / "again.jsonl").read_bytes() == (minted / "t.jsonl").read_bytes()
    assert not journal.exists()


def test_the_agent_finds_neither_the_fix_nor_the_hidden_tests(tasks: list[Task]) -> None:
    task = next(task for task in tasks if task.provenance.file == "tiny/text.py" and not task.provenance.mutation)

    async def look(sandbox: Any, environment: Any, grader: Any) -> tuple[str, str, str, str]:
        shown = await sandbox.exec("cat tiny/text.py tests/test_text.py; ls", 20)
        told = "if word\\]|words_at_the_end|longer ends"
        found = await sandbox.exec(f"grep -rlsE '{told}' /opt /run /tmp /dev/shm /testbed 2>/dev/null", 60)
        memory = await sandbox.exec("cat /proc/1/maps /proc/1/mem >/dev/null; git log", 20)
        tests = await sandbox.exec("./run_tests", 60)
        return shown.output, found.output, memory.output, tests.output

    shown, found, memory, tests = play(task, look)
    assert (
        " if word]" not in shown and "def test_words()" in shown and "at_the_end" not in shown and "docs" not in shown
    )
    assert [line for line in found.splitlines() if not line.startswith("/proc/")] == []
    assert "denied" in memory
    assert tests.endswith(f"all {len(task.visible_tests)} passed\n")
    assert task.gold_patch not in task.problem_statement and "test_words_at_the_end" in task.problem_statement


def test_the_agents_work_is_its_changes_to_sources(tasks: list[Task]) -> None:
    task = next(task for task in tasks if task.provenance.file == "tiny/text.py" and not task.provenance.mutation)

    async def repair(sandbox: Any, environment: Any, grader: Any) -> Any:
        await sandbox.exec("sed -i 's/text)]/text) if word]/' tiny/text.py; echo 'x = 1' >tiny/more.py", 20)
        await sandbox.exec("rm tiny/data.txt; ln -s / tiny/l.py; printf '\\377' >tiny/raw.bin", 20)
        await sandbox.exec("echo x >tests/test_new.py; echo y >>tests/test_text.py", 20)
        assert (await sandbox.exec("cd /tmp; python3 -c 'import tiny.text'", 20)).exit_code == 0
        work = await environment.collect(task, sandbox)
        in_the_way = {"tiny/data.txt": "x", "tiny/data.txt/more.py": "x"}
        graded = [await grader.grade(task, one) for one in (work, {"tests/test_text.py": ""}, in_the_way)]
        return work, *graded

    work, solved, only_tests, in_the_way = play(task, repair)
    assert in_the_way.reward == 0.0 and "cannot be laid out" in in_the_way.test_statuses["tampering"]
    assert work == {"tiny/text.py": _TEXT, "tiny/more.py": "x = 1\n", "tiny/data.txt": None, "tiny/raw.bin": "\udcff"}
    assert (solved.reward, solved.status) == (1.0, EpisodeStatus.SUCCEEDED)
    assert set(solved.test_statuses.values()) == {"passed"}
    assert len(solved.test_statuses) == len(task.fail_to_pass + task.pass_to_pass)
    assert only_tests.reward == 0.0


def test_every_attack_on_a_package_is_caught(tasks: list[Task]) -> None:
    task = next(task for task in tasks if task.provenance.mutation and task.provenance.qualname == "clamp")

    async def attack() -> Any:
        environment = RepositoryEnvironment([task])
        async with SandboxPool(environment.images()) as pool:
            return await play_all(task, pool, environment)

    outcomes = asyncio.run(attack())
    assert len(outcomes) > 45
    assert [outcome for outcome in outcomes if not outcome.caught] == []
    assert outcomes[-1].reward == 1.0


def test_an_oracle_earns_its_reward(minted: Path, tasks: list[Task], capsys: pytest.CaptureFixture[str]) -> None:
    file = f"{minted}/t.jsonl"
    for task in (tasks[0], tasks[-1]):
        assert main(["rollout", task.id, "--tasks", file, "--oracle", "--json"]) == 0
        played = json.loads(capsys.readouterr().out)
        assert (played["reward"], played["status"]) == (1.0, "succeeded")
        assert set(played["test_statuses"].values()) == {"passed"}


@pytest.mark.parametrize("backend", ["bubblewrap", pytest.param("apptainer", marks=pytest.mark.slow)])
def test_an_oracle_earns_its_reward_in_a_sif(
    minted: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    backend: str,
) -> None:
    monkeypatch.setenv("PATH", f"{APPTAINER_BIN}:{os.environ['PATH']}")
    if backend == "apptainer":
        tool(backend, "it with `make apptainer`")
    build_sif(build_root(tmp_path / "root"), tmp_path / "images" / "default.sif")
    settings = ["--sandbox.backend", backend, "--sandbox.images", f"{tmp_path}/images"]
    find_apptainer.cache_clear()
    assert main(["rollout", "first", "--tasks", f"{minted}/t.jsonl", "--oracle", "--json", *settings]) == 0
    find_apptainer.cache_clear()
    played = json.loads(capsys.readouterr().out)
    assert (played["reward"], played["status"]) == (1.0, "succeeded")
    shown = played["turns"][0]["observations"][0]
    assert {"pyproject.toml", "run_tests", "tests", "tiny"} <= set(shown.split())
    assert "passed" in played["turns"][2]["observations"][0]


def test_tests_are_cut_out_whole() -> None:
    text = "import x\n\n@x.y\ndef test_a():\n    pass\n\nclass TestB:\n    def test_c(self):\n        pass\n"
    assert without_tests(text, {"test_a"}) == "import x\n\n\nclass TestB:\n    def test_c(self):\n        pass\n"
    assert without_tests(text, {"TestB::test_c"}) == text.replace("def test_c(self):\n        pass", "pass")
    assert without_tests(text, {"test_a", "TestB::test_c"}) is None  # nothing is left to see
    assert without_tests(text, {"TestB::test_inherited"}) is None  # it may be anywhere
    assert without_tests("print 'no Python of today'\n", {"test_a"}) is None
    page = without_tests(text.replace("import x", "x = '\x0c'"), {"test_a"})
    assert page is not None and page.startswith("x = '\x0c'\n\n\nclass")


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ("[factory]\nper_packages = 1\n[[package]]\nname = 'a'", "factory.per_packages: unknown"),
        ("[factory]\nper_package = 0\n[[package]]\nname = 'a'", "factory.per_package: 0: must be at least 1"),
        ("[factory]\nkinds = ['typo']\n[[package]]\nname = 'a'", "factory.kinds: typo"),
        ("[[package]]\nversion = '1'", "package.name: missing"),
        ("[[package]]\nname = 1", "package.name: expected"),
        ("[factory]", "names no"),
        ("[other]", "key other: unknown"),
        ("=", "not TOML"),
    ],
)
def test_recipes_are_read_strictly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], recipe: str, message: str
) -> None:
    (tmp_path / "r.toml").write_text(recipe)
    assert main(["tasks", "mint", "--recipe", f"{tmp_path}/r.toml", "--out", f"{tmp_path}/t.jsonl"]) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.toml"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "--lock", "l"], "one of"),
        ([], "one of"),
        (["a", "a"], "named twice"),
        (["a b"], "expected NAME"),
        (["a", "--num-train", "3"], "--num-train belongs to --family"),
        (["a", "--jobs", "0"], "--jobs 0"),
        (["--lock", "l", "--seed", "2"], "--seed: a lock has settings"),
        (["--family", "mini", "--seed", "2"], "--seed has no effect"),
        (["a", "--per-package", "0"], "per_package: 0"),
    ],
)
def test_contradictions_are_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["tasks", "mint", *arguments, "--out", "/nowhere/t.jsonl"]) == 2
    assert message in capsys.readouterr().err


def test_another_archive_is_refused(minted: Path, tasks: list[Task]) -> None:
    assert fetch("tiny-package==1.1").name == "tiny_package-1.1.tar.gz"
    archive = minted / "cache" / "archives" / "fetched" / "tiny_package-1.1.tar.gz"
    assert hashlib.sha256(archive.read_bytes()).hexdigest() == tasks[0].provenance.archive_sha256
    with pytest.raises(SwerveError, match=r"no source distribution of tiny-package==1\.1 can be fetched"):
        fetch("tiny-package==1.1", "0" * 64)


def test_a_package_at_fault_says_so_and_ends_no_other(
    minted: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fetched = minted / "cache" / "archives" / "fetched"
    with tarfile.open(fetched / "bare-1.0.tar.gz", "w:gz") as archive:
        entry = tarfile.TarInfo("bare-1.0/bare.py")
        archive.addfile(entry, io.BytesIO(b""))
    files = {
        "lacking.py": "def f():\n    return 1\n",
        "test_f.py": "import lacking\n",
        "conftest.py": "import nowhere\n",
    }
    with tarfile.open(fetched / "lacking-1.0.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            entry = tarfile.TarInfo(f"lacking-1.0/{name}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text.encode()))
    arguments = ["tasks", "mint", "--kind", "mutation", "--per-package", "1", "--out", f"{tmp_path}/t.jsonl"]
    assert main([*arguments, "bare==1.0"]) == 2
    assert "bare: ships no tests in its source distribution" in capsys.readouterr().err
    assert main([*arguments, "lacking==1.0", "tiny-package==1.1", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["reports"]
    assert "No module named 'nowhere'" in first["error"] and (second["error"], second["num_tasks"]) == ("", 1)


def test_whole_packages_or_files_are_held_out(
    minted: Path, tasks: list[Task], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["tasks", "split", f"{minted}/t.jsonl", "--out", str(minted)]
    assert main([*arguments, "--by", "package"]) == 2
    assert "all tasks are of one package" in capsys.readouterr().err
    assert main([*arguments, "--by", "file", "--validation-share", "0.3"]) == 0
    train, held = load_tasks(minted / "t_train.jsonl"), load_tasks(minted / "t_validation.jsonl")
    assert sorted(task.id for task in (*train, *held)) == sorted(task.id for task in tasks)
    assert {task.split for task in train} == {"train"} and {task.split for task in held} == {"validation"}
    assert not {task.provenance.file for task in train} & {task.provenance.file for task in held}
