"""Host side of one container: starts bwrap, asks its zygote for sandboxes, talks to each over a socket of its own.

    Container                             guest.py
      _control  SOCK_SEQPACKET  ------->  Zygote     start (with a descriptor), kill
                                <-------             ready, failed_preload, failed_start, exited
      _Channel  SOCK_STREAM     <------>  Sandbox    one per sandbox: numbered requests and replies

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
import struct
import subprocess
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, cast

from swerve.sandboxes import protocol
from swerve.sandboxes.bubblewrap import container_command, find_bubblewrap, plan_container
from swerve.sandboxes.protocol import ExecResult, Json, SandboxImage, SandboxLimits, SandboxLostError
from swerve.types import MachineError, SwerveError

_NAMESPACE_REMEDY = (
    "allow unprivileged user namespaces (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
    "kernel.apparmor_restrict_unprivileged_userns) and see `swerve doctor`"
)
_FILES = {
    "/etc/passwd": "root:x:0:0::/:/bin/false\nagent:x:1000:1000::/tmp:/bin/sh\n",
    "/etc/group": "root:x:0:\nagent:x:1000:\n",
    "/etc/hosts": "127.0.0.1 localhost\n",
    "/run/empty_file": "",
}
_EXIT_GRACE_S = 5.0
_ANSWER_GRACE_S = 60.0
_CALL_ERRORS: dict[str, type[protocol.CallError]] = {
    "exited": protocol.CallExitedError,
    "crashed": protocol.CallCrashedError,
    "timeout": protocol.CallTimeoutError,
}


class _Channel(asyncio.Protocol):
    """Numbered requests over a stream; the replies may come in any order."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._numbers = itertools.count(1)
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._lost = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while len(self._received) >= 4:
            (length,) = struct.unpack_from(">I", self._received)
            if len(self._received) < 4 + length:
                return
            message = json.loads(bytes(self._received[4 : 4 + length]))
            del self._received[: 4 + length]
            if message["id"] == -1:
                self._lost = message["error"]["message"]
            future = self._pending.pop(message["id"], None)
            if future is not None and not future.done():
                future.set_result(message)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for future in self._pending.values():
            if not future.done():
                future.set_exception(self._error())
        self._pending.clear()

    def _error(self) -> SandboxLostError:
        cause = f": {self._lost}" if self._lost else ""
        return SandboxLostError(f"{self._what} is gone{cause}")

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _send(self, message: dict[str, Any]) -> None:
        if self._transport is None:
            raise self._error()
        payload = json.dumps(message).encode()
        self._transport.write(struct.pack(">I", len(payload)) + payload)

    async def request(self, operation: str, **fields: Json) -> dict[str, Any]:
        """Send a request and wait for its reply; if the waiting is cancelled, what it started is killed.

        The sandbox keeps the request's own time limit. One that does not answer long after it is given up.
        """
        number = next(self._numbers)
        self._send({"id": number, "op": operation, **fields})
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._pending[number] = future
        watchdog = None
        if operation != "prepare":
            watchdog = loop.call_later(fields.get("timeout_s", 0.0) + _ANSWER_GRACE_S, self._give_up)
        try:
            return await future
        except asyncio.CancelledError:
            self._pending.pop(number, None)
            with contextlib.suppress(SandboxLostError):
                self._send({"id": next(self._numbers), "op": "abort", "target": number})
            raise
        finally:
            if watchdog is not None:
                watchdog.cancel()

    def _give_up(self) -> None:
        self._lost = f"it did not answer for {_ANSWER_GRACE_S:g} s after its time limit"
        self.close()


class BubblewrapSandbox:
    """A fork of a container's zygote. Made by `Container.start`."""

    def __init__(self, container: Container, number: int, channel: _Channel) -> None:
        self._container = container
        self._number = number
        self._channel = channel

    async def _ask(self, operation: str, **fields: Json) -> Json:
        reply = await self._channel.request(operation, **fields)
        if "ok" in reply:
            return reply["ok"]
        error = reply["error"]
        kind, message = error["kind"], error["message"]
        if kind == "file":
            raise protocol.SandboxFileError(f"{fields['path']}: {message}")
        name = f"{self._container.image.name}: {fields.get('entry', operation)}"
        if kind == "raised":
            raise protocol.CallRaisedError(f"{name}: {message}", error.get("detail", ""))
        if kind in _CALL_ERRORS:
            raise _CALL_ERRORS[kind](f"{name}: {message}")
        raise SandboxLostError(f"{name}: {message}")

    async def prepare(self, payload: Json) -> None:
        """Run the harness's `prepare`."""
        await self._ask("prepare", payload=payload)

    async def exec(self, command: str, timeout_s: float) -> ExecResult:
        """See `Sandbox.exec`."""
        return ExecResult(**await self._ask("exec", command=command, timeout_s=timeout_s))

    async def read_file(self, path: str) -> str:
        """See `Sandbox.read_file`."""
        return (await self._ask("read", path=path))["text"]

    async def write_file(self, path: str, text: str, mode: int = 0o644) -> None:
        """See `Sandbox.write_file`."""
        await self._ask("write", path=path, text=text, mode=mode)

    async def call(self, entry: str, payload: Json, timeout_s: float) -> Json:
        """See `Sandbox.call`."""
        return await self._ask("call", entry=entry, payload=payload, timeout_s=timeout_s)

    async def close(self) -> None:
        """See `Sandbox.close`."""
        self._channel.close()
        await asyncio.shield(self._container.kill(self._number))


class OneShotSandbox(BubblewrapSandbox):
    """A sandbox that has its container to itself."""

    async def close(self) -> None:
        """See `Sandbox.close`."""
        await super().close()
        await asyncio.shield(self._container.close())


class Container:
    """One bwrap process with a warm interpreter in it, and the sandboxes forked from that."""

    def __init__(self, image: SandboxImage, limits: SandboxLimits) -> None:
        self.image = image
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
        plan = plan_container(self.image)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        config = {
            "harness": plan.harness,
            "harness_args": self.image.harness_args,
            "python_paths": plan.python_paths,
            "hide": plan.hide,
            "limits": asdict(self._limits),
        }
        files = {path: _memory_file(path, text.encode()) for path, text in _FILES.items()}
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

    async def start(self, prepare: Json, timeout_s: float, kind: type[BubblewrapSandbox]) -> BubblewrapSandbox:
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
        channel = _Channel(f"sandbox {number} of image {self.image.name}")
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
