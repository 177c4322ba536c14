import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from dataclasses import replace
from pathlib import Path

import pytest

from swerve.sandboxes import (
    CallError,
    Mount,
    Sandbox,
    SandboxImage,
    SandboxLostError,
    SandboxPool,
)
from swerve.types import MachineError, SwerveError

from .conftest import HARNESS, LIMITS, Marked, Run

_SOURCE = Path(__file__).parents[3] / "src"
_LAUNCHER = """
import asyncio, sys
from pathlib import Path
from swerve.sandboxes import Mount, SandboxImage, SandboxPool

async def main():
    harness, source, target, warm = sys.argv[1:]
    mount = Mount(source=Path(source), target=target)
    image = SandboxImage(name="test", harness=Path(harness), harness_args={"answer": target}, mounts=(mount,))
    async with SandboxPool([image], warm=warm == "warm") as pool:
        sandboxes = [await pool.start("test") for _ in range(3)]
        await sandboxes[0].exec("setsid sleep 1000 & echo", 20.0)
        requests = [sandboxes[0].exec("sleep 1000", 1000.0), sandboxes[1].call("hang", "1000", 1000.0)]
        tasks = [asyncio.ensure_future(request) for request in requests]
        await asyncio.sleep(0.1)
        print(await sandboxes[2].call("echo", "ready", 20.0), flush=True)
        await asyncio.gather(*tasks)

asyncio.run(main())
"""


def children_of(pool: SandboxPool) -> list[int]:
    """Host ids of the zygotes: the child of each bwrap."""
    lists = [Path(f"/proc/{pid}/task/{pid}/children").read_text().split() for pid in pool.process_ids()]
    return [int(child) for children in lists for child in children]


def test_nothing_is_left_after_close(run: Run, marked: Marked) -> None:
    async def use() -> None:
        async with SandboxPool([marked.image], LIMITS) as pool:
            sandbox = await pool.start("test")
            before = len(marked.processes())
            for _ in range(3):
                other = await pool.start("test")
                await other.exec("setsid sleep 1000 & (sleep 1000 &); true", 20.0)
                assert len(marked.processes()) > before
                await other.close()
                await other.close()
                assert len(marked.processes()) == before
                with pytest.raises(SandboxLostError):
                    await other.exec("true", 1.0)
            await sandbox.exec("sleep 1000 &", 20.0)
        with pytest.raises(SandboxLostError):
            await sandbox.read_file("x")
        with pytest.raises(MachineError):
            await pool.start("test")

    run(use())
    marked.assert_gone()


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.03, 0.3])
def test_a_cancelled_start_leaves_nothing(run: Run, marked: Marked, warm: bool, delay_s: float) -> None:
    async def cancel() -> None:
        pool = SandboxPool([marked.image], LIMITS, warm=warm)
        if warm:
            await pool.warm_up()
        before = len(marked.processes())
        start = asyncio.create_task(pool.start("test", "hang"))
        await asyncio.sleep(delay_s)
        start.cancel()
        with pytest.raises(asyncio.CancelledError):
            await start
        assert len(marked.processes()) == before
        assert await (await pool.start("test")).call("echo", 1, 20.0) == 1
        await pool.close()

    run(cancel())
    marked.assert_gone()


def test_images_may_be_more_than_the_containers_kept(run: Run) -> None:
    names = ["a", "b", "c", "d"]

    async def use() -> None:
        async with SandboxPool([SandboxImage(name=name) for name in names], LIMITS, max_containers=2) as pool:
            await pool.warm_up()
            assert len(pool.process_ids()) == 2
            held = await pool.start("a")
            for name in (*names[1:], *names):
                sandbox = await pool.start(name)
                assert (await sandbox.exec("echo works", 20.0)).output == "works\n"
                await sandbox.close()
                assert len(pool.process_ids()) == 2
            assert (await held.exec("echo still there", 20.0)).output == "still there\n"
            boxes = await asyncio.gather(*(pool.start(name) for name in names * 3))
            assert len(pool.process_ids()) == 4
            assert [(await box.exec("echo $$", 20.0)).exit_code for box in boxes] == [0] * 12

    run(use())


def test_closing_the_pool_while_a_container_starts(run: Run, marked: Marked) -> None:
    async def close() -> None:
        pool = SandboxPool([marked.image], LIMITS)
        start = asyncio.create_task(pool.start("test"))
        await asyncio.sleep(0.05)
        await pool.close()
        with pytest.raises((MachineError, asyncio.CancelledError)):
            await start

    run(close())
    marked.assert_gone(within_s=1.0)


