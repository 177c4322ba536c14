"""What sandboxes and gradings cost: starts, commands, calls, gradings, and many sandboxes at once.

A start is a whole one: sandbox created, a workspace of 200 files laid over it copy-on-write, one of them changed, all
destroyed. A grading is a fresh sandbox, the repair put in place, every test, the canary, and the sandbox's end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from swerve.cli.benches import Figure

_NUM_FILES = 200
_HARNESS = """
def visible_tests(payload):
    return "test ok\\nall passed"


def nothing(payload):
    return payload
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares sizes."""
    sizes = {
        "starts": (400, "sandboxes started and closed"),
        "operations": (200, "commands, calls and file accesses of each kind"),
        "gradings": (40, "gradings of each kind"),
        "concurrency": (8, "of these at once"),
        "held": (256, "sandboxes held at once"),
        "hold-s": (60, "seconds they are held"),
    }
    for name, (default, text) in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, metavar="INT", help=f"{text} (%(default)s)")


def measure(arguments: argparse.Namespace) -> Iterator[Figure]:
    """Measure everything; see `swerve bench sandbox --help`."""
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory() as directory:
        workspace = _workspace(Path(directory) / "workspace")
        yield runner.run(_starts(workspace, arguments.starts, arguments.concurrency))
        yield from runner.run(_operations(Path(directory), arguments.operations))
        for family, name, target in (("functions", "pytest", 10.0), ("mini", "direct calls", 30.0)):
            yield runner.run(_gradings(family, name, target, arguments.gradings, arguments.concurrency))
        yield from runner.run(_held(workspace, arguments.held, arguments.hold_s, arguments.concurrency))


def _workspace(directory: Path) -> Path:
    for number in range(_NUM_FILES):
        path = directory / f"package{number % 10}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"x = {number}\n" * 50, encoding="utf-8")
    for path in (directory.parent, directory, *directory.rglob("*")):
        path.chmod(0o755 if path.is_dir() else 0o644)
    return directory


async def _starts(workspace: Path, count: int, concurrency: int) -> Figure:
    from swerve.sandboxes import SandboxImage, SandboxPool

    async with SandboxPool([SandboxImage(name="bench", workspace=workspace)]) as pool:
        await pool.warm_up()

        async def once(number: int) -> None:
            sandbox = await pool.start("bench")
            await sandbox.write_file("package0/module0.py", "x = 1\n")
            await sandbox.close()

        seconds = await _timed(once, count, concurrency)
    return Figure(
        name="create, overlay, write, destroy", value=count / seconds, unit="per second", count=count,
        seconds=round(seconds, 3), target=150.0,
    )  # fmt: skip


async def _operations(directory: Path, count: int) -> list[Figure]:
    """What an agent asks of one sandbox, one after the other."""
    from swerve.sandboxes import SandboxImage, SandboxPool

    harness = directory / "harness.py"
    harness.write_text(_HARNESS, encoding="utf-8")
    harness.chmod(0o644)
    figures = []
    async with SandboxPool([SandboxImage(name="bench", harness=harness)]) as pool:
        sandbox = await pool.start("bench")
        operations: dict[str, Callable[[int], Awaitable[Any]]] = {
            "command": lambda number: sandbox.exec("true", 10.0),
            "command of the persistent shell": lambda number: sandbox.shell("true", 10.0),
            "./run_tests": lambda number: sandbox.exec("./run_tests", 10.0),
            "harness call": lambda number: sandbox.call("nothing", number, 10.0),
            "file written": lambda number: sandbox.write_file("file.py", f"x = {number}\n"),
            "file read": lambda number: sandbox.read_file("run_tests"),
        }
        for name, operation in operations.items():
            seconds = await _timed(operation, count, 1)
            figures.append(
                Figure(name=name, value=count / seconds, unit="per second", count=count, seconds=round(seconds, 3))
            )
    return figures


async def _gradings(family: str, name: str, target: float, count: int, concurrency: int) -> Figure:
    from swerve.cli.composition import environment_of
    from swerve.environments import Grader, load_tasks, shipped_file
    from swerve.sandboxes import SandboxPool
    from swerve.types import MachineError

    tasks = load_tasks(shipped_file(family, "validation"))
    tasks = [task for task in tasks if task.image == tasks[0].image]
    environment = environment_of(tasks)
    async with SandboxPool(environment.images()) as pool:
        await pool.warm_up()
        grader = Grader(pool, environment)

        async def once(number: int) -> None:
            task = tasks[number % len(tasks)]
            verdict = await grader.grade(task, environment.gold_work(task))
            if verdict.reward != 1.0:
                raise MachineError(f"{task.id}: its own repair was graded {verdict.reward}: {verdict.error}")

        seconds = await _timed(once, count, concurrency)
    return Figure(
        name=f"grading, {name}", value=count / seconds, unit="per second", count=count, seconds=round(seconds, 3),
        target=target,
    )  # fmt: skip


async def _held(workspace: Path, count: int, hold_s: float, concurrency: int) -> list[Figure]:
    from swerve.sandboxes import Sandbox, SandboxImage, SandboxPool

    image = SandboxImage(name="bench", workspace=workspace)
    async with SandboxPool([image], max_concurrent_starts=concurrency) as pool:
        await pool.warm_up()
        before = _memory_bytes(pool.process_ids())
        began = time.monotonic()
        sandboxes: list[Sandbox] = []

        async def start(number: int) -> None:
            sandbox = await pool.start("bench")
            sandboxes.append(sandbox)
            await sandbox.shell("echo 'x = 2' >>package0/module0.py", 60.0)

        await _timed(start, count, concurrency)
        memory = (_memory_bytes(pool.process_ids()) - before) / count
        await asyncio.sleep(hold_s)
        answers = await asyncio.gather(
            *(sandbox.shell("tail -n 1 package0/module0.py", 120.0) for sandbox in sandboxes)
        )
        num_alive = sum(answer.output == "x = 2\n" for answer in answers)
        seconds = round(time.monotonic() - began, 3)
    return [
        Figure(name="memory per live sandbox, a shell in it", value=memory / 2**20, unit="MiB", count=count,
               seconds=seconds),
        Figure(name=f"alive of {count} held for {hold_s:g} s", value=num_alive, unit="sandboxes", count=count,
               seconds=seconds, target=float(count)),
    ]  # fmt: skip


async def _timed(once: Callable[[int], Awaitable[Any]], count: int, concurrency: int) -> float:
    """Seconds that `count` of something take, so many at once."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await once(number)

    began = time.monotonic()
    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    return time.monotonic() - began


def _memory_bytes(roots: list[int]) -> int:
    """Memory of processes and all below them, what they share counted in shares; 0 of those not ours to read."""
    total, pending = 0, list(roots)
    while pending:
        pid = pending.pop()
        with contextlib.suppress(OSError):
            pending += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split())
            for line in Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines():
                if line.startswith("Pss:"):
                    total += int(line.split()[1]) << 10
    return total
