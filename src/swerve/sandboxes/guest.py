"""The program inside a sandbox container: a warm interpreter that forks sandboxes. Standard library only.

It runs as process 1 of a bubblewrap container whose root is read-only, and imports nothing of Swerve's::

    host process                    container (zygote)                 sandbox (fork of the zygote)
    Container  ==control socket==>  Zygote: preloads the harness
                                      | clone into new user, pid, mount, net, ipc, uts namespaces
                                      +--------------------------------> Sandbox: process 1 of its own
    BubblewrapSandbox  ============one stream socket===================>   pid namespace; runs commands,
                                                                           forks harness calls
    ./run_tests in the sandbox  ---/run/swerve/request (FIFO)---------->   forks `visible_tests`
                                <--/run/swerve/reply (FIFO)-----------

The control socket carries one JSON object per packet, the sandbox's socket frames of a 4-byte big-endian length and
JSON. A sandbox ends when its process 1 ends: the kernel then kills whatever else runs in its pid namespace.
"""

# Descriptors and system calls throughout; pathlib would only cost its import.
# ruff: noqa: PTH101, PTH102, PTH103, PTH105, PTH108, PTH110, PTH112, PTH118, PTH120, PTH123

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import importlib.util
import json
import os
import platform
import resource
import secrets
import select
import signal
import socket
import stat
import struct
import sys
import time
import traceback
import types
from collections.abc import Iterator
from typing import Any, NoReturn

WORKDIR = "/testbed"
SERVICE_DIR = "/run/swerve"
EMPTY_DIR = "/run/empty"
EMPTY_FILE = "/run/empty_file"
VISIBLE_TESTS = "visible_tests"
RUN_TESTS_CLIENT = """#!/bin/sh
# Asks the sandbox's warm interpreter to run the visible tests: nothing is started, only text is passed.
set -C
until true >/run/swerve/lock; do sleep 0.05; done 2>/dev/null
echo run >/run/swerve/request
{
    read -r code
    while IFS= read -r line; do printf '%s\\n' "$line"; done
} </run/swerve/reply
exit "${code:-1}"
"""

_CLONE_FLAGS = {
    "mount": 0x00020000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
_SYS_CLONE = {"x86_64": 56, "aarch64": 220, "riscv64": 220, "ppc64le": 120}
_SYS_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219, "ppc64le": 271}
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND = 1, 2, 4, 8, 4096
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 4, 24, 38
_KEYCTL_JOIN_SESSION_KEYRING = 1
_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40
_KILLED_BY_TIMEOUT = 124
_MAX_RESULT_BYTES = 64 << 20
_SPARE_PROCESSES = 8

_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_lock = ctypes.PyDLL(None, use_errno=True)


# ----------------------------------------------------------------------------------------------- system calls


def _check(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    encoded = [value.encode() if value is not None else None for value in (source, target, kind)]
    _check(_libc.mount(*encoded, ctypes.c_ulong(flags), options.encode() or None), f"mount {target}")


def _clone() -> int:
    """Fork into namespaces of its own: user, pid, mount, net, ipc, uts. Returns 0 in the child.

    One system call instead of fork, unshare and fork again. The interpreter's own fork hooks run around it; the zygote
    has a single thread, so none of the C library's locks can be held.
    """
    number = _SYS_CLONE.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"no clone number known for {platform.machine()}")
    flags = sum(_CLONE_FLAGS.values()) | signal.SIGCHLD
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _libc_with_lock.syscall(ctypes.c_long(number), ctypes.c_ulong(flags), *[ctypes.c_long(0)] * 4)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return _check(pid, "clone")


