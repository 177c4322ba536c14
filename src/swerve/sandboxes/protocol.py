"""What a sandbox is: images, limits, results, errors, and the protocol every backend fulfils."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from swerve.types import MachineError, SwerveError

Json: TypeAlias = Any
"""Whatever `json.dumps` writes and `json.loads` reads back equal."""

WORKDIR = "/testbed"
"""Working directory of every command and call; the only place of the sandbox whose files the host reads and writes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxLimits:
    """What one sandbox may use. No limit here is of time: an inner default never cuts the budget of a request.

    Attributes:
        memory_bytes: Address space of each process; with Docker and Podman also the memory of all together.
        disk_bytes: All writable files together; they live in memory.
        file_bytes: Largest file a process may write.
        num_processes: Processes and threads at once. Needs Linux 5.14; older kernels do not enforce it.
        num_open_files: Open files of each process.
        cpus: Cores of all processes together; only Docker and Podman keep to it.
        cpu_s: CPU seconds of each process, or `None` for as many as the request's time allows.
        output_bytes: Output kept of one command: its head and its tail; the cut between them is told.
        read_bytes: Largest file `read_file` returns.
    """

    memory_bytes: int = 1 << 30
    disk_bytes: int = 64 << 20
    file_bytes: int = 32 << 20
    num_processes: int = 64
    num_open_files: int = 256
    cpus: float = 1.0
    cpu_s: int | None = None
    output_bytes: int = 16_384
    read_bytes: int = 1 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A host file or directory visible, read-only, in the sandboxes of an image.

    Attributes:
        source: Path on the host.
        target: Absolute path in the sandbox.
    """

    source: Path
    target: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SandboxImage:
    """What sandboxes are started from.

    Attributes:
        name: Unique in its pool.
        root: What the backend makes the root file system of: a SIF file or an unpacked directory, for Docker and
            Podman a reference. Empty is the machine's own system, or what `sandbox.images` of the recipe has under the
            image's name.
        workspace: Host directory whose files are in the workspace of every sandbox at the start, as copies.
        harness: A Python file, importable without Swerve, or `None`. It may define `preload(args)`, run once before
            any sandbox exists; `prepare(payload)`, run in each sandbox before any command; `visible_tests(payload)`,
            behind the workspace's `./run_tests` (returns text, or `{"text": ..., "exit_code": ...}`); and entries
            `name(payload) -> JSON`, each call of which runs in a fork of its own with the workspace as its directory.
        harness_args: JSON value handed to `preload`.
        mounts: Read-only files and directories.
        python_paths: Host directories the harness, and Python in the sandbox, may import from.
        distributions: Installed distributions importable in the sandbox, with what they require.
        hide: Absolute sandbox paths covered by something empty once the harness is loaded, so that no command reads
            them. The harness file itself always is.
    """

    name: str
    root: str = ""
    workspace: Path | None = None
    harness: Path | None = None
    harness_args: Json = None
    mounts: tuple[Mount, ...] = ()
    python_paths: tuple[Path, ...] = ()
    distributions: tuple[str, ...] = ()
    hide: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class ExecResult:
    """What a command did.

    Attributes:
        output: Standard output and error interleaved, cut in the middle where it is too long.
        exit_code: Of the shell; 128 + n if signal n ended it, 124 after a timeout.
        timed_out: The time ran out, and every process of the sandbox was killed.
    """

    output: str
    exit_code: int
    timed_out: bool = False


class SandboxFileError(SwerveError):
    """A workspace file cannot be read or written. The message is fit for an agent's eyes."""


class SandboxLostError(MachineError):
    """The sandbox, or the container it lives in, died under the caller: infrastructure, never a verdict."""


class CallError(SwerveError):
    """A harness call brought no result. The subclass says why."""


class CallRaisedError(CallError):
    """The entry raised; `detail` is its traceback.

    Attributes:
        detail: Traceback inside the sandbox, or empty.
    """

    def __init__(self, message: str, detail: str = "") -> None:
        super().__init__(message)
        self.detail = detail


class CallExitedError(CallError):
    """The called code ended its process without a result."""


class CallCrashedError(CallError):
    """A signal ended the call."""


class CallTimeoutError(CallError):
    """The call ran out of time; every process of the sandbox was killed."""


class Sandbox(Protocol):
    """One isolated, throw-away workspace. Requests may overlap; a timeout of one kills the processes of all."""

    async def exec(self, command: str, timeout_s: float) -> ExecResult:
        """Run a shell command in the workspace.

        Args:
            command: Handed to `bash -c`, or `sh -c` where there is no bash; standard input is empty.
            timeout_s: Wall-clock seconds after which every process of the sandbox is killed.
        """
        ...

    async def shell(self, command: str, timeout_s: float) -> ExecResult:
        """Run a command in the sandbox's one persistent shell, after those asked for before it.

        Directory, variables, functions and background processes carry over. When the shell ends, by `exit` or by a
        timeout, the next command starts a new one in the workspace. Where there is no bash, this is `exec`.

        Args:
            command: What bash evaluates; standard input is empty.
            timeout_s: Wall-clock seconds after which every process of the sandbox is killed.
        """
        ...

    async def read_file(self, path: str) -> str:
        """Return a workspace file's text.

        Args:
            path: Relative to the workspace, or absolute inside it.

        Raises:
            SandboxFileError: If there is no such regular UTF-8 file inside the workspace.
        """
        ...

    async def write_file(self, path: str, text: str, mode: int = 0o644) -> None:
        """Write a workspace file, whole or not at all, making its directories.

        Raises:
            SandboxFileError: If the path lies outside the workspace or the disk is full.
        """
        ...

    async def call(self, entry: str, payload: Json, timeout_s: float) -> Json:
        """Run an entry of the image's harness in a fork of the sandbox's interpreter.

        Raises:
            CallRaisedError: The entry raised or does not exist.
            CallExitedError: It ended its process without a result.
            CallCrashedError: A signal ended it.
            CallTimeoutError: The time ran out.
        """
        ...

    async def close(self) -> None:
        """Kill everything and wait until it is gone. Idempotent."""
        ...


async def read_files(sandbox: Sandbox, paths: Iterable[str]) -> dict[str, str | None]:
    """Files as the agent left them; those it removed, or made unreadable, are missing."""
    files: dict[str, str | None] = {}
    for path in paths:
        with contextlib.suppress(SandboxFileError):
            files[path] = await sandbox.read_file(path)
    return files
