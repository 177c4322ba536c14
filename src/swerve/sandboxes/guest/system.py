"""System calls of the guest: namespaces and mounts, privileges, limits, signals."""

# Descriptors and system calls throughout; pathlib would only cost its import.
# ruff: noqa: PTH101, PTH102, PTH103, PTH110, PTH112, PTH120, PTH123, PTH208

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import platform
import resource
import signal
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import Any

WORKDIR = "/testbed"
SERVICE_DIR = "/run/swerve"
EMPTY_DIR = "/run/empty"
EMPTY_FILE = "/run/empty_file"
LOWER_DIR = "/run/lower"
"""Where a container keeps the files that its sandboxes' workspaces start with."""
ROOT_DIR = "/run/root"
"""The same of its root, where that is an image's own."""

SPARE_PROCESSES = 8
_SCRATCH = "/run/scratch"

_CLONE_FLAGS = {
    "mount": 0x00020000,
    "uts": 0x04000000,
    "ipc": 0x08000000,
    "user": 0x10000000,
    "pid": 0x20000000,
    "net": 0x40000000,
}
_SYS_CLONE = {"x86_64": 56, "aarch64": 220, "riscv64": 220, "ppc64le": 120}
_SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41, "ppc64le": 203}
_SYS_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219, "ppc64le": 271}
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC = 1, 2, 4, 8, 4096, 16384
_MNT_DETACH = 2
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 4, 24, 36, 38
_KEYCTL_JOIN_SESSION_KEYRING = 1
_SIOCSIFFLAGS, _IFF_UP, _IFF_RUNNING = 0x8914, 0x1, 0x40

_libc = ctypes.CDLL(None, use_errno=True)
_libc_with_lock = ctypes.PyDLL(None, use_errno=True)


def check(result: int, what: str) -> int:
    """Raise what the C library says went wrong."""
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


def mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    """Call `mount(2)`."""
    encoded = [value.encode() if value is not None else None for value in (source, target, kind)]
    check(_libc.mount(*encoded, ctypes.c_ulong(flags), options.encode() or None), f"mount {target}")


def clone() -> int:
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
    return check(pid, "clone")


def write_file(path: str, text: str) -> None:
    """Write to a file that exists."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def enter_namespaces(uid: int, gid: int, config: dict[str, Any]) -> None:
    """Make the namespaces this process was cloned into a home, then give up every privilege over them.

    Args:
        uid: User id, the same inside and outside the sandbox's user namespace.
        gid: Group id, likewise.
        config: `limits`; `hide`, paths covered by something empty; `has_workspace`, whether `LOWER_DIR` holds files
            that the workspace starts with; `whole_root`, whether all of the container's root is writable, and thrown
            away in the end; `keep`, paths then taken over from the container as they are.
    """
    write_file("/proc/self/setgroups", "deny")
    write_file("/proc/self/uid_map", f"{uid} {uid} 1")
    write_file("/proc/self/gid_map", f"{gid} {gid} 1")
    safe = _MS_NOSUID | _MS_NODEV
    disk_bytes = config["limits"]["disk_bytes"]
    mount("scratch", _SCRATCH, "tmpfs", safe, f"size={disk_bytes},nr_inodes={max(1024, disk_bytes // 4096)},mode=0755")
    root = _overlay_root(config["keep"]) if config["whole_root"] else ""
    for name, target, mode in (("tmp", "/tmp", 0o1777), ("shm", "/dev/shm", 0o1777), ("service", SERVICE_DIR, 0o700)):
        os.mkdir(f"{_SCRATCH}/{name}")
        os.chmod(f"{_SCRATCH}/{name}", mode)
        os.makedirs(root + target, exist_ok=True)
        mount(f"{_SCRATCH}/{name}", root + target, None, _MS_BIND)
    if config["has_workspace"]:
        _overlay("workspace", LOWER_DIR, root + WORKDIR)
    elif not root:
        os.mkdir(f"{_SCRATCH}/testbed", 0o755)
        mount(f"{_SCRATCH}/testbed", WORKDIR, None, _MS_BIND)
    mount("devpts", f"{root}/dev/pts", "devpts", _MS_NOSUID | _MS_NOEXEC, "newinstance,ptmxmode=0666,mode=620")
    try:
        mount("proc", f"{root}/proc", "proc", safe | _MS_NOEXEC)
        # No user namespaces below this one: they would bring back capabilities.
        write_file(f"{root}/proc/sys/user/max_user_namespaces", "0")
    except OSError:
        mount("none", f"{root}/proc", "tmpfs", safe | _MS_NOEXEC | _MS_RDONLY, "size=4k")
    if root:
        _change_root(root)
    else:
        _cover((_SCRATCH, *config["hide"]))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as loopback:
        request = struct.pack("16sH14x", b"lo", _IFF_UP | _IFF_RUNNING)
        fcntl.ioctl(loopback, _SIOCSIFFLAGS, request)
    with contextlib.suppress(OSError):
        write_file("/proc/self/oom_score_adj", "900")
    os.chdir(WORKDIR)
    drop_privileges()


def _cover(paths: Iterable[str]) -> None:
    for path in paths:
        if not os.path.exists(path):
            raise OSError(errno.ENOENT, f"cannot hide {path}: there is no such path in the image")
        mount(EMPTY_DIR if os.path.isdir(path) else EMPTY_FILE, path, None, _MS_BIND)


def _overlay(name: str, lower: str, target: str) -> None:
    """Mount a directory copy-on-write; what is written goes into the scratch space."""
    for part in ("upper", "work"):
        os.mkdir(f"{_SCRATCH}/{name}-{part}", 0o755)
    layers = f"lowerdir={lower},upperdir={_SCRATCH}/{name}-upper,workdir={_SCRATCH}/{name}-work"
    safe = _MS_NOSUID | _MS_NODEV
    try:
        mount("overlay", target, "overlay", safe, f"{layers},userxattr")
    except OSError:  # tmpfs without user attributes, before Linux 6.6: only directories that replace others need them
        mount("overlay", target, "overlay", safe, layers)


def _overlay_root(keep: Iterable[str]) -> str:
    """Mount the container's root copy-on-write, with its devices and what is to be kept; return where."""
    root = f"{_SCRATCH}/root"
    os.mkdir(root)
    _overlay("root", ROOT_DIR, root)
    for path in ("/dev", *keep):
        if os.path.isdir(path):
            os.makedirs(root + path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(root + path), exist_ok=True)
            os.close(os.open(root + path, os.O_WRONLY | os.O_CREAT, 0o644))
        mount(path, root + path, None, _MS_BIND | _MS_REC)
    os.makedirs(f"{root}/proc", exist_ok=True)
    os.makedirs(root + WORKDIR, exist_ok=True)
    return root