@pytest.mark.parametrize(
    ("warm", "how"),
    [("warm", signal.SIGKILL), ("one-shot", signal.SIGKILL), ("warm", signal.SIGTERM), ("warm", signal.SIGINT)],
)
def test_a_killed_launcher_leaves_nothing(marked: Marked, tmp_path: Path, warm: str, how: signal.Signals) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    source = str(marked.image.mounts[0].source)
    with subprocess.Popen(
        [sys.executable, "-c", _LAUNCHER, str(HARNESS), source, marked.marker, warm],
        env=os.environ | {"PYTHONPATH": str(_SOURCE), "TMPDIR": str(scratch)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as launcher:
        assert launcher.stdout is not None
        assert launcher.stdout.readline() == "ready\n"
        assert len(marked.processes()) >= 7
        launcher.send_signal(how)
        launcher.wait(20)
    marked.assert_gone(within_s=10.0)
    assert list(scratch.iterdir()) == []


@pytest.mark.parametrize("delay_s", [0.05, 0.15, 0.3, 0.6])
def test_a_launcher_killed_while_a_harness_loads_leaves_nothing(marked: Marked, tmp_path: Path, delay_s: float) -> None:
    lazy = tmp_path / "lazy.py"
    lazy.write_text("import time\ntime.sleep(1000)\n")
    lazy.chmod(0o644)
    source = str(marked.image.mounts[0].source)
    command = [sys.executable, "-c", _LAUNCHER, str(lazy), source, marked.marker, "warm"]
    with subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(_SOURCE)}) as launcher:
        deadline = time.monotonic() + 20.0
        while not Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        time.sleep(delay_s)
        launcher.kill()
    time.sleep(0.05)
    marked.assert_gone(within_s=10.0)


def test_a_dead_container_is_reported_and_started_again(run: Run, marked: Marked) -> None:
    async def use() -> None:
        async with SandboxPool([marked.image], LIMITS) as pool:
            sandbox = await pool.start("test")
            pending = asyncio.create_task(sandbox.exec("sleep 1000", 1000.0))
            await asyncio.sleep(0.05)
            for pid in children_of(pool):
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(SandboxLostError):
                await pending
            with pytest.raises(SandboxLostError):
                await sandbox.call("echo", 1, 1.0)
            await sandbox.close()
            again = await asyncio.gather(*(pool.start("test") for _ in range(3)))
            assert [await other.call("echo", 1, 20.0) for other in again] == [1, 1, 1]
            assert len(pool.process_ids()) == 1

    run(use())
    marked.assert_gone()


def test_a_container_that_dies_at_once_is_not_started_for_ever(run: Run, marked: Marked) -> None:
    async def use() -> None:
        async with SandboxPool([marked.image], LIMITS) as pool:
            await pool.warm_up()
            for pid in children_of(pool):
                os.kill(pid, signal.SIGKILL)
            with pytest.raises(MachineError):
                await pool.start("test")

    run(use())
    marked.assert_gone()


def test_many_starts_and_ends_at_once(run: Run, marked: Marked) -> None:
    async def use() -> None:
        async with SandboxPool([marked.image], LIMITS, max_concurrent_starts=16) as pool:
            sandboxes = await asyncio.gather(*(pool.start("test", number) for number in range(60)))
            answers = await asyncio.gather(*(sandbox.call("state", None, 60.0) for sandbox in sandboxes))
            assert [answer["prepared"] for answer in answers] == list(range(60))
            await asyncio.gather(*(sandbox.close() for sandbox in sandboxes))
            assert len(marked.processes()) == 2

    run(use())
    marked.assert_gone()


async def _everything(sandbox: Sandbox) -> list[object]:
    """What a sandbox answers to a bit of everything."""
    results: list[object] = [
        await sandbox.exec(command, 20.0)
        for command in (
            "pwd; ls -la --time-style=+; id; env | sort",
            "./run_tests; echo $?",
            "ls / /opt /run /dev; cat /etc/passwd /proc/self/mountinfo | cut -d' ' -f5-6 | sort",
            "grep -E 'Cap|NoNew|Uid|Gid' /proc/self/status; ulimit -a",
            "sleep 0.1 & exit 3",
            "cat no-such-file",
        )
    ]
    results.append(await sandbox.exec("echo x; sleep 1000", 0.3))
    await sandbox.write_file("sub/file", "text")
    results.append(await sandbox.read_file("sub/file"))
    for entry in ("state", "fail", "descriptors", "die"):
        try:
            results.append(len(str(await sandbox.call(entry, [1], 20.0))))
        except CallError as error:
            results.append((type(error).__name__, str(error)))
    return results


def test_a_warm_sandbox_answers_like_a_fresh_one(run: Run, marked: Marked) -> None:
    async def use(warm: bool) -> list[object]:
        async with SandboxPool([marked.image], LIMITS, warm=warm) as pool:
            used = await pool.start("test", "someone else's")
            await used.exec("echo dirt > /tmp/dirt", 20.0)
            sandbox = await pool.start("test", "x = 'bug'")
            await used.close()
            answers = await _everything(sandbox)
            await sandbox.close()
            return answers

    warm, fresh = run(use(True)), run(use(False))
    assert warm == fresh
    marked.assert_gone()


