"""Process 1 of a sandbox: runs what the host asks for, in children of its own."""

# Descriptors and system calls throughout; pathlib would only cost its import.
# ruff: noqa: PTH103, PTH105, PTH108, PTH110, PTH118, PTH120, PTH123

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import select
import signal
import stat
import struct
import time
import traceback
import types
from typing import Any, NoReturn, Protocol

from .shell import Shell
from .system import SERVICE_DIR, WORKDIR, Wakeup, ended_children, kill_descendants, set_child_limits

VISIBLE_TESTS = "visible_tests"
RUN_TESTS_CLIENT = """#!/bin/sh
# Asks the sandbox's warm interpreter to run the visible tests: nothing is started, only text is passed.
set -C
until true >{service}/lock; do sleep 0.05; done 2>/dev/null
echo run >{service}/request
{{
    read -r code
    while IFS= read -r line; do printf '%s\\n' "$line"; done
}} <{service}/reply
exit "${{code:-1}}"
"""
_KILLED_BY_TIMEOUT = 124
_MAX_RESULT_BYTES = 64 << 20


class Connection(Protocol):
    """A two-way stream to the host."""

    def fileno(self) -> int:
        """Descriptor to poll for input."""
        ...

    def recv(self, size: int, /) -> bytes:
        """Read what there is."""
        ...

    def sendall(self, data: bytes, /) -> None:
        """Write everything."""
        ...


def send_frame(connection: Connection, message: dict[str, Any]) -> None:
    """Write one message."""
    payload = json.dumps(message).encode()
    connection.sendall(struct.pack(">I", len(payload)) + payload)


class _HeadTail:
    """The first and last bytes of a stream, and how many were cut between them."""

    def __init__(self, max_bytes: int) -> None:
        self._max_head = max_bytes // 2
        self._max_tail = max_bytes - self._max_head
        self._head = bytearray()
        self._tail = bytearray()
        self._num_cut = 0

    def add(self, chunk: bytes) -> None:
        room = self._max_head - len(self._head)
        if room > 0:
            self._head += chunk[:room]
            chunk = chunk[room:]
        self._tail += chunk
        if len(self._tail) > self._max_tail:
            excess = len(self._tail) - self._max_tail
            del self._tail[:excess]
            self._num_cut += excess

    def text(self) -> str:
        head, tail = (bytes(part).decode("utf-8", "replace") for part in (self._head, self._tail))
        return f"{head}\n[{self._num_cut} bytes cut]\n{tail}" if self._num_cut else head + tail


class _Job:
    """One command, harness call, or run of the visible tests in flight."""

    def __init__(self, kind: str, request_id: int, descriptor: int, deadline: float | None) -> None:
        self.kind = kind
        self.request_id = request_id
        self.descriptor = descriptor
        self.deadline = deadline
        self.timed_out = False
        self.output: _HeadTail | None = None
        self.result = bytearray()
        self.token = b""

    def take(self, chunk: bytes) -> None:
        if self.output is not None:
            self.output.add(chunk)
        elif len(self.result) < _MAX_RESULT_BYTES:
            self.result += chunk


