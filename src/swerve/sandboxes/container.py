"""Host side of one container: starts bwrap, asks its zygote for sandboxes, talks to each over a socket of its own.

    Container                             guest
      _control  SOCK_SEQPACKET  ------->  Zygote     start (with a descriptor), kill
                                <-------             ready, failed_preload, failed_start, exited
      Channel  SOCK_STREAM     <------>  Sandbox    one per sandbox: numbered requests and replies

The container ends when the host's end of the control socket closes, whatever the reason; nothing of it is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, cast

from swerve.sandboxes.bubblewrap import container_command, find_bubblewrap
from swerve.sandboxes.channel import Channel, RemoteSandbox
from swerve.sandboxes.plan import plan_container
from swerve.sandboxes.protocol import Json, SandboxImage, SandboxLimits, SandboxLostError
from swerve.types import MachineError, SwerveError

_NAMESPACE_REMEDY = (
    "allow unprivileged user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
    "kernel.apparmor_restrict_unprivileged_userns) and see `swerve doctor`"
)
_EMPTY_FILE = "/run/empty_file"
_FILES = {
    "/etc/passwd": "root:x:0:0::/:/bin/false\nagent:x:1000:1000::/tmp:/bin/sh\n",
    "/etc/group": "root:x:0:\nagent:x:1000:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
    _EMPTY_FILE: "",
}
_EXIT_GRACE_S = 5.0


class ForkedSandbox(RemoteSandbox):
    """A fork of a container's zygote. Made by `Container.start`."""

    def __init__(self, container: Container, number: int, channel: Channel) -> None:
        super().__init__(container.image.name, channel)
        self._container = container
        self._number = number

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self._channel.close()
        await asyncio.shield(self._container.kill(self._number))


class OneShotSandbox(ForkedSandbox):
    """A sandbox that has its container to itself."""

    async def close(self) -> None:
        """See `Sandbox.close`."""
        await super().close()
        await asyncio.shield(self._container.close())