def _change_root(root: str) -> None:
    """Make a mount the root, and drop the old one with everything mounted below it."""
    os.chdir(root)
    number = ctypes.c_long(_SYS_PIVOT_ROOT[platform.machine()])
    check(_libc.syscall(number, b".", b"."), "pivot_root")
    check(_libc.umount2(b".", _MNT_DETACH), "umount the old root")
    os.chdir("/")


def drop_privileges() -> None:
    """Give up every capability for good, and close this process's memory to its own user."""
    check(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "no_new_privs")
    for capability in range(64):
        if _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    check(_libc.capset(header, (ctypes.c_uint32 * 6)()), "capset")
    # Commands share the user id with this process: without this they could read its memory through /proc.
    check(_libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable")


def join_new_keyring() -> None:
    """Leave the session keyring inherited from whoever started this process: its keys are not for sandboxes."""
    number = _SYS_KEYCTL.get(platform.machine())
    if number is not None:
        _libc.syscall(ctypes.c_long(number), ctypes.c_long(_KEYCTL_JOIN_SESSION_KEYRING), None)


def set_limits(limits: dict[str, Any]) -> None:
    """Limit this process and all it will start."""
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["file_bytes"]),
        (resource.RLIMIT_NOFILE, limits["num_open_files"]),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, _num_processes(limits, SPARE_PROCESSES)),
    ):
        if value is not None:
            _lower_limit(0, kind, value)


def set_child_limits(pid: int, limits: dict[str, Any]) -> None:
    """Limit a child further than this process itself."""
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
    if limits["num_processes"] is None:  # the user id is shared with other work of the machine
        return None
    # Before 5.14 the kernel counts a user's processes over all namespaces together, so the limit would be shared.
    major, minor = (int(part) for part in platform.release().split(".")[:2])
    return limits["num_processes"] + spare if (major, minor) >= (5, 14) else None


class Wakeup:
    """A descriptor that becomes readable when a child has ended."""

    def __init__(self) -> None:
        self.read_fd, self.write_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        # Process 1 is spared every signal it has no handler for; Python's own for SIGINT would let a command end it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.write_fd, warn_on_full_buffer=False)

    def clear(self) -> None:
        """Forget what has been signalled."""
        with contextlib.suppress(BlockingIOError):
            while len(os.read(self.read_fd, 512)) == 512:
                pass

    def close(self) -> None:
        """Give the signals back."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.close(self.read_fd)
        os.close(self.write_fd)


def ended_children() -> Iterator[tuple[int, int]]:
    """Collect the children that have ended: process id and wait status of each."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        yield pid, status


def silence_standard_streams() -> None:
    """Put nothing in the place of standard input, output and error."""
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    os.close(null)


def adopt_orphans() -> None:
    """Become the parent of every process below whose own parent has ended, as process 1 is anyway."""
    check(_libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "child_subreaper")


def kill_descendants() -> None:
    """Send SIGKILL to every process below this one; once the caller has reaped them, none is left behind."""
    parents = dict(_parents())
    for pid in parents:
        ancestor = pid
        while (ancestor := parents.get(ancestor, 0)) > 0:
            if ancestor == os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                break


def end_descendants() -> None:
    """Kill and reap every process below this one."""
    with contextlib.suppress(ChildProcessError):
        while True:
            kill_descendants()
            os.waitpid(-1, 0)


def _parents() -> Iterator[tuple[int, int]]:
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
                yield int(name), int(file.read().rpartition(b")")[2].split()[1])
