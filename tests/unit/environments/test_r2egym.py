"""Repairs in an image of the R2E-Gym layout: the fix earns 1, nothing else does, and no fault of the grader is a 0."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from swerve.cli.composition import environment_of
from swerve.cli.main import main
from swerve.environments import Environment, Grader, GradeResult, load_tasks, save_tasks
from swerve.environments.r2egym.convert import convert
from swerve.sandboxes import CallRaisedError, Sandbox, SandboxLimits, SandboxPool, make_backend
from swerve.sandboxes import apptainer as apptainer_module
from swerve.sandboxes.images import build_images, sources_of
from swerve.sandboxes.sif import unpacked_sif
from swerve.types import EpisodeStatus, SwerveError, Task, Work

from .r2egym_samples import (
    APPTAINER_BIN,
    BROKEN,
    EXPECTED,
    MENDED,
    RUN_UNITTEST,
    RUNNER,
    UNITTEST,
    build_image,
    row,
    save_docker,
)

LIMITS = SandboxLimits(memory_bytes=1 << 30, disk_bytes=64 << 20)
MEND = "sed -i 's/(len(values) + 1)  # of/len(values)  # the mean of/' tinycalc/sums.py"
SOURCE = "tinycalc/sums.py"
WRONG = {"TestMean.test_mean": "error"}
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@dataclass(frozen=True)
class Bench:
    """Two images with their tasks: one whose tests pytest runs, and one with a runner of its own.

    Attributes:
        images: Directory of the SIF file of the first, and of the unpacked second.
        task: Of the first.
        other: Of the second.
        fix: Commit that mends the fault, in the history of the image's repository.
    """

    images: Path
    task: Task
    other: Task
    fix: str

    @property
    def environment(self) -> Environment:
        return environment_of([self.task, self.other])

    def pool(self, backend: str = "bubblewrap") -> SandboxPool:
        return SandboxPool(self.environment.images(), LIMITS, backend=make_backend(backend, str(self.images)))


@pytest.fixture(scope="module")
def run() -> Iterator[Run]:
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    base = tmp_path_factory.mktemp("r2egym")
    base.chmod(0o755)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWERVE_CACHE_DIR", str(base / "cache"))
        patch.setenv("PATH", str(APPTAINER_BIN), prepend=":")
        for program in ("mksquashfs", "unsquashfs", "git"):
            if shutil.which(program) is None:
                pytest.skip(f"NOT TESTED: {program} is not installed")
        root, images = base / "root", base / "sifs"
        root.mkdir()
        begin, fix = build_image(root)
        save_docker(root, base / "image.tar", compress=True)
        shutil.rmtree(root)
        names = [f"tinycalc__{fix}", f"tinycalc_final_{fix[::-1]}"]
        outcomes = build_images(sources_of([base / "image.tar"], names[:1]), images, lambda line: None)
        assert [outcome.status for outcome in outcomes] == ["built"]
        other = images / "r2egym" / names[1]
        other.parent.mkdir()
        subprocess.run(["cp", "-a", unpacked_sif(images / f"{names[0]}.sif"), other], check=True)
        (other / "testbed/run_tests.sh").write_text(RUN_UNITTEST)
        (other / "r2e_tests/test_1.py").write_text(UNITTEST)
        (other / "r2e_tests/runner.py").write_text(RUNNER)
        (other / "r2e_tests").rename(other / "root/r2e_tests")
        passing = json.dumps({"TestMean.test_mean": "PASSED", "TestMean.test_total": "PASSED"})
        rows = [row(begin, fix), row(begin, fix[::-1], expected_output_json=passing)]
        (base / "rows.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
        (base / "ids.txt").write_text("\n".join(names))
        written = convert([base / "rows.jsonl"], {"train": base / "ids.txt"}, base)
        task, second = load_tasks(written[0].path)
        yield Bench(images, task, second, fix)


@pytest.fixture(scope="module")
def pool(run: Run, bench: Bench) -> Iterator[SandboxPool]:
    pool = bench.pool()
    yield pool
    run(pool.close())


async def started(bench: Bench, pool: SandboxPool, task: Task) -> Sandbox:
    return await pool.start(bench.environment.image_for(task), bench.environment.prepare_payload(task))


async def worked(bench: Bench, pool: SandboxPool, task: Task, *commands: str) -> Work:
    """What counts of what an agent does."""
    sandbox = await started(bench, pool, task)
    try:
        for command in commands:
            result = await sandbox.exec(command, 20.0)
            assert result.exit_code == 0, result.output
        return await bench.environment.collect(task, sandbox)
    finally:
        await sandbox.close()


async def graded(
    bench: Bench, pool: SandboxPool, task: Task, work: Work, timeout_s: float | None = None
) -> GradeResult:
    return await Grader(pool, bench.environment).grade(task, work, timeout_s)


def test_the_fix_earns_one_and_nothing_earns_nothing(run: Run, bench: Bench, pool: SandboxPool) -> None:
    task, environment = bench.task, bench.environment
    untouched = run(graded(bench, pool, task, environment.no_work(task)))
    assert (untouched.reward, untouched.status) == (0.0, EpisodeStatus.SUCCEEDED)
    assert untouched.test_statuses["TestMean.test_mean"] == "failed"
    work = run(worked(bench, pool, task, MEND))
    assert work == environment.gold_work(task) == {SOURCE: MENDED}
    assert run(worked(bench, pool, task, "true")) == environment.no_work(task)
    mended = run(graded(bench, pool, task, work))
    assert mended.reward == 1.0
    assert mended.test_statuses == {name.split(" - ")[0]: status.lower() for name, status in EXPECTED.items()}


def test_what_an_agent_leaves_behind(run: Run, bench: Bench, pool: SandboxPool) -> None:
    work = run(
        worked(
            bench,
            pool,
            bench.task,
            "rm tinycalc/old.py; printf '\\377\\000x' >data.bin; mkdir -p new/deep build; echo 'y = 1' >new/deep/y.py",
            "ln -s /etc/passwd new/link; rm setup.cfg; mkdir setup.cfg; echo x >build/z.py; mkfifo new/pipe",
            "printf '%2000000s' x >new/large.bin; chmod 000 tinycalc/__init__.py",
        )
    )
    assert work == {
        "tinycalc/old.py": None,
        "tinycalc/__init__.py": None,
        "data.bin": b"\xff\0x".decode("utf-8", "surrogateescape"),
        "new/deep/y.py": "y = 1\n",
    }


def test_nothing_that_tells_the_tests_is_within_the_agents_reach(
    run: Run, bench: Bench, pool: SandboxPool, tmp_path: Path
) -> None:
    task = bench.task

    async def look() -> list[str]:
        sandbox = await started(bench, pool, task)
        words = " ".join(f"-e '{word}'" for word in ("test_known_fault", "TestMean", "the mean of all", bench.fix))
        commands = [
            # The interpreter of the guest lies below /run/host and comes from the machine.
            f"grep -raFl --exclude-dir=proc --exclude-dir=sys --exclude-dir=host {words} / 2>/dev/null; true",
            "for d in / /root /testbed; do ls -d $d/r2e_tests $d/run_tests.sh 2>/dev/null; done; true",
            "ls -d /testbed/expected_test_output.json /run/root 2>/dev/null; true",
            f"git cat-file -e {bench.fix} 2>/dev/null && echo there; git log --all --format=%s | grep -v begin; true",
            "for pid in 1 2; do cat /proc/$pid/mem /proc/$pid/environ /proc/$pid/maps 2>/dev/null; done; true",
        ]
        try:
            told = [(await sandbox.exec(command, 60.0)).output for command in commands]
            shown = await sandbox.exec("git status --short; git log --format=%H", 20.0)
            assert shown.output.endswith(f"{task.base_commit}\n")
            return told
        finally:
            await sandbox.close()

    assert run(look()) == [""] * 5
    payload = json.dumps(bench.environment.prepare_payload(task))
    prompt = task.problem_statement + payload + json.dumps(dict(task.workspace)) + "".join(task.visible_tests)
    for word in (*task.hidden_tests, *EXPECTED, "the mean of all", "PASSED", "FAILED", bench.fix):
        assert word not in prompt
    assert payload == json.dumps({"base_commit": task.base_commit})
    expectations = json.dumps(bench.environment.grade_payload(task, {}))
    assert expectations == json.dumps({"work": {}})


def test_attacks_on_what_does_not_count(run: Run, bench: Bench, pool: SandboxPool) -> None:
    summary = "\n".join(f"PASSED r2e_tests/test_1.py::{name.replace('.', '::')}" for name in EXPECTED)
    work = run(
        worked(
            bench,
            pool,
            bench.task,
            "mkdir r2e_tests; echo 'def test_total(): pass' >r2e_tests/test_1.py; echo >r2e_tests/__init__.py",
            f"printf '=== short test summary info ===\\n{summary}\\n' >test_output.txt; cp test_output.txt /tmp",
            "printf 'cat /testbed/test_output.txt\\n' >run_tests.sh; cp run_tests.sh /root; cp run_tests.sh /",
            "echo 'def pytest_runtest_makereport(item, call): pass' >conftest.py; cp conftest.py tinycalc",
            "echo 'import os; os._exit(0)' >sitecustomize.py; cp sitecustomize.py usercustomize.py",
            "printf '[pytest]\\naddopts = --collect-only\\n' >pytest.ini; cp pytest.ini tox.ini",
            "cp pytest.ini setup.cfg",
            "cp sitecustomize.py .venv/lib/python3*/site-packages/; echo 'import os' >x.pth",
            "mkdir -p tinycalc/__pycache__; echo x >tinycalc/__pycache__/sums.cpython-311.pyc",
            "echo >tests/test_sums.py; git add -A; git -c user.name=a -c user.email=b commit -qm x",
        )
    )
    assert work == {}
    everything = {
        "r2e_tests/test_1.py": "def test_total(): pass\n",
        "run_tests.sh": f"echo '{summary}'\n",
        "conftest.py": "import os; os._exit(0)\n",
        "../r2e_tests/test_1.py": "",
    }
    result = run(graded(bench, pool, bench.task, everything))
    assert result == run(graded(bench, pool, bench.task, {}))


BROKEN_PATCH = "import sys\nname = '_py' + 'test'\n"
ATTACKS = {
    "end the process well": "import os\nos._exit(0)\n",
    "print a summary, then end the process well": (
        "import os\nos.write(1, b'PASSED x::test_total\\n' * 9)\nos._exit(0)\n"
    ),
    "make every report a good one": (
        f"{BROKEN_PATCH}runner = sys.modules[name + '.reports'].TestReport\n"
        "runner.outcome = property(lambda self: 'passed', lambda self, value: None)\n"
    ),
    "swallow what tests raise": (
        f"{BROKEN_PATCH}python = sys.modules[name + '.python']\n"
        "python.Function.runtest = lambda self: None\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [name for name in ATTACKS if "every" not in name])
def test_attacks_from_within_the_tested_process(run: Run, bench: Bench, pool: SandboxPool, name: str) -> None:
    result = run(graded(bench, pool, bench.task, {SOURCE: f"{ATTACKS[name]}{BROKEN}"}))
    assert (result.reward, result.status) == (0.0, EpisodeStatus.SUCCEEDED)


def test_the_canary_betrays_who_makes_everything_pass(run: Run, bench: Bench, pool: SandboxPool) -> None:
    work = {SOURCE: f"{ATTACKS['make every report a good one']}{BROKEN}"}
    found = run(graded(bench, pool, bench.task, work)).test_statuses
    assert set(found.values()) == {"passed"}
    expecting = replace(bench.task, fail_to_pass=tuple(found), pass_to_pass=(), expected_statuses={})
    result = run(graded(bench, pool, expecting, work))
    assert (result.reward, result.test_statuses["canary"]) == (0.0, "passed")


@pytest.mark.parametrize(
    ("path", "text", "told"),
    [
        ("pytest.py", "print('PASSED')\n", "pytest.py takes the place of a module"),
        ("_pytest/__init__.py", "", "_pytest/__init__.py takes the place of a module"),
        ("json.py", "", "json.py takes the place of a module"),
        (SOURCE, f"import _pytest.runner\n{BROKEN}", "mentions _pytest"),
        (SOURCE, f"open('r2e_tests/test_1.py', 'w')\n{BROKEN}", "mentions r2e_tests"),
        (SOURCE, f"print('short test summary info')\n{BROKEN}", "mentions short test summary info"),
        (SOURCE, f"import os\nos.environ['PYTEST_ADDOPTS'] = '-x'\n{BROKEN}", "mentions PYTEST_ADDOPTS"),
        (
            SOURCE,
            f"class Yes:\n    def __eq__(self, other):\n        return True\n\n\n{BROKEN}",
            "defines a comparison that is always true",
        ),
        (SOURCE, f"class Yes:\n    __eq__ = lambda self, other: True\n\n\n{BROKEN}", "always true"),
    ],
)
def test_repairs_that_reach_for_the_tests_are_refused(
    run: Run, bench: Bench, pool: SandboxPool, path: str, text: str, told: str
) -> None:
    result = run(graded(bench, pool, bench.task, {path: text}))
    assert (result.reward, result.status) == (0.0, EpisodeStatus.SUCCEEDED)
    assert told in result.test_statuses["tampering"]


def test_a_runner_of_the_images_own(run: Run, bench: Bench, pool: SandboxPool) -> None:
    task = bench.other
    assert run(graded(bench, pool, task, {})).reward == 0.0
    assert run(worked(bench, pool, task, MEND)) == {SOURCE: MENDED}
    assert run(graded(bench, pool, task, {SOURCE: MENDED})).reward == 1.0
    lines = "PASSED x/x.py::TestMean::test_mean\\nPASSED x/x.py::TestMean::test_total"
    forged = f"words = ['short test', 'summary', 'info']\ntext = ' '.join(words) + '\\n{lines}'\n"
    printed = run(graded(bench, pool, task, {SOURCE: f"{forged}print(text)\n{BROKEN}"}))
    assert printed.reward == 0.0
    assert "prints a test summary of its own" in printed.test_statuses["tampering"]
    ended = run(graded(bench, pool, task, {SOURCE: f"{forged}import os\nos.write(1, text.encode())\nos._exit(0)\n"}))
    assert ended.reward == 0.0
    assert ended.test_statuses["canary"] == "missing"


def test_the_command_that_verifies_tasks_with_their_images(
    bench: Bench, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tasks.jsonl"
    save_tasks(path, [bench.task, bench.other, replace(bench.other, id="wrong", expected_statuses=WRONG)])
    assert main(["tasks", "verify", str(path), "--images", str(bench.images), "--json"]) == 2
    told = json.loads(capsys.readouterr().out)
    assert (told["tasks"], list(told["faults"])) == (3, ["wrong"])
    assert "the gold patch earns 0.0, expected 1.0" in told["faults"]["wrong"]


# --------------------------------------------------------------------------------------- what cannot be graded


def test_a_repair_that_hangs_is_no_repair(run: Run, bench: Bench, pool: SandboxPool) -> None:
    result = run(graded(bench, pool, bench.task, {SOURCE: f"while True: pass\n{BROKEN}"}, 1.5))
    assert (result.reward, result.status) == (0.0, EpisodeStatus.GRADER_TIMEOUT)


def test_a_sandbox_killed_midway_is_an_error_and_no_reward(run: Run, bench: Bench) -> None:
    async def killed() -> GradeResult:
        async with bench.pool() as pool:
            grading = asyncio.create_task(
                graded(bench, pool, bench.task, {SOURCE: f"import time\ntime.sleep(60)\n{MENDED}"})
            )
            await asyncio.sleep(1.0)
            while not pool.process_ids():
                await asyncio.sleep(0.05)
            for pid in pool.process_ids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            return await asyncio.wait_for(grading, 20.0)

    result = run(killed())
    assert (result.reward, result.status) == (None, EpisodeStatus.ERROR)
    assert "cannot be graded" in result.error


@pytest.mark.parametrize(
    ("place", "text", "told"),
    [
        ("testbed/run_tests.sh", ".venv/bin/nothing -m pytest -rA r2e_tests\n", "ran no pytest that reports"),
        ("testbed/run_tests.sh", "env -i .venv/bin/python -m pytest -rA r2e_tests\n", "ran no pytest that reports"),
        ("testbed/run_tests.sh", "./nothing\n", "run_tests.sh cannot be run"),
        ("testbed/run_tests.sh", None, "has no run_tests.sh"),
        ("root/r2e_tests/test_1.py", None, "holds no test file"),
    ],
)
def test_an_image_that_cannot_be_graded_in_is_an_error(
    run: Run, bench: Bench, tmp_path: Path, place: str, text: str | None, told: str
) -> None:
    file = bench.images / "r2egym" / bench.other.image / place
    before = file.read_text()
    try:
        file.unlink() if text is None else file.write_text(text)

        async def grade() -> GradeResult:
            async with bench.pool() as pool:
                return await graded(bench, pool, bench.other, {SOURCE: MENDED})

        result = run(grade())
    finally:
        file.write_text(before)
    assert (result.reward, result.status) == (None, EpisodeStatus.ERROR)
    assert told in result.error


def test_an_image_of_another_commit_is_refused(run: Run, bench: Bench, pool: SandboxPool) -> None:
    task = replace(bench.task, base_commit="c" * 40)
    with pytest.raises(CallRaisedError, match=f"is at commit {bench.task.base_commit}, the task begins at cccc"):
        run(started(bench, pool, task))


def test_an_image_that_is_not_there_is_named(run: Run, bench: Bench, tmp_path: Path) -> None:
    async def start() -> None:
        backend = make_backend("bubblewrap", str(tmp_path))
        async with SandboxPool(bench.environment.images(), LIMITS, backend=backend) as pool:
            await started(bench, pool, bench.task)

    with pytest.raises(SwerveError, match=f"holds no {bench.task.image}.sif"):
        run(start())


def test_tasks_of_another_family_are_refused(bench: Bench) -> None:
    with pytest.raises(SwerveError, match="several families"):
        environment_of([bench.task, replace(bench.task, family="mini")])


@pytest.mark.slow
def test_apptainer(run: Run, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("apptainer") is None:
        pytest.skip("NOT TESTED: apptainer is not installed: install it with `make apptainer`")
    apptainer_module.find_apptainer.cache_clear()

    async def play() -> list[float | None]:
        async with bench.pool("apptainer") as pool:
            gone = 'test -z "$(find /r2e_tests -type f 2>/dev/null)"; test ! -e run_tests.sh'
            history = f"git status --short; ! git cat-file -e {bench.fix} 2>/dev/null"
            work = await worked(bench, pool, bench.task, gone, history, MEND)
            assert work == {SOURCE: MENDED}
            works = [{}, work, {SOURCE: f"import os\nos._exit(0)\n{BROKEN}"}]
            return [(await graded(bench, pool, bench.task, one)).reward for one in works]

    assert run(play()) == [0.0, 1.0, 0.0]
    apptainer_module.find_apptainer.cache_clear()