class Container:
    """One bwrap process with a warm interpreter in it, and the sandboxes forked from that."""

    def __init__(self, image: SandboxImage, limits: SandboxLimits, root: Path | None = None) -> None:
        self.image = image
        self._root = root
        self.num_started = 0
        self._limits = limits
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._errors: BinaryIO | None = None
        self._ready: asyncio.Future[None] | None = None
        self._ended: dict[int, asyncio.Future[str]] = {}
        self._numbers = itertools.count(1)
        self._cause = ""

    @property
    def is_alive(self) -> bool:
        """Whether it can start sandboxes."""
        return self._control is not None

    @property
    def is_idle(self) -> bool:
        """Whether it holds no sandbox."""
        return not self._ended

    @property
    def process_id(self) -> int | None:
        """The host's process id of bwrap, or `None` once it is gone."""
        return None if self._process is None else self._process.pid

    # --------------------------------------------------------------------------------------------- life

    async def launch(self, timeout_s: float) -> None:
        """Start bwrap and wait until the harness is loaded.

        Args:
            timeout_s: Wall-clock seconds it may take.

        Raises:
            MachineError: If namespaces, bwrap or memory are missing, or time runs out.
            SwerveError: If the harness cannot be loaded.
        """
        loop = asyncio.get_running_loop()
        self._spawn()
        assert self._control is not None
        self._ready = loop.create_future()
        loop.add_reader(self._control.fileno(), self._receive)
        try:
            async with asyncio.timeout(timeout_s):
                await self._ready
        except TimeoutError:
            await self.close()
            raise MachineError(
                f"sandbox image {self.image.name}: not ready after {timeout_s:g} s; shorten the harness's preload"
            ) from None
        except BaseException:
            await asyncio.shield(self.close())
            raise

    def _spawn(self) -> None:
        plan = plan_container(self.image, self._root)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config = {
            "harness": plan.harness,
            "harness_args": self.image.harness_args,
            "python_paths": plan.python_paths,
            "hide": plan.hide,
            "keep": plan.keep,
            "whole_root": plan.root is not None,
            "has_workspace": "/run/source" in plan.binds,
            "limits": asdict(self._limits),
        }
        names = _FILES if plan.root is None else (_EMPTY_FILE,)
        files = {path: _memory_file(path, _FILES[path].encode()) for path in names}
        config_fd = _memory_file("config", json.dumps(config).encode())
        self._errors = cast(BinaryIO, tempfile.TemporaryFile())  # noqa: SIM115 - closed in close()
        command = container_command(plan, find_bubblewrap(), theirs.fileno(), config_fd, files)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                pass_fds=(theirs.fileno(), config_fd, *files.values()),
                start_new_session=True,
                env={"LC_ALL": "C"},
            )
        except OSError as error:
            ours.close()
            self._errors.close()
            raise MachineError(f"cannot start {command[0]}: {error.strerror}") from None
        finally:
            theirs.close()
            for descriptor in (config_fd, *files.values()):
                os.close(descriptor)
        ours.setblocking(False)
        self._control = ours

    async def close(self) -> None:
        """Kill every sandbox and the container; wait until they are gone. Idempotent."""
        was_ready = self._ready is not None and self._ready.done() and not self._ready.cancelled()
        self._lose("it was closed")
        process, self._process = self._process, None
        if process is None:
            return
        loop = asyncio.get_running_loop()
        try:
            # A zygote that serves ends when the control socket closes; one that still loads its harness is killed.
            await loop.run_in_executor(None, process.wait, _EXIT_GRACE_S if was_ready else 0.0)
        except subprocess.TimeoutExpired:
            await loop.run_in_executor(None, _kill, process)
        finally:
            if self._errors is not None:
                self._errors.close()

    def _lose(self, cause: str) -> None:
        """Close the control socket, on which the zygote ends, and tell everyone who waits."""
        if self._control is None:
            return
        self._cause = cause
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        self._control = None
        for future in self._ended.values():
            if not future.done():
                future.set_result(cause)
        self._ended.clear()
        if self._ready is not None and not self._ready.done():
            self._ready.set_exception(MachineError(self._complaint()))

    def _complaint(self) -> str:
        told = ""
        if self._errors is not None and not self._errors.closed:
            self._errors.seek(0)
            told = " ".join(self._errors.read(4096).decode("utf-8", "replace").split())
        text = f"sandbox image {self.image.name}: the container did not start: {told or self._cause}"
        if any(word in told for word in ("namespace", "uid map", "Operation not permitted", "clone")):
            text = f"{text}; {_NAMESPACE_REMEDY}"
        return text

    # ------------------------------------------------------------------------------------------ control

    def _receive(self) -> None:
        assert self._control is not None
        while True:
            try:
                data = self._control.recv(1 << 16)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                if self._process is not None and self._ready is not None and not self._ready.done():
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self._process.wait(1.0)
                self._lose("its container died")
                return
            self._handle(json.loads(data))
            if self._control is None:
                return

    def _handle(self, message: dict[str, Any]) -> None:
        event = message["event"]
        if event == "ready":
            if self._ready is not None and not self._ready.done():
                self._ready.set_result(None)
        elif event == "failed_preload":
            last = message["message"].strip().splitlines()[-1]
            if self._ready is not None and not self._ready.done():
                error = SwerveError(f"sandbox image {self.image.name}: {self.image.harness} cannot be loaded: {last}")
                error.add_note(message["message"])
                self._ready.set_exception(error)
        else:
            future = self._ended.pop(message["sandbox"], None)
            if future is not None and not future.done():
                future.set_result(message.get("message", ""))

    async def _tell(self, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        data = json.dumps(message).encode()
        while True:
            if self._control is None:
                raise SandboxLostError(f"sandbox image {self.image.name}: {self._cause or 'not started'}")
            try:
                socket.send_fds(self._control, [data], descriptors)
                return
            except BlockingIOError:
                # The zygote is behind: hundreds of messages wait for it.
                await asyncio.sleep(0.005)
            except OSError:
                self._lose("its container died")

    # ---------------------------------------------------------------------------------------- sandboxes

    async def start(self, prepare: Json, timeout_s: float, kind: type[ForkedSandbox]) -> ForkedSandbox:
        """Fork a sandbox and prepare it.

        Args:
            prepare: Payload of the harness's `prepare`, or `None`.
            timeout_s: Wall-clock seconds it may take.
            kind: What to return.

        Raises:
            MachineError: If it cannot be forked or time runs out.
            CallRaisedError: If `prepare` raised.
        """
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        channel = Channel(f"sandbox {number} of image {self.image.name}")
        sandbox = kind(self, number, channel)
        ended: asyncio.Future[str] = loop.create_future()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        try:
            with theirs:
                await self._tell({"op": "start", "sandbox": number}, (theirs.fileno(),))
                self._ended[number] = ended
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(lambda: channel, sock=ours)
                await sandbox.prepare(prepare)
        except BaseException as error:
            channel.close()
            ours.close()
            await asyncio.shield(self.kill(number))
            if isinstance(error, TimeoutError):
                name = self.image.name
                raise MachineError(f"sandbox image {name}: a sandbox was not ready after {timeout_s:g} s") from None
            if isinstance(error, SandboxLostError) and ended.done() and ended.result():
                raise SandboxLostError(f"{error} ({ended.result()})") from None
            raise
        self.num_started += 1
        return sandbox

    async def kill(self, number: int) -> None:
        """Kill one sandbox and wait until all of it is gone. Idempotent."""
        future = self._ended.get(number)
        if future is None:
            return
        with contextlib.suppress(SandboxLostError):
            await self._tell({"op": "kill", "sandbox": number})
        await asyncio.shield(future)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill bwrap's child, process 1 of the container, and so everything in it; bwrap ends after it."""
    try:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text(encoding="ascii").split()
    except OSError:
        children = []
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(child), signal.SIGKILL)
    try:
        process.wait(1.0 if children else 0.0)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _memory_file(name: str, data: bytes) -> int:
    descriptor = os.memfd_create(name)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(descriptor, 0, os.SEEK_SET)
    return descriptor
