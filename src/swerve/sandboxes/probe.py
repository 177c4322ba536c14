"""What this machine can do for sandboxes: each finding with its detail and, where something is missing, the remedy."""

from __future__ import annotations

import asyncio
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from swerve.sandboxes.apptainer import find_apptainer
from swerve.sandboxes.bubblewrap import find_bubblewrap
from swerve.sandboxes.docker import find_runtime
from swerve.sandboxes.plan import UNPRIVILEGED_ID, gives_root_away
from swerve.sandboxes.pool import SandboxPool
from swerve.sandboxes.protocol import SandboxImage
from swerve.types import MachineError, SwerveError

_CLONE_NEWUSER = 0x10000000
_CONTROLLERS = ("memory", "pids", "cpu")


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing a machine can or cannot do.

    Attributes:
        name: What was looked at.
        ok: Whether it can be used.
        required: Whether the default backend needs it.
        detail: What was found.
        remedy: What to do about it if it is missing; empty otherwise.
    """

    name: str
    ok: bool
    required: bool
    detail: str
    remedy: str = ""


def probe() -> list[Finding]:
    """Look at everything; starts processes for a second or two and leaves none.

    Returns:
        Findings in a fixed order.
    """
    looks: tuple[Callable[[], Finding], ...] = (
        probe_kernel,
        probe_user_namespaces,
        probe_bubblewrap,
        probe_sandbox,
        probe_cgroups,
        probe_apptainer,
        probe_docker,
    )
    return [look() for look in looks]


def probe_kernel() -> Finding:
    """Whether the kernel counts processes per sandbox (5.14)."""
    release = platform.release()
    recent = tuple(int(part) for part in release.split(".")[:2]) >= (5, 14)
    remedy = "" if recent else "use Linux 5.14 or newer: below it the limit on a sandbox's processes is not enforced"
    return Finding(name="kernel", ok=recent, required=False, detail=f"Linux {release}", remedy=remedy)


def probe_user_namespaces() -> Finding:
    """Whether an unprivileged process may create a user namespace and map itself into it."""
    detail = _try_user_namespace()
    if not detail:
        identity = f"as user {UNPRIVILEGED_ID}, dropped to from root" if gives_root_away() else "as this user"
        return Finding(name="user namespaces", ok=True, required=True, detail=f"allowed {identity}")
    settings = {
        "user.max_user_namespaces": ("/proc/sys/user/max_user_namespaces", "0", "15000"),
        "kernel.unprivileged_userns_clone": ("/proc/sys/kernel/unprivileged_userns_clone", "0", "1"),
        "kernel.apparmor_restrict_unprivileged_userns": (
            "/proc/sys/kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "0",
        ),
    }
    wrong = [f"sysctl -w {key}={good}" for key, (path, bad, good) in settings.items() if _read(path) == bad]
    remedy = " && ".join(wrong) or "allow user namespaces (inside a container: relax its seccomp profile)"
    return Finding(name="user namespaces", ok=False, required=True, detail=detail, remedy=remedy)


def _try_user_namespace() -> str:
    """Fork a child that tries; returns what went wrong, or nothing."""
    program = (
        "import ctypes, os, sys\n"
        "drop = int(sys.argv[1])\n"
        "if drop:\n"
        "    os.setgroups([]); os.setresgid(drop, drop, drop); os.setresuid(drop, drop, drop)\n"
        "uid = os.getuid()\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "libc.prctl(4, 1, 0, 0, 0)\n"
        f"if libc.unshare({_CLONE_NEWUSER}) != 0: sys.exit('unshare: ' + os.strerror(ctypes.get_errno()))\n"
        "try:\n"
        "    open('/proc/self/uid_map', 'w').write(f'{uid} {uid} 1')\n"
        "except OSError as error:\n"
        "    sys.exit(f'uid map: {error.strerror}')\n"
    )
    command = [sys.executable, "-I", "-S", "-c", program, str(UNPRIVILEGED_ID if gives_root_away() else 0)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    return "" if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def probe_bubblewrap() -> Finding:
    """Which bwrap is used."""
    try:
        found = find_bubblewrap()
    except MachineError as error:
        detail, _, remedy = str(error).partition(": ")
        return Finding(name="bubblewrap", ok=False, required=True, detail=detail, remedy=remedy)
    version = ".".join(str(part) for part in found.version)
    overlay = "with overlays" if found.has_overlay else "without overlays"
    detail = f"{version} ({found.origin}, {overlay}) at {found.path}"
    return Finding(name="bubblewrap", ok=True, required=True, detail=detail)


def probe_sandbox() -> Finding:
    """Start a sandbox, run a command in it, and close it."""

    async def attempt() -> tuple[float, str]:
        async with SandboxPool([SandboxImage(name="probe")]) as pool:
            await (await pool.start("probe")).close()
            began = time.monotonic()
            sandbox = await pool.start("probe")
            result = await sandbox.exec("id -u", 10.0)
            await sandbox.close()
            return time.monotonic() - began, result.output.strip()

    try:
        seconds, uid = asyncio.run(attempt())
    except SwerveError as error:
        detail, _, remedy = str(error).partition("; ")
        return Finding(name="sandbox", ok=False, required=True, detail=detail, remedy=remedy or "see the lines above")
    detail = f"started, ran a command as user {uid}, and closed in {1e3 * seconds:.0f} ms"
    return Finding(name="sandbox", ok=True, required=True, detail=detail)


def probe_cgroups() -> Finding:
    """How sandboxes are limited, and which control groups there are for runtimes that use them."""
    v2 = Path("/sys/fs/cgroup/cgroup.controllers")
    if v2.exists():
        have = set(v2.read_text(encoding="ascii").split()) & set(_CONTROLLERS)
        writable = os.access("/sys/fs/cgroup/cgroup.subtree_control", os.W_OK)
        version = "v2"
    else:
        folders = {name: Path("/sys/fs/cgroup") / name for name in _CONTROLLERS}
        have = {name for name, folder in folders.items() if folder.is_dir()}
        writable = bool(have) and all(os.access(folders[name], os.W_OK) for name in have)
        version = "v1"
    ok = have == set(_CONTROLLERS) and writable
    found = ", ".join(name for name in _CONTROLLERS if name in have) or "no controllers"
    groups = f"{version}: {found}{'' if writable else ', not writable by this user'}"
    detail = f"limits are kept per process (rlimits); control groups {groups}"
    remedy = "" if ok else "not needed: only Docker and Podman limit sandboxes by control groups"
    return Finding(name="cgroups", ok=ok, required=False, detail=detail, remedy=remedy)


def probe_apptainer() -> Finding:
    """Whether Apptainer or Singularity is installed."""
    return _probe_program("apptainer", find_apptainer)


def probe_docker() -> Finding:
    """Whether Docker or Podman is installed and answers."""
    return _probe_program("docker", find_runtime)


def _probe_program(name: str, find: Callable[[], Path]) -> Finding:
    try:
        return Finding(name=name, ok=True, required=False, detail=str(find()))
    except MachineError as error:
        detail, _, remedy = str(error).rpartition(": ")
        return Finding(name=name, ok=False, required=False, detail=detail, remedy=remedy)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except OSError:
        return ""
