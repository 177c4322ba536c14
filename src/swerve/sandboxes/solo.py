"""Host side of backends whose every container is one sandbox: a process, its guest at the other end of its streams."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import os
import signal
import socket
import subprocess
import tarfile
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import BinaryIO, Protocol, cast

from swerve.sandboxes.channel import Channel, RemoteSandbox
from swerve.sandboxes.plan import ContainerPlan
from swerve.sandboxes.protocol import WORKDIR, Json, SandboxImage, SandboxLimits, SandboxLostError
from swerve.sandboxes.reaper import Leftovers, forget, record
from swerve.types import MachineError, SwerveError

_EXIT_GRACE_S = 5.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """How one sandbox is started.

    Attributes:
        command: Runs until its standard input ends.
        environment: The whole environment of that command, not of the sandbox.
        config: The guest's first frame.
        leftovers: What may be left behind if this process is killed.
        complaints: Remedy by a word that the command says when it cannot start.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str]
    config: Mapping[str, Json]
    leftovers: Leftovers = field(default_factory=Leftovers)
    complaints: Mapping[str, str] = field(default_factory=dict)


class SoloBackend(Protocol):
    """A way to start containers of one sandbox each."""

    @property
    def name(self) -> str:
        """Value of `sandbox.backend` in a recipe."""
        ...

    def check(self) -> None:
        """Raise `MachineError`, with a remedy, if this machine cannot do it."""
        ...

    def launch(self, image: SandboxImage, limits: SandboxLimits) -> Launch:
        """Say how a sandbox of an image is started; may take long and runs in a thread."""
        ...


def guest_config(image: SandboxImage, limits: SandboxLimits, plan: ContainerPlan) -> dict[str, Json]:
    """First frame of a guest that lives in a container of its own.

    What is to be hidden is not mounted, as nobody inside could cover it: it is copied in, and deleted again.
    """
    hidden = {mount.target: mount.source for mount in image.mounts if mount.target in image.hide}
    trees = {target: archive(source) for target, source in hidden.items()}
    if image.workspace is not None:
        trees[WORKDIR] = archive(image.workspace)
    return {
        "limits": asdict(limits),
        "workdir": WORKDIR,
        "service_parent": "/tmp",
        "harness": plan.harness,
        "harness_args": image.harness_args,
        "python_paths": plan.python_paths,
        "environment": plan.environment,
        "inherit": True,
        "trees": trees,
        "remove": list(hidden),
    }


def archive(directory: Path) -> str:
    """The files of a directory as a tar archive, in base 64; owners and times are left out."""

    def anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.uid = member.gid = member.mtime = 0
        member.uname = member.gname = ""
        return member

    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as file:
        file.add(directory, ".", filter=anonymous)
    return base64.b64encode(data.getvalue()).decode()


class SoloSandbox(RemoteSandbox):
    """A sandbox that is all of its container. Made by `start`."""

    def __init__(self, image: SandboxImage, launch: Launch, channel: Channel) -> None:
        super().__init__(image.name, channel)
        self._launch = launch
        self._process: subprocess.Popen[bytes] | None = None
        self._errors: BinaryIO | None = None
        self._record: Path | None = None
        self._is_ready = False

    @property
    def process_id(self) -> int | None:
        """The host's process id of the command, or `None` once it is gone."""
        return None if self._process is None else self._process.pid

    async def prepare(self, payload: Json) -> None:
        """See `RemoteSandbox.prepare`."""
        await super().prepare(payload)
        self._is_ready = True

    def spawn(self) -> socket.socket:
        """Start the command; returns the host's end of its standard streams."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._errors = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - closed in close()
        self._record = record(self._launch.leftovers)
        try:
            self._process = subprocess.Popen(
                self._launch.command,
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=self._errors,
                start_new_session=True,
                env=dict(self._launch.environment),
                cwd="/",
            )
        except OSError as error:
            ours.close()
            self._sweep()
            raise MachineError(f"cannot start {self._launch.command[0]}: {error.strerror}") from None
        finally:
            theirs.close()
        return ours

    def complaint(self) -> str:
        """What the command said on its standard error, and what to do about it."""
        assert self._errors is not None
        self._errors.seek(0)
        told = " ".join(self._errors.read(4096).decode("utf-8", "replace").split())
        remedy = next((remedy for word, remedy in self._launch.complaints.items() if word in told), "")
        return f"{told}; {remedy}" if remedy else told

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self._channel.close()
        await asyncio.shield(asyncio.get_running_loop().run_in_executor(None, self._end))

    def _end(self) -> None:
        """The guest ends when its standard input does, and its container with it; help where that is not so."""
        process, self._process = self._process, None
        if process is None:
            return
        try:
            process.wait(_EXIT_GRACE_S if self._is_ready else 0.0)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self._sweep()

    def _sweep(self) -> None:
        if self._errors is not None:
            self._errors.close()
        self._launch.leftovers.sweep()
        if self._record is not None:
            forget(self._record)


async def start(
    backend: SoloBackend, image: SandboxImage, limits: SandboxLimits, prepare: Json, timeout_s: float
) -> SoloSandbox:
    """Start a sandbox and prepare it.

    Args:
        backend: How.
        image: What from.
        limits: What it may use.
        prepare: Payload of the harness's `prepare`, or `None`.
        timeout_s: Wall-clock seconds it may take, its harness's `preload` included.

    Raises:
        SwerveError: The image's files or its harness are at fault, or `prepare` raised.
        MachineError: The machine cannot provide it, or time ran out.
    """
    loop = asyncio.get_running_loop()
    launch = await loop.run_in_executor(None, backend.launch, image, limits)
    channel = Channel(f"sandbox of image {image.name}")
    sandbox = SoloSandbox(image, launch, channel)
    ours = sandbox.spawn()
    try:
        async with asyncio.timeout(timeout_s):
            await loop.create_connection(lambda: channel, sock=ours)
            channel.send(dict(launch.config))
            await sandbox.prepare(prepare)
    except BaseException as error:
        ours.close()
        told = sandbox.complaint() if isinstance(error, SandboxLostError) else ""
        await sandbox.close()
        name = f"sandbox image {image.name}"
        if isinstance(error, TimeoutError):
            raise MachineError(f"{name}: a sandbox was not ready after {timeout_s:g} s") from None
        if channel.lost_kind == "harness":
            raise SwerveError(f"{name}: {image.harness} cannot be loaded: {error}") from None
        if told:
            raise SandboxLostError(f"{name}: {backend.name} did not start it: {told}") from None
        raise
    return sandbox