class Sandbox:
    """Process 1 of a sandbox: runs what the host asks for, in children of its own."""

    def __init__(
        self,
        connection: Connection,
        limits: dict[str, Any],
        harness: types.ModuleType | None,
        workdir: str = WORKDIR,
        service_dir: str = SERVICE_DIR,
    ) -> None:
        self._connection = connection
        self._limits = limits
        self._harness = harness
        self._workdir = os.path.realpath(workdir)
        self._service_dir = service_dir
        self._received = bytearray()
        self._jobs: dict[int, _Job] = {}
        self._has_bash = os.path.exists("/bin/bash")
        self._shell: Shell | None = None
        self._waiting: list[dict[str, Any]] = []
        self._poller = select.poll()
        self._by_descriptor: dict[int, _Job | None] = {}
        self._wakeup = Wakeup()
        self._requests = -1
        self._poller.register(connection, select.POLLIN)
        self._poller.register(self._wakeup.read_fd, select.POLLIN)
        if hasattr(harness, VISIBLE_TESTS):
            self._offer_tests()

    def _offer_tests(self) -> None:
        for name in ("request", "reply"):
            os.mkfifo(f"{self._service_dir}/{name}", 0o600)
        self._requests = os.open(f"{self._service_dir}/request", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller.register(self._requests, select.POLLIN)
        descriptor = os.open(f"{self._workdir}/run_tests", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o755)
        os.write(descriptor, RUN_TESTS_CLIENT.format(service=self._service_dir).encode())
        os.fchmod(descriptor, 0o755)
        os.close(descriptor)

    def run(self) -> None:
        """Serve until the host closes its end."""
        while True:
            for descriptor, _ in self._poller.poll(self._milliseconds_left()):
                if descriptor == self._connection.fileno():
                    if not self._receive():
                        return
                elif descriptor == self._wakeup.read_fd:
                    self._wakeup.clear()
                elif descriptor == self._requests:
                    self._start_tests()
                elif self._shell is not None and descriptor == self._shell.status_fd:
                    self._command_ended(self._shell)
                elif descriptor in self._by_descriptor:
                    self._read(descriptor)
            self._reap()
            now = time.monotonic()
            for job in list(self._jobs.values()):
                if job.deadline is not None and job.deadline <= now and job in self._jobs.values():
                    job.timed_out = True
                    self._kill_everything()

    def _milliseconds_left(self) -> int | None:
        deadlines = [job.deadline for job in self._jobs.values() if job.deadline is not None]
        return max(0, int((min(deadlines) - time.monotonic()) * 1000) + 1) if deadlines else None

    # ------------------------------------------------------------------------------------------ conversation

    def _receive(self) -> bool:
        try:
            chunk = self._connection.recv(1 << 16)
        except ConnectionError:
            return False
        self._received += chunk
        while len(self._received) >= 4:
            (length,) = struct.unpack_from(">I", self._received)
            if len(self._received) < 4 + length:
                break
            message = json.loads(self._received[4 : 4 + length])
            del self._received[: 4 + length]
            self._dispatch(message)
        return bool(chunk)

    def _dispatch(self, message: dict[str, Any]) -> None:
        request_id = message["id"]
        try:
            reply = getattr(self, f"_do_{message['op']}")(message)
        except OSError as error:
            kind = "file" if message["op"] in ("read", "write") else "machine"
            self._reply_error(request_id, kind, one_line(error))
        except Exception as error:
            self._reply_error(request_id, "raised", one_line(error), traceback.format_exc(limit=-8)[-4000:])
        else:
            if reply is not None:
                send_frame(self._connection, {"id": request_id, "ok": reply})

    def _reply_error(self, request_id: int, kind: str, message: str, detail: str = "") -> None:
        error = {"kind": kind, "message": message, "detail": detail}
        send_frame(self._connection, {"id": request_id, "error": error})

    # -------------------------------------------------------------------------------------------- operations

    def _do_prepare(self, message: dict[str, Any]) -> dict[str, Any]:
        prepare = getattr(self._harness, "prepare", None)
        if prepare is not None and message["payload"] is not None:
            try:
                prepare(message["payload"])
            except OSError as error:
                raise RuntimeError(f"prepare failed: {error}") from error
        os.chdir(self._workdir)
        return {}

    def _do_exec(self, message: dict[str, Any]) -> None:
        shell = "/bin/bash" if self._has_bash else "/bin/sh"
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.posix_spawn(
                shell,
                [shell, "-c", message["command"]],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, write_fd, 1),
                    (os.POSIX_SPAWN_DUP2, write_fd, 2),
                ],
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
        except (OSError, ValueError) as error:
            os.close(read_fd)
            self._cannot_start(message, error)
            return
        finally:
            os.close(write_fd)
        set_child_limits(pid, self._limits)
        job = self._add_job(pid, "exec", message["id"], read_fd, message["timeout_s"])
        job.output = _HeadTail(self._limits["output_bytes"])

    def _cannot_start(self, message: dict[str, Any], error: Exception) -> None:
        result = {"output": f"cannot start the command: {error}", "exit_code": 126, "timed_out": False}
        send_frame(self._connection, {"id": message["id"], "ok": result})

    def _do_shell(self, message: dict[str, Any]) -> None:
        """Run a command in the one shell that outlives its commands; without bash, in one of its own."""
        if not self._has_bash:
            self._do_exec(message)
        elif self._shell is not None and self._shell.pid in self._jobs:
            self._waiting.append(message)
        else:
            self._send_to_shell(message)

    def _send_to_shell(self, message: dict[str, Any]) -> None:
        if self._shell is None:
            try:
                self._shell = Shell("/bin/bash")
            except OSError as error:
                self._cannot_start(message, error)
                return
            set_child_limits(self._shell.pid, self._limits)
            self._poller.register(self._shell.status_fd, select.POLLIN)
        shell = self._shell
        if shell.output_fd in self._by_descriptor:
            self._poller.unregister(shell.output_fd)
        job = self._add_job(shell.pid, "shell", message["id"], shell.output_fd, message["timeout_s"])
        job.output = _HeadTail(self._limits["output_bytes"])
        shell.send(message["command"])

    def _command_ended(self, shell: Shell) -> None:
        code = shell.status()
        job = self._jobs.get(shell.pid)
        if code is None:
            if shell.has_ended:
                self._poller.unregister(shell.status_fd)
        elif job is not None:
            del self._jobs[shell.pid]
            self._answer_command(job, code)
            self._next_command()

    def _next_command(self) -> None:
        if self._waiting:
            self._send_to_shell(self._waiting.pop(0))

    def _forget_shell(self, shell: Shell) -> None:
        self._shell = None
        if not shell.has_ended:
            self._poller.unregister(shell.status_fd)
        shell.close()

    def _do_call(self, message: dict[str, Any]) -> None:
        if not callable(getattr(self._harness, message["entry"], None)):
            raise LookupError(f"the harness has no entry {message['entry']}")
        self._fork_call("call", message["id"], message["entry"], message["payload"], message["timeout_s"])

    def _do_read(self, message: dict[str, Any]) -> dict[str, Any]:
        path = self._resolve(message["path"])
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as file:
            information = os.fstat(descriptor)
            if stat.S_ISDIR(information.st_mode):
                raise IsADirectoryError(errno.EISDIR, "is a directory")
            if not stat.S_ISREG(information.st_mode):
                raise OSError(errno.EINVAL, "is not a regular file")
            data = file.read(self._limits["read_bytes"] + 1)
        if len(data) > self._limits["read_bytes"]:
            raise OSError(errno.EFBIG, f"is larger than {self._limits['read_bytes']} bytes")
        try:
            return {"text": data.decode("utf-8")}
        except UnicodeDecodeError:
            raise OSError(errno.EILSEQ, "is not UTF-8 text") from None

    def _do_write(self, message: dict[str, Any]) -> dict[str, Any]:
        path = self._resolve(message["path"])
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        temporary = f"{os.path.dirname(path)}/.{secrets.token_hex(8)}"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            with open(descriptor, "wb") as file:
                file.write(message["text"].encode("utf-8", "surrogatepass"))
                os.fchmod(descriptor, message["mode"] & 0o777)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
        return {}

    def _resolve(self, path: str) -> str:
        """The real path of a workspace file; refuses whatever leads out of the workspace."""
        if "\0" in path:
            raise OSError(errno.EINVAL, "has a NUL character in its name")
        if path == WORKDIR or path.startswith(f"{WORKDIR}/"):
            path = f".{path.removeprefix(WORKDIR)}"
        real = os.path.realpath(os.path.join(self._workdir, path))
        if real != self._workdir and not real.startswith(f"{self._workdir}/"):
            raise PermissionError(errno.EPERM, f"lies outside {WORKDIR}")
        return real

    def _do_abort(self, message: dict[str, Any]) -> None:
        if any(job.request_id == message["target"] for job in self._jobs.values()):
            self._kill_everything()

    # -------------------------------------------------------------------------------------------------- jobs

    def _add_job(self, pid: int, kind: str, request_id: int, descriptor: int, timeout_s: float | None) -> _Job:
        os.set_blocking(descriptor, False)
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        job = _Job(kind, request_id, descriptor, deadline)
        self._jobs[pid] = job
        self._by_descriptor[descriptor] = job
        self._poller.register(descriptor, select.POLLIN)
        return job

    def _read(self, descriptor: int) -> bool:
        """Take what one pipe holds; returns whether it may hold more."""
        try:
            chunk = os.read(descriptor, 1 << 16)
        except BlockingIOError:
            return False
        job = self._by_descriptor[descriptor]
        if not chunk:
            self._forget(descriptor)
        elif job is not None:
            job.take(chunk)
        return bool(chunk)

    def _forget(self, descriptor: int) -> None:
        if descriptor in self._by_descriptor:
            self._poller.unregister(descriptor)
            del self._by_descriptor[descriptor]
            os.close(descriptor)

    def _reap(self) -> None:
        for pid, status in ended_children():
            self._ended(pid, status)

    def _ended(self, pid: int, status: int, killed: bool = False) -> None:
        job = self._jobs.pop(pid, None)
        if self._shell is not None and pid == self._shell.pid:
            self._forget_shell(self._shell)
        if job is None:
            return
        code = os.waitstatus_to_exitcode(status)
        if job.output is not None:
            self._answer_command(job, code)
            self._next_command()
            return
        self._drain(job)
        self._forget(job.descriptor)
        outcome = _call_outcome(job, code, killed)
        if job.kind == "call":
            send_frame(self._connection, {"id": job.request_id, **outcome})
        elif not killed:
            self._answer_tests(outcome)

    def _drain(self, job: _Job) -> None:
        for _ in range(64):
            if job.descriptor not in self._by_descriptor or not self._read(job.descriptor):
                break

    def _answer_command(self, job: _Job, code: int) -> None:
        self._drain(job)
        # Background processes may still hold the pipe: go on emptying it, or they would block.
        if job.descriptor in self._by_descriptor:
            self._by_descriptor[job.descriptor] = None
        assert job.output is not None
        shown = _KILLED_BY_TIMEOUT if job.timed_out else 128 - code if code < 0 else code
        result = {"output": job.output.text(), "exit_code": shown, "timed_out": job.timed_out}
        send_frame(self._connection, {"id": job.request_id, "ok": result})

    def _kill_everything(self) -> None:
        """Kill every process of the sandbox but this one; each job in flight is answered."""
        while True:
            try:
                if os.getpid() == 1:
                    os.kill(-1, signal.SIGKILL)
                else:
                    kill_descendants()
                pid, status = os.waitpid(-1, 0)
            except (ProcessLookupError, ChildProcessError):
                break
            self._ended(pid, status, killed=True)
        for descriptor in [key for key, job in self._by_descriptor.items() if job is None]:
            self._forget(descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._service_dir}/lock")

    def _fork_call(self, kind: str, request_id: int, entry: str, payload: Any, timeout_s: float | None) -> None:
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        token = secrets.token_bytes(16)
        try:
            pid = os.fork()
        except OSError:
            os.close(read_fd)
            os.close(write_fd)
            raise
        if pid == 0:
            self._run_call(entry, payload, write_fd, token)
        os.close(write_fd)
        self._add_job(pid, kind, request_id, read_fd, timeout_s).token = token

    def _run_call(self, entry: str, payload: Any, write_fd: int, token: bytes) -> NoReturn:
        code = 1
        try:
            os.setsid()
            self._wakeup.close()
            highest = self._limits["num_open_files"] - 1 - secrets.randbelow(self._limits["num_open_files"] // 4)
            private = fcntl.fcntl(write_fd, fcntl.F_DUPFD_CLOEXEC, highest)
            os.closerange(3, private)
            os.closerange(private + 1, self._limits["num_open_files"])
            set_child_limits(0, self._limits)
            os.chdir(self._workdir)
            try:
                outcome = {"ok": getattr(self._harness, entry)(payload)}
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
                os._exit(code & 0xFF)
            except BaseException as error:
                detail = traceback.format_exc(limit=-12)[-4000:]
                outcome = {"error": {"kind": "raised", "message": one_line(error), "detail": detail}}
            data = json.dumps(outcome).encode()
            with open(private, "wb") as file:
                file.write(token + struct.pack(">I", len(data)) + data)
            code = 0
        finally:
            os._exit(code)

    # --------------------------------------------------------------------------------------------- run_tests

    def _start_tests(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._requests, 512)
        if any(job.kind == "tests" for job in self._jobs.values()):
            return  # The client's lock allows one run at a time; only a forged request comes here.
        try:
            self._fork_call("tests", -1, VISIBLE_TESTS, None, None)
        except OSError as error:
            self._answer_tests({"error": {"message": one_line(error)}})

    def _answer_tests(self, outcome: dict[str, Any]) -> None:
        if "ok" in outcome:
            answer = outcome["ok"]
            text, code = (answer, 0) if isinstance(answer, str) else (answer["text"], answer.get("exit_code", 0))
        else:
            text, code = f"error: {outcome['error']['message']}", 1
        # Short enough for a pipe's buffer: nothing here ever waits for the reader.
        shown = _HeadTail(min(self._limits["output_bytes"], 60_000))
        shown.add(text.rstrip("\n").encode("utf-8", "replace"))
        data = f"{code}\n{shown.text()}\n".encode()
        # The client is about to open its end, unless it was killed.
        for _ in range(50):
            try:
                descriptor = os.open(f"{self._service_dir}/reply", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    break
                time.sleep(0.005)
                continue
            with contextlib.suppress(BlockingIOError, BrokenPipeError):
                os.write(descriptor, data)
            os.close(descriptor)
            break
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{self._service_dir}/lock")


def _call_outcome(job: _Job, code: int, killed: bool) -> dict[str, Any]:
    if job.timed_out:
        return {"error": {"kind": "timeout", "message": "ran out of time"}}
    data = bytes(job.result)
    complete = data.startswith(job.token) and len(data) >= 20
    if code == 0 and complete and len(data) == 20 + struct.unpack(">I", data[16:20])[0]:
        return json.loads(data[20:])
    if code < 0 or killed:
        return {"error": {"kind": "crashed", "message": f"was killed by {_signal_name(-code)}"}}
    return {"error": {"kind": "exited", "message": f"exited with code {code} without a result"}}


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def one_line(error: BaseException) -> str:
    """What went wrong, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower() if error.filename else error.strerror
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
