"""What sandboxes cost on this machine: starts, commands, harness calls, file accesses."""

from __future__ import annotations

import asyncio
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
        image = SandboxImage(name="bench", harness=harness, distributions=distributions)
        results = []

        async def repeat(name: str, operation: Callable[[Sandbox], Awaitable[object]]) -> None:
            async with SandboxPool([image]) as pool:
                sandbox = await pool.start("bench")
                await operation(sandbox)
                results.append(await _measure(name, count, lambda: operation(sandbox), pool))

        async def start_and_close(pool: SandboxPool) -> None:
            await (await pool.start("bench")).close()

        async with SandboxPool([image]) as pool:
            await start_and_close(pool)
            results.append(await _measure("start+close", count, lambda: start_and_close(pool), pool))
        async with SandboxPool([image], max_concurrent_starts=concurrency) as pool:
            await start_and_close(pool)
            name = f"start+close, {concurrency} at once"
            results.append(await _measure(name, count, lambda: start_and_close(pool), pool, concurrency))
        await repeat("exec true", lambda sandbox: sandbox.exec("true", 10.0))
        await repeat("exec ./run_tests", lambda sandbox: sandbox.exec("./run_tests", 10.0))
        await repeat("call", lambda sandbox: sandbox.call("nothing", 1, 10.0))
        await repeat("write_file", lambda sandbox: sandbox.write_file("file.py", "x = 1\n"))
        await repeat("read_file", lambda sandbox: sandbox.read_file("run_tests"))
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
