"""What sandboxes cost on this machine: starts, commands, harness calls, file accesses."""

from __future__ import annotations

import asyncio
import functools
import os
import resource
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

from swerve.sandboxes.pool import SandboxPool
from swerve.sandboxes.protocol import Sandbox, SandboxImage

_HARNESS = """
def visible_tests(payload):
    return "test ok\\nall passed"


def nothing(payload):
    return payload
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Cost of one operation.

    Attributes:
        name: What was done.
        count: How often.
        wall_s: Wall-clock seconds of all of them.
        cpu_s: CPU seconds of all of them, host and sandboxes; the kernel's own deferred work is not in it.
        load: Processes that wanted a core when the measurement began, other work of the machine included.
    """

    name: str
    count: int
    wall_s: float
    cpu_s: float
    load: float

    @property
    def wall_ms_each(self) -> float:
        """Wall-clock milliseconds of one."""
        return 1e3 * self.wall_s / self.count

    @property
    def cpu_ms_each(self) -> float:
        """CPU milliseconds of one."""
        return 1e3 * self.cpu_s / self.count


async def bench(count: int = 200, *, concurrency: int = 8, distributions: tuple[str, ...] = ()) -> list[Measurement]:
    """Measure every operation `count` times, one sandbox start at a time and `concurrency` at a time.

    Args:
        count: Repetitions.
        concurrency: Sandboxes open at once in the concurrent measurement.
        distributions: Made importable in the image, and imported by nobody: they only add mounts.

    Returns:
        One measurement per operation.

    Raises:
        MachineError: If this machine cannot provide sandboxes.
    """
    with tempfile.TemporaryDirectory() as directory:
        harness = Path(directory) / "harness.py"
        harness.write_text(_HARNESS, encoding="utf-8")
        harness.chmod(0o644)
        image = SandboxImage(name="bench", harness=harness, distributions=distributions)
        operations: dict[str, Callable[[Sandbox], Awaitable[object]]] = {
            "exec true": lambda sandbox: sandbox.exec("true", 10.0),
            "exec ./run_tests": lambda sandbox: sandbox.exec("./run_tests", 10.0),
            "call": lambda sandbox: sandbox.call("nothing", 1, 10.0),
            "write_file": lambda sandbox: sandbox.write_file("file.py", "x = 1\n"),
            "read_file": lambda sandbox: sandbox.read_file("run_tests"),
        }
        results = []
        async with SandboxPool([image], max_concurrent_starts=concurrency) as pool:

            async def start_and_close() -> None:
                await (await pool.start("bench")).close()

            sandbox = await pool.start("bench")
            for name, at_once in (("start+close", 1), (f"start+close, {concurrency} at once", concurrency)):
                results.append(await _measure(name, count, start_and_close, pool, at_once))
            for name, operation in operations.items():
                await operation(sandbox)
                results.append(await _measure(name, count, functools.partial(operation, sandbox), pool))
        return results


async def _measure(
    name: str, count: int, operation: Callable[[], Awaitable[object]], pool: SandboxPool, concurrency: int = 1
) -> Measurement:
    load = os.getloadavg()[0]
    cpu_before, began = _cpu_s(pool), time.monotonic()
    remaining = iter(range(count))

    async def work() -> None:
        for _ in remaining:
            await operation()

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(work())
    wall_s = time.monotonic() - began
    return Measurement(name=name, count=count, wall_s=wall_s, cpu_s=_cpu_s(pool) - cpu_before, load=load)


def _cpu_s(pool: SandboxPool) -> float:
    """CPU seconds of this process and of everything below the pool's containers, dead or alive."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    tick = os.sysconf("SC_CLK_TCK")
    total = own.ru_utime + own.ru_stime
    pending = list(pool.process_ids())
    while pending:
        pid = pending.pop()
        try:
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
            pending += [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
        except (FileNotFoundError, ProcessLookupError):
            continue
        total += sum(int(field) for field in fields[11:15]) / tick
    return total