def _write_file(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def _enter_namespaces(uid: int, gid: int, disk_bytes: int, hide: list[str]) -> None:
    """Make the namespaces this process was cloned into a home, then give up every privilege over them.

    Args:
        uid: User id, the same inside and outside the sandbox's user namespace.
        gid: Group id, likewise.
        disk_bytes: What all writable files of the sandbox may hold together.
        hide: Absolute paths covered by something empty.
    """
    _write_file("/proc/self/setgroups", "deny")
    _write_file("/proc/self/uid_map", f"{uid} {uid} 1")
    _write_file("/proc/self/gid_map", f"{gid} {gid} 1")
    safe = _MS_NOSUID | _MS_NODEV
    scratch = "/run/scratch"
    options = f"size={disk_bytes},nr_inodes={max(1024, disk_bytes // 4096)},mode=0755"
    _mount("scratch", scratch, "tmpfs", safe, options)
    for name, target, mode in (
        ("testbed", WORKDIR, 0o755),
        ("tmp", "/tmp", 0o1777),
        ("shm", "/dev/shm", 0o1777),
        ("service", SERVICE_DIR, 0o700),
    ):
        os.mkdir(f"{scratch}/{name}")
        os.chmod(f"{scratch}/{name}", mode)
        _mount(f"{scratch}/{name}", target, None, _MS_BIND)
    _mount("devpts", "/dev/pts", "devpts", _MS_NOSUID | _MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    for path in (scratch, *hide):
        if not os.path.exists(path):
            raise OSError(errno.ENOENT, f"cannot hide {path}: there is no such path in the image")
        _mount(EMPTY_DIR if os.path.isdir(path) else EMPTY_FILE, path, None, _MS_BIND)
    try:
        _mount("proc", "/proc", "proc", safe | _MS_NOEXEC)
        # No user namespaces below this one: they would bring back capabilities.
        _write_file("/proc/sys/user/max_user_namespaces", "0")
    except OSError:
        _mount("none", "/proc", "tmpfs", safe | _MS_NOEXEC | _MS_RDONLY, "size=4k")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as loopback:
        request = struct.pack("16sH14x", b"lo", _IFF_UP | _IFF_RUNNING)
        fcntl.ioctl(loopback, _SIOCSIFFLAGS, request)
    with contextlib.suppress(OSError):
        _write_file("/proc/self/oom_score_adj", "900")
    os.chdir(WORKDIR)
    _drop_privileges()


def _drop_privileges() -> None:
    _check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    _check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    # Commands share the user id with this process: without this they could read its memory through /proc.
    _check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")


def _join_new_keyring() -> None:
    """Leave the session keyring inherited from whoever started this process: its keys are not for sandboxes."""
    number = _SYS_KEYCTL.get(platform.machine())
    if number is not None:
        _libc.syscall(ctypes.c_long(number), ctypes.c_long(_KEYCTL_JOIN_SESSION_KEYRING), None)


def _set_limits(limits: dict[str, Any]) -> None:
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["num_open_files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, _num_processes(limits, _SPARE_PROCESSES)),
    ):
        if value is not None:
            _lower_limit(0, kind, value)


def _set_child_limits(pid: int, limits: dict[str, Any]) -> None:
    for kind, value in (
        (resource.RLIMIT_NPROC, _num_processes(limits, 0)),
        (resource.RLIMIT_CPU, limits["cpu_s"]),
    ):
        if value is not None:
            with contextlib.suppress(ProcessLookupError):
                _lower_limit(pid, kind, value)


def _lower_limit(pid: int, kind: int, value: int) -> None:
    _, hard = resource.prlimit(pid, kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.prlimit(pid, kind, (value, value))


def _num_processes(limits: dict[str, Any], spare: int) -> int | None:
    # Before 5.14 the kernel counts a user's processes over all namespaces together, so the limit would be shared.
    major, minor = (int(part) for part in platform.release().split(".")[:2])
    return limits["num_processes"] + spare if (major, minor) >= (5, 14) else None


# --------------------------------------------------------------------------------------------------- harness


def _load_harness(config: dict[str, Any]) -> types.ModuleType | None:
    sys.path[:0] = config["python_paths"]
    if config["harness"] is None:
        return None
    spec = importlib.util.spec_from_file_location("swerve_harness", config["harness"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["swerve_harness"] = module
    spec.loader.exec_module(module)
    if hasattr(module, "preload"):
        module.preload(config["harness_args"])
    return module


# ---------------------------------------------------------------------------------------------------- zygote


class _Wakeup:
    """A descriptor that becomes readable when a child has ended."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Process 1 is spared every signal it has no handler for; Python's own for SIGINT would let a command end it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.write_fd, warn_on_full_buffer=False)

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.read_fd, 512)) == 512:
                pass

    def close(self) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(self.read_fd)
        os.close(self.write_fd)


@contextlib.contextmanager
def _ended_by_hangup(control: socket.socket) -> Iterator[None]:
    """While the block runs, however long, end this process as soon as the host closes its end of the socket.

    The host says nothing before it has heard that the harness is loaded, so any news on the socket is its end.
    """
    signal.signal(signal.SIGIO, lambda *_: os._exit(0))
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC)
    with contextlib.suppress(BlockingIOError):
        control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        os._exit(0)
    yield
    fcntl.fcntl(control, fcntl.F_SETFL, flags)
    signal.signal(signal.SIGIO, signal.SIG_DFL)


class Zygote:
    """Process 1 of the container: forks a sandbox per request, kills them, and reports their ends."""

    def __init__(self, control: socket.socket, config: dict[str, Any]) -> None:
        self._control = control
        self._config = config
        self._harness: types.ModuleType | None = None
        self._sandboxes: dict[int, int] = {}
        self._owner = (os.getuid(), os.getgid())

    def run(self) -> NoReturn:
        """Preload the harness, then serve until the host closes the control socket."""
        try:
            with _ended_by_hangup(self._control):
                self._harness = _load_harness(self._config)
        except BaseException:
            self._send({"event": "failed_preload", "message": traceback.format_exc(limit=-8)[-8000:]})
            os._exit(1)
        gc.collect()
        gc.freeze()
        wakeup = _Wakeup()
        self._send({"event": "ready"})
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(wakeup.read_fd, select.POLLIN)
        while True:
            for descriptor, _ in poller.poll():
                if descriptor == wakeup.read_fd:
                    wakeup.clear()
                else:
                    self._serve(wakeup)
            self._reap()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._control.sendall(json.dumps(message).encode())
        except OSError:
            os._exit(0)

    def _serve(self, wakeup: _Wakeup) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._control, 4096, 1)
        if not data:
            os._exit(0)
        message = json.loads(data)
        if message["op"] == "kill":
            for pid, number in self._sandboxes.items():
                if number == message["sandbox"]:
                    os.kill(pid, signal.SIGKILL)
            return
        os.set_inheritable(descriptors[0], False)
        try:
            pid = _clone()
        except OSError as error:
            os.close(descriptors[0])
            self._send({"event": "failed_start", "sandbox": message["sandbox"], "message": str(error)})
            return
        if pid == 0:
            wakeup.close()
            self._control.close()
            _become_sandbox(socket.socket(fileno=descriptors[0]), self._config, self._harness, self._owner)
        os.close(descriptors[0])
        self._sandboxes[pid] = message["sandbox"]

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._sandboxes:
                number = self._sandboxes.pop(pid)
                self._send({"event": "exited", "sandbox": number, "status": os.waitstatus_to_exitcode(status)})


def _become_sandbox(
    connection: socket.socket,
    config: dict[str, Any],
    harness: types.ModuleType | None,
    owner: tuple[int, int],
) -> NoReturn:
    try:
        limits = config["limits"]
        _join_new_keyring()
        _enter_namespaces(*owner, limits["disk_bytes"], config["hide"])
        _set_limits(limits)
        null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
        for descriptor in (0, 1, 2):
            os.dup2(null, descriptor)
        os.close(null)
        Sandbox(connection, limits, harness).run()
        os._exit(0)
    except BaseException as error:
        detail = traceback.format_exc(limit=-8)[-4000:]
        with contextlib.suppress(OSError):
            message = {"kind": "machine", "message": _one_line(error), "detail": detail}
            _send_frame(connection, {"id": -1, "error": message})
    finally:
        os._exit(1)


def _send_frame(connection: socket.socket, message: dict[str, Any]) -> None:
    payload = json.dumps(message).encode()
    connection.sendall(struct.pack(">I", len(payload)) + payload)


# --------------------------------------------------------------------------------------------------- sandbox


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

    def __init__(self, connection: socket.socket, limits: dict[str, Any], harness: types.ModuleType | None) -> None:
        self._connection = connection
        self._limits = limits
        self._harness = harness
        self._received = bytearray()
        self._jobs: dict[int, _Job] = {}
        self._shell = "/bin/bash" if os.path.exists("/bin/bash") else "/bin/sh"
        self._poller = select.poll()
        self._by_descriptor: dict[int, _Job | None] = {}
        self._wakeup = _Wakeup()
        self._requests = -1
        self._poller.register(connection, select.POLLIN)
        self._poller.register(self._wakeup.read_fd, select.POLLIN)
        if hasattr(harness, VISIBLE_TESTS):
            self._offer_tests()

    def _offer_tests(self) -> None:
        for name in ("request", "reply"):
            os.mkfifo(f"{SERVICE_DIR}/{name}", 0o600)
        self._requests = os.open(f"{SERVICE_DIR}/request", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        self._poller.register(self._requests, select.POLLIN)
        descriptor = os.open(f"{WORKDIR}/run_tests", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o755)
        os.write(descriptor, RUN_TESTS_CLIENT.encode())
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
            self._reply_error(request_id, kind, _one_line(error))
        except Exception as error:
            self._reply_error(request_id, "raised", _one_line(error), traceback.format_exc(limit=-8)[-4000:])
        else:
            if reply is not None:
                _send_frame(self._connection, {"id": request_id, "ok": reply})

    def _reply_error(self, request_id: int, kind: str, message: str, detail: str = "") -> None:
        error = {"kind": kind, "message": message, "detail": detail}
        _send_frame(self._connection, {"id": request_id, "error": error})

    # -------------------------------------------------------------------------------------------- operations

    def _do_prepare(self, message: dict[str, Any]) -> dict[str, Any]:
        prepare = getattr(self._harness, "prepare", None)
        if prepare is not None and message["payload"] is not None:
            try:
                prepare(message["payload"])
            except OSError as error:
                raise RuntimeError(f"prepare failed: {error}") from error
        os.chdir(WORKDIR)
        return {}

    def _do_exec(self, message: dict[str, Any]) -> None:
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        try:
            pid = os.posix_spawn(
                self._shell,
                [self._shell, "-c", message["command"]],
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
            result = {"output": f"cannot start the command: {error}", "exit_code": 126, "timed_out": False}
            _send_frame(self._connection, {"id": message["id"], "ok": result})
            return
        finally:
            os.close(write_fd)
        _set_child_limits(pid, self._limits)
        job = self._add_job(pid, "exec", message["id"], read_fd, message["timeout_s"])
        job.output = _HeadTail(self._limits["output_bytes"])

    def _do_call(self, message: dict[str, Any]) -> None:
        if not callable(getattr(self._harness, message["entry"], None)):
            raise LookupError(f"the harness has no entry {message['entry']}")
        self._fork_call("call", message["id"], message["entry"], message["payload"], message["timeout_s"])

    def _do_read(self, message: dict[str, Any]) -> dict[str, Any]:
        path = _resolve(message["path"])
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
        path = _resolve(message["path"])
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
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._ended(pid, status)

    def _ended(self, pid: int, status: int, killed: bool = False) -> None:
        job = self._jobs.pop(pid, None)
        if job is None:
            return
        for _ in range(64):
            if job.descriptor not in self._by_descriptor or not self._read(job.descriptor):
                break
        code = os.waitstatus_to_exitcode(status)
        if job.output is not None:
            # Background processes may still hold the pipe: go on emptying it, or they would block.
            if job.descriptor in self._by_descriptor:
                self._by_descriptor[job.descriptor] = None
            shown = _KILLED_BY_TIMEOUT if job.timed_out else 128 - code if code < 0 else code
            result = {"output": job.output.text(), "exit_code": shown, "timed_out": job.timed_out}
            _send_frame(self._connection, {"id": job.request_id, "ok": result})
            return
        self._forget(job.descriptor)
        outcome = _call_outcome(job, code, killed)
        if job.kind == "call":
            _send_frame(self._connection, {"id": job.request_id, **outcome})
        elif not killed:
            self._answer_tests(outcome)

    def _kill_everything(self) -> None:
        """Kill every process of the sandbox but this one; each job in flight is answered."""
        while True:
            try:
                os.kill(-1, signal.SIGKILL)
                pid, status = os.waitpid(-1, 0)
            except (ProcessLookupError, ChildProcessError):
                break
            self._ended(pid, status, killed=True)
        for descriptor in [key for key, job in self._by_descriptor.items() if job is None]:
            self._forget(descriptor)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{SERVICE_DIR}/lock")

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
            self._connection.detach()
            os.closerange(3, private)
            os.closerange(private + 1, self._limits["num_open_files"])
            _set_child_limits(0, self._limits)
            os.chdir(WORKDIR)
            try:
                outcome = {"ok": getattr(self._harness, entry)(payload)}
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 1
                os._exit(code & 0xFF)
            except BaseException as error:
                detail = traceback.format_exc(limit=-12)[-4000:]
                outcome = {"error": {"kind": "raised", "message": _one_line(error), "detail": detail}}
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
            self._answer_tests({"error": {"message": _one_line(error)}})

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
                descriptor = os.open(f"{SERVICE_DIR}/reply", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
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
            os.unlink(f"{SERVICE_DIR}/lock")


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


def _one_line(error: BaseException) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower() if error.filename else error.strerror
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _resolve(path: str) -> str:
    """The real path of a workspace file; refuses whatever leads out of the workspace."""
    if "\0" in path:
        raise OSError(errno.EINVAL, "has a NUL character in its name")
    real = os.path.realpath(os.path.join(WORKDIR, path))
    if real != WORKDIR and not real.startswith(f"{WORKDIR}/"):
        raise PermissionError(errno.EPERM, f"lies outside {WORKDIR}")
    return real


def main() -> NoReturn:
    """Run as `python guest.py CONTROL_FD CONFIG_FD`."""
    control = socket.socket(fileno=int(sys.argv[1]))
    control.set_inheritable(False)
    with open(int(sys.argv[2]), "rb") as file:
        config = json.load(file)
    _join_new_keyring()
    Zygote(control, config).run()


if __name__ == "__main__":
    main()