def test_faults_of_the_input_are_told_in_one_line(run: Run, marked: Marked, tmp_path: Path) -> None:
    async def told(image: SandboxImage, name: str = "test", prepare: object = None) -> str:
        async with SandboxPool([image], LIMITS) as pool:
            with pytest.raises(SwerveError) as caught:
                await pool.start(name, prepare)
            assert caught.value.exit_code == 2
            return str(caught.value)

    broken = tmp_path / "broken.py"
    broken.write_text("import no_such_module\n")
    broken.chmod(0o644)
    private = tmp_path / "private.py"
    private.write_text("")
    private.chmod(0o600)
    image = marked.image
    missing = Path("/no/such/harness.py")
    mounts = (Mount(source=tmp_path, target="/testbed/x"),)
    assert run(told(image, "other")) == "no sandbox image is named other; there are test"
    assert "cannot be loaded: ModuleNotFoundError: No module named 'no_such_module'" in run(
        told(replace(image, harness=broken))
    )
    assert run(told(replace(image, harness=missing))) == f"sandbox image test: {missing}: No such file or directory"
    assert run(told(replace(image, mounts=mounts))) == "sandbox image test: nothing can be mounted at /testbed/x"
    assert "distribution no-such-thing is not installed" in run(told(replace(image, distributions=("no-such-thing",))))
    assert "test: prepare: ValueError: cannot prepare" in run(told(image, prepare="raise"))
    if os.geteuid() == 0:
        assert run(told(replace(image, harness=private))).endswith(f"chmod -R o+rX {private}")
    with pytest.raises(SwerveError, match="two sandbox images are named test"):
        SandboxPool([image, image])
    marked.assert_gone()


def test_what_cannot_be_hidden_is_an_error(run: Run, marked: Marked) -> None:
    async def use() -> None:
        async with SandboxPool([replace(marked.image, hide=("/no/such",))], LIMITS) as pool:
            with pytest.raises(MachineError, match="cannot hide /no/such"):
                await pool.start("test")

    run(use())
    marked.assert_gone()


def test_slow_starts_end_in_an_error(run: Run, marked: Marked, tmp_path: Path) -> None:
    lazy = tmp_path / "lazy.py"
    lazy.write_text("import time\ntime.sleep(1000)\n")
    lazy.chmod(0o644)

    async def use() -> None:
        async with SandboxPool([replace(marked.image, harness=lazy)], preload_timeout_s=0.5) as pool:
            with pytest.raises(MachineError, match=r"not ready after 0\.5 s"):
                await pool.start("test")
        async with SandboxPool([marked.image], start_timeout_s=2.0) as pool:
            await pool.warm_up()
            with pytest.raises(MachineError, match="not ready after 2 s"):
                await pool.start("test", "hang")
            assert len(marked.processes()) == 2

    run(use())
    marked.assert_gone()


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


@pytest.mark.skipif(os.geteuid() != 0, reason="these tests already run as an ordinary user")
def test_an_ordinary_user_can_do_the_same(marked: Marked) -> None:
    """The same program, started by a user without privileges (by a Python that user may run)."""
    drop = ["setpriv", "--reuid", "12321", "--regid", "12321", "--clear-groups"]
    packages = sysconfig.get_path("purelib")
    in_usr = "import numpy, pathlib, sys; assert pathlib.Path(sys.executable).resolve().is_relative_to('/usr')"
    for python in (sys.executable, "/usr/bin/python3"):
        check = [*drop, python, "-c", f"{in_usr}; assert sys.version_info[:2] == {sys.version_info[:2]}"]
        with contextlib.suppress(OSError):
            if subprocess.run(check, cwd="/", env={"PYTHONPATH": packages}, capture_output=True).returncode == 0:
                break
    else:
        pytest.skip("no Python of this version that another user may run")
    public = Path("/tmp") / marked.marker.rpartition("/")[2]
    names = ("__init__.py", "types.py", "config", "telemetry", "sandboxes")
    copies = {_SOURCE / "swerve" / name: public / "swerve" / name for name in names}
    copies |= {HARNESS: public / "harness.py", marked.image.mounts[0].source: public / "answers"}
    try:
        for source, target in copies.items():
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        command = [python, "-c", _LAUNCHER, str(public / "harness.py"), str(public / "answers"), marked.marker, "warm"]
        with subprocess.Popen(
            [*drop, *command],
            env={"PYTHONPATH": f"{public}:{packages}", "PATH": "/usr/bin:/bin"},
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as launcher:
            assert launcher.stdout is not None
            assert launcher.stderr is not None
            assert launcher.stdout.readline() == "ready\n", launcher.stderr.read()
            assert len(marked.processes()) >= 7
            launcher.kill()
        marked.assert_gone(within_s=10.0)
    finally:
        shutil.rmtree(public)
