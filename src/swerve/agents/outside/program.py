"""The agent's program as a process tree that can be waited for, and of which nothing is left."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path

from swerve.sandboxes.plan import GUEST_DIR
from swerve.types import MachineError

SUPERVISOR = Path(__file__).with_name("supervisor.py")
_MAX_LINE = 500
_NUM_LINES = 20


class Program:
    """One run of a program."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._lines: deque[str] = deque(maxlen=_NUM_LINES)
        self._reading = [
            asyncio.create_task(_drain(stream, lines))
            for stream, lines in ((process.stderr, self._lines), (process.stdout, None))
        ]

    @classmethod
    async def start(cls, argv: Sequence[str], environment: Mapping[str, str]) -> Program:
        """Start a program under a supervisor that kills its whole tree.

        Args:
            argv: Program and arguments.
            environment: All of its variables.

        Raises:
            MachineError: No process can be started.
        """
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", str(SUPERVISOR), str(GUEST_DIR.parent), *argv),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=dict(environment),
                start_new_session=True,
            )
        except OSError as error:
            raise MachineError(f"cannot start {argv[0]}: {error.strerror}") from None
        return cls(process)

    @property
    def last_line(self) -> str:
        """The last line it wrote to standard error that is not empty."""
        return self._lines[-1] if self._lines else ""

    async def wait(self) -> int:
        """Wait for its end and that of all it started; the exit code."""
        code = await self._process.wait()
        await asyncio.wait(self._reading)
        return code

    async def close(self) -> None:
        """Kill what is left of it, and wait until it is gone. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
            with contextlib.suppress(ConnectionError):
                await self._process.stdin.wait_closed()
        await self.wait()


async def _drain(stream: asyncio.StreamReader | None, lines: deque[str] | None) -> None:
    """Read a stream to its end, whatever the length of its lines; the last ones stay."""
    assert stream is not None
    rest = b""
    while data := await stream.read(1 << 16):
        if lines is not None:
            *whole, rest = (rest + data).split(b"\n")
            lines.extend(filter(None, map(_printable, whole)))
            rest = rest[-_MAX_LINE:]
    if lines is not None and (text := _printable(rest)):
        lines.append(text)


def _printable(line: bytes) -> str:
    return " ".join(line.decode("utf-8", "replace").split())[-_MAX_LINE:]
