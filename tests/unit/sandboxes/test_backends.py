"""One contract, every backend: what holds in one sandbox holds in all, and what does not is said here."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from swerve.sandboxes import (
    CallCrashedError,
    CallExitedError,
    CallRaisedError,
    CallTimeoutError,
    Mount,
    Sandbox,
    SandboxFileError,
    SandboxImage,
    SandboxLimits,
    SandboxLostError,
    SandboxPool,
    image_digests,
    make_backend,
    reaper,
)
from swerve.sandboxes import apptainer as apptainer_module
from swerve.sandboxes import docker as docker_module
from swerve.types import MachineError, SwerveError

from .conftest import HARNESS, LIMITS, Run
from .roots import APPTAINER_BIN, build_root, build_sif, podman, tool

LIST_IMAGES = "image ls --no-trunc --format {{.Repository}}:{{.Tag}} {{.ID}}"
# `sif` is bubblewrap with a SIF file, and no Apptainer. The last two start programs that take seconds.
BACKENDS = [
    "bubblewrap",
    "sif",
    "unsafe-local",
    pytest.param("apptainer", marks=pytest.mark.slow),
    pytest.param("docker", marks=pytest.mark.slow),
]


@dataclass(frozen=True)
class Setup:
    """A backend that this machine has, and an image for it."""

    name: str
    images: str
    image: SandboxImage
    marker: str

    @property
    def isolates(self) -> bool:
        return self.name != "unsafe-local"

    def pool(self, limits: SandboxLimits = LIMITS) -> SandboxPool:
        name = "bubblewrap" if self.name == "sif" else self.name
        return SandboxPool([self.image], limits, backend=make_backend(name, self.images))

    def processes(self) -> list[int]:
        """Host ids of processes that were started with the marker."""
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.marker.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
        return found

    def assert_gone(self, within_s: float = 5.0) -> None:
        deadline = time.monotonic() + within_s
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left == []


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("root")
    directory.chmod(0o755)
    return build_root(directory)


@pytest.fixture(scope="module", params=BACKENDS)
def setup(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Setup]:
    name: str = request.param
    base = tmp_path_factory.mktemp(f"backend-{name}")
    base.chmod(0o755)
    marker = f"1000.{uuid.uuid4().int}"
    answers, workspace = base / "answers", base / "workspace"
    for directory in (answers, workspace / "package"):
        directory.mkdir(parents=True)
    (answers / "answer.txt").write_text("forty-two\n")
    (workspace / "package" / "module.py").write_text("x = 1\n")
    (workspace / "kept.txt").write_text("kept\n")
    for path in (answers, *answers.rglob("*"), workspace, *workspace.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    image = SandboxImage(
        name="contract",
        harness=HARNESS,
        harness_args={"answer": "/opt/answers"},
        mounts=(Mount(source=answers, target="/opt/answers"),),
        hide=("/opt/answers",),
        workspace=workspace,
    )
    images = ""
    with contextlib.ExitStack() as stack, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWERVE_CACHE_DIR", str(base / "cache"))
        patch.setenv("SWERVE_SECRET", "hunter2")
        patch.setenv("PATH", str(APPTAINER_BIN), prepend=":")
        if name in ("sif", "apptainer"):
            build_sif(root, base / "sifs" / ("r2egym" if name == "sif" else ".") / "contract.sif")
            images = str(base / "sifs")
            tool("unsquashfs", "squashfs-tools, or `make apptainer`")
        if name == "apptainer":
            apptainer_module.find_apptainer.cache_clear()
            tool("apptainer", "it with `make apptainer`")
        if name == "docker":
            short = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/tmp")))
            directory, reference = podman(short, root)
            patch.setenv("PATH", str(directory), prepend=":")
            docker_module.find_runtime.cache_clear()
            if Path("/usr/local/bin/docker").exists() or Path("/usr/bin/docker").exists():
                (directory / "docker").symlink_to("podman")
            image = replace(image, root=reference)
            images = "unused:"
        yield Setup(name, images, image, marker)
        assert not list((base / "cache" / "sandboxes").glob("*"))
    apptainer_module.find_apptainer.cache_clear()
    docker_module.find_runtime.cache_clear()


@pytest.fixture(scope="module")
def pool(run: Run, setup: Setup) -> Iterator[SandboxPool]:
    pool = setup.pool()
    yield pool
    run(pool.close())
    setup.assert_gone()


@pytest.fixture(scope="module")
def box(run: Run, pool: SandboxPool) -> Iterator[Sandbox]:
    sandbox = run(pool.start("contract", "ready"))
    yield sandbox
    run(sandbox.close())


def say(run: Run, sandbox: Sandbox, command: str) -> str:
    return run(sandbox.exec(command, 20.0)).output


def test_commands(run: Run, box: Sandbox) -> None:
    result = run(box.exec("echo out; echo err >&2; exit 3", 20.0))
    assert (result.output, result.exit_code, result.timed_out) == ("out\nerr\n", 3, False)
    assert run(box.exec("kill -9 $$", 20.0)).exit_code == 137


def test_one_shell_outlives_its_commands(run: Run, box: Sandbox) -> None:
    first = run(box.shell("cd package; export A=1; b=2; f() { echo $A$b$1; }; sleep 1000 &", 20.0))
    assert (first.output, first.exit_code) == ("", 0)
    again = run(box.shell("f 3; cd ..; ls package; cat; false", 20.0))
    assert (again.output, again.exit_code) == ("123\nmodule.py\n", 1)
    assert "syntax error" in run(box.shell("if then", 20.0)).output
    assert run(box.shell("echo still $b; kill %1", 20.0)).output.startswith("still 2\n")
    assert run(box.shell("exit 5", 20.0)).exit_code == 5
    assert run(box.shell("echo new$b; ls package", 20.0)).output == "new\nmodule.py\n"

    async def at_once() -> list[str]:
        results = await asyncio.gather(*(box.shell(f"n=${{n}}{number}; echo $n", 20.0) for number in range(5)))
        return [result.output for result in results]

    assert run(at_once()) == ["0\n", "01\n", "012\n", "0123\n", "01234\n"]


def test_a_timeout_kills_the_tree(run: Run, setup: Setup, box: Sandbox) -> None:
    for ask in (box.exec, box.shell):
        run(box.exec(f"setsid sleep {setup.marker} & echo", 20.0))
        started = time.monotonic()
        result = run(ask(f"(setsid sleep {setup.marker} &); echo begun; sleep {setup.marker}", 0.5))
        assert (result.output, result.exit_code, result.timed_out) == ("begun\n", 124, True)
        assert time.monotonic() - started < 10.0
        setup.assert_gone(within_s=1.0)
        assert run(ask("echo alive", 20.0)).output == "alive\n"


def test_the_environment_is_built_from_nothing(run: Run, box: Sandbox) -> None:
    told = say(run, box, "env")
    assert "hunter2" not in told
    assert "SWERVE_SECRET" not in told
    assert "APPTAINER" not in told and "SINGULARITY" not in told
    names = {line.split("=")[0] for line in told.splitlines()}
    assert {"PATH", "HOME", "LANG", "PYTHONHASHSEED"} <= names
    assert len(names) < 20


def test_files_stay_inside_the_workspace(run: Run, box: Sandbox) -> None:
    run(box.write_file("/testbed/new/file.py", "a = 'ä'\n"))
    assert run(box.read_file("new/file.py")) == "a = 'ä'\n"
    say(run, box, "bash -c 'exec -a ln true'; rm -rf new")
    for path in ("../etc/passwd", "/etc/passwd", "missing", "."):
        with pytest.raises(SandboxFileError):
            run(box.read_file(path))
    with pytest.raises(SandboxFileError):
        run(box.write_file("/etc/new", "x"))


def test_calls(run: Run, box: Sandbox) -> None:
    state = run(box.call("state", {"a": [1, None]}, 20.0))
    assert (state["prepared"], state["calls"], state["payload"]) == ("ready", 1, {"a": [1, None]})
    with pytest.raises(CallRaisedError, match="no such thing"):
        run(box.call("fail", None, 20.0))
    with pytest.raises(CallExitedError, match="5"):
        run(box.call("leave", 5, 20.0))
    with pytest.raises(CallCrashedError):
        run(box.call("die", None, 20.0))
    with pytest.raises(CallExitedError):
        run(box.call("forge", None, 20.0))
    with pytest.raises(CallTimeoutError):
        run(box.call("hang", "1000", 0.5))
    assert say(run, box, "./run_tests; echo $?") == "test_x ok\nall passed\n0\n"


def test_sandboxes_share_nothing_that_is_written(run: Run, setup: Setup, pool: SandboxPool) -> None:
    async def two() -> tuple[str, str]:
        first, second = await pool.start("contract"), await pool.start("contract")
        await first.exec("echo y >>package/module.py; rm kept.txt; mkdir -p deep/er; touch deep/er/new", 20.0)
        seen = [(await one.exec("cat package/module.py; ls", 20.0)).output for one in (first, second)]
        await first.close()
        await second.close()
        return seen[0], seen[1]

    ours, theirs = run(two())
    assert ours.startswith("x = 1\ny\n") and "kept.txt" not in ours
    assert theirs.startswith("x = 1\nkept.txt\n") and "deep" not in theirs
    assert setup.image.workspace is not None
    assert sorted(path.name for path in setup.image.workspace.iterdir()) == ["kept.txt", "package"]
    assert (setup.image.workspace / "package/module.py").read_text() == "x = 1\n"


def test_what_is_hidden_was_there_for_the_harness_only(run: Run, box: Sandbox) -> None:
    state = run(box.call("state", None, 20.0))
    assert state["answer"] == "forty-two\n"
    assert "answer.txt" not in say(run, box, "ls -A /opt/answers; ls -AR . ..")
    assert "forty-two" not in say(run, box, "grep -rs forty-two /opt/answers . ../hidden")


def test_limits(run: Run, setup: Setup, box: Sandbox) -> None:
    told = run(box.exec("head -c 100000 /dev/zero | tr '\\0' x", 20.0)).output
    assert "bytes cut" in told and len(told) < LIMITS.output_bytes + 100
    with pytest.raises(CallRaisedError, match="MemoryError"):
        run(box.call("allocate", LIMITS.memory_bytes * 2, 20.0))
    assert run(box.call("allocate", 1 << 20, 20.0)) == 1 << 20
    assert run(box.exec(f"head -c {LIMITS.file_bytes * 2} /dev/zero >big", 20.0)).exit_code != 0
    assert str(LIMITS.file_bytes) in say(run, box, "ls -l big; rm big").split()
    if setup.isolates:
        bomb = "for i in $(seq 200 2>/dev/null || echo {1..200}); do sleep 1000 & done; echo all"
        assert "fork" in run(box.exec(f"bash -c 'for i in {{1..200}}; do sleep 1000 & done; wait'; {bomb}", 3.0)).output
        assert say(run, box, "echo alive") == "alive\n"


def test_there_is_no_network(run: Run, setup: Setup, box: Sandbox) -> None:
    if not setup.isolates:
        pytest.skip("unsafe-local isolates nothing, and says so")
    interfaces = [line.split(":")[0].strip() for line in say(run, box, "cat /proc/net/dev").splitlines()[2:]]
    assert interfaces == ["lo"]
    assert run(box.call("connect", ["192.0.2.1", 80], 20.0)) == "OSError"


def test_no_privileges_are_left(run: Run, setup: Setup, box: Sandbox) -> None:
    told = dict(line.split(":\t") for line in say(run, box, "grep -E 'Cap|NoNew' /proc/self/status").splitlines())
    assert told["NoNewPrivs"] == "1"
    assert all(int(told[f"Cap{kind}"], 16) == 0 for kind in ("Inh", "Prm", "Eff", "Amb"))


def test_a_cancelled_start_leaves_nothing(run: Run, setup: Setup) -> None:
    """And the next one works."""

    async def cancel(delay_s: float) -> None:
        pool = setup.pool()
        start = asyncio.create_task(pool.start("contract", "hang"))
        await asyncio.sleep(delay_s)
        start.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await start
        await pool.close()
        assert pool.process_ids() == []
        assert set(reaper._directory().glob("*")) == recorded

    recorded = set(reaper._directory().glob("*"))
    before = set(_children())
    for delay_s in (0.0, 0.05, 1.5):
        run(cancel(delay_s))
    assert {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in set(_children()) - before} == {}


def test_a_bad_harness_or_prepare_is_told(run: Run, setup: Setup, tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    harness = tmp_path / "broken.py"
    harness.write_text("import nothing_of_this_name\n")
    harness.chmod(0o644)
    broken = replace(setup, image=replace(setup.image, harness=harness))

    async def start(which: Setup, payload: str | None) -> None:
        async with which.pool() as pool:
            await pool.start("contract", payload)

    with pytest.raises(SwerveError, match=r"broken\.py cannot be loaded: .*nothing_of_this_name"):
        run(start(broken, None))
    with pytest.raises(CallRaisedError, match="cannot prepare"):
        run(start(setup, "raise"))


def test_a_lost_sandbox_is_never_a_result(run: Run, setup: Setup) -> None:
    async def lose() -> None:
        async with setup.pool() as pool:
            sandbox = await pool.start("contract")
            running = asyncio.ensure_future(sandbox.exec("sleep 1000", 1000.0))
            await asyncio.sleep(0.2)
            await sandbox.close()
            with pytest.raises(SandboxLostError):
                await running
            with pytest.raises(SandboxLostError):
                await sandbox.call("echo", 1, 1.0)

    run(lose())


def test_a_killed_launcher_leaves_nothing(setup: Setup, tmp_path: Path) -> None:
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from swerve.sandboxes import SandboxImage, SandboxPool, make_backend\n"
        "name, images, root, marker = sys.argv[1:]\n"
        "async def main():\n"
        "    backend = make_backend(name, images)\n"
        "    async with SandboxPool([SandboxImage(name='contract', root=root)], backend=backend) as pool:\n"
        "        sandbox = await pool.start('contract')\n"
        "        await sandbox.exec(f'setsid sleep {marker} & echo', 20.0)\n"
        "        print('ready', flush=True)\n"
        "        await sandbox.shell(f'sleep {marker}', 1000.0)\n"
        "asyncio.run(main())\n"
    )
    name = "bubblewrap" if setup.name == "sif" else setup.name
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3] / "src"), "TMPDIR": str(scratch)}
    command = [sys.executable, "-c", program, name, setup.images, setup.image.root, setup.marker]
    recorded = set(reaper._directory().glob("*"))
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        assert setup.processes()
        launcher.kill()
    setup.assert_gone(within_s=10.0)
    reaper.reap()
    assert set(reaper._directory().glob("*")) == recorded
    if not setup.isolates:
        assert not list(scratch.glob("swerve-*"))


def _children() -> list[int]:
    return [int(child) for child in Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()]


# ------------------------------------------------------------------------------------------------- refusals


def test_a_backend_that_this_machine_has_not_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    apptainer_module.find_apptainer.cache_clear()
    docker_module.find_runtime.cache_clear()
    with pytest.raises(MachineError, match=r'sandbox\.backend = "apptainer": Apptainer is not installed: install'):
        make_backend("apptainer", "/images")
    with pytest.raises(MachineError, match="neither Docker nor Podman is installed: install"):
        make_backend("docker", "r2e:")
    (tmp_path / "docker").write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon' >&2\nexit 1\n")
    (tmp_path / "docker").chmod(0o755)
    docker_module.find_runtime.cache_clear()
    with pytest.raises(MachineError, match="docker does not answer: Cannot connect to the Docker daemon: install"):
        make_backend("docker", "r2e:")
    apptainer_module.find_apptainer.cache_clear()
    docker_module.find_runtime.cache_clear()


def test_images_are_told_by_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert image_digests("bubblewrap", "") == image_digests("apptainer", str(tmp_path)) == {}
    image = {"source": "a.tar", "image_id": "sha256:1", "sif": "a.sif", "bytes": 3, "sha256": "2"}
    (tmp_path / "images.json").write_text(json.dumps({"images": {"a": image}}))
    assert image_digests("bubblewrap", str(tmp_path)) == image_digests("apptainer", str(tmp_path)) == {"a": "2"}
    runtime = tmp_path / "docker"
    listed = "printf 'r2e:b sha256:4\\nother:c sha256:5\\nr2e:a sha256:3\\n'"
    runtime.write_text(f'#!/bin/sh\n[ "$1" = info ] || [ "$*" = "{LIST_IMAGES}" ] || exit 1\n{listed}\n')
    runtime.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    docker_module.find_runtime.cache_clear()
    assert image_digests("docker", "r2e:") == {"r2e:a": "sha256:3", "r2e:b": "sha256:4"}
    assert image_digests("docker", "") == {}
    runtime.write_text("#!/bin/sh\necho no space >&2\nexit 1\n")
    with pytest.raises(MachineError, match="docker does not list its images: no space"):
        image_digests("docker", "r2e:")
    docker_module.find_runtime.cache_clear()


def test_the_command_line_of_docker_and_podman() -> None:
    """Podman ran it as it stands (the slow tests); Docker documents each of these options with the same meaning."""
    limits = SandboxLimits(memory_bytes=1 << 20, num_processes=7, num_open_files=8, disk_bytes=4096, cpus=0.5)
    assert docker_module.container_arguments("docker", "swerve-1", "r2e:x", limits) == [
        *(
            "docker",
            "run",
            "--rm",
            "--interactive",
            "--pull",
            "never",
            "--name",
            "swerve-1",
            "--label",
            "swerve=sandbox",
        ),
        *("--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *("--pids-limit", "7", "--memory", "1048576", "--cpus", "0.5"),
        *("--ulimit", "nofile=8:8", "--ulimit", "core=0:0"),
        *("--tmpfs", "/tmp:rw,exec,nosuid,nodev,mode=1777,size=4096", "--workdir", "/", "r2e:x"),
    ]
