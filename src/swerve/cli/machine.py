"""What this machine can do: each finding with what it means and, where something is missing, the remedy."""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

_GIB = 2**30
_NEEDED_MEMORY_BYTES = 3 * _GIB
_NEEDED_DISK_BYTES = 2 * _GIB


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One thing looked at.

    Attributes:
        name: What.
        status: `ok`; `limited`, usable at a price; `missing`, a job that needs it fails; `absent`, optional.
        found: What is there, in words.
        remedy: What to do about it; empty where nothing is to be done.
    """

    name: str
    status: str
    found: str
    remedy: str = ""


def find_python() -> Finding:
    """The interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    tested = (3, 11) <= sys.version_info[:2] <= (3, 13)
    remedy = "" if tested else "Swerve is tested on Python 3.11 to 3.13"
    return Finding(name="python", status="ok" if tested else "limited", found=version, remedy=remedy)


def find_cores() -> Finding:
    """Cores this process may use, by affinity and by control group."""
    cores = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    found = f"{cores} cores" + (f", of which the control group grants {quota:g}" if quota and quota < cores else "")
    enough = min(cores, quota or cores) >= 2
    remedy = "" if enough else "the demo's times are stated for two cores; expect twice as long"
    return Finding(name="cores", status="ok" if enough else "limited", found=found, remedy=remedy)


def _cpu_quota() -> float | None:
    for quota, period in (
        ("/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"),
        ("/sys/fs/cgroup/cpu.max", None),
    ):
        try:
            words = Path(quota).read_text().split()
            words += Path(period).read_text().split() if period else []
            return int(words[0]) / int(words[1]) if int(words[0]) > 0 else None
        except (OSError, ValueError, IndexError):
            continue
    return None


def find_memory() -> Finding:
    """Memory that can still be had."""
    memory = psutil.virtual_memory()
    enough = memory.available >= _NEEDED_MEMORY_BYTES
    return Finding(
        name="memory",
        status="ok" if enough else "limited",
        found=f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB available",
        remedy="" if enough else "the demo needs up to 3 GiB: close something, or lower rollout.num_slots",
    )


def find_disk(directory: Path) -> Finding:
    """Space where runs and temporary files go."""
    places = dict.fromkeys([str(directory.resolve()), tempfile.gettempdir()])
    free = {place: shutil.disk_usage(place).free for place in places}
    enough = min(free.values()) >= _NEEDED_DISK_BYTES
    return Finding(
        name="disk",
        status="ok" if enough else "limited",
        found=", ".join(f"{value / _GIB:.1f} GiB free in {place}" for place, value in free.items()),
        remedy="" if enough else "keep 2 GiB free, or choose another run.directory or TMPDIR",
    )


def find_accelerators() -> Finding:
    """Devices JAX would compute on."""
    devices = sorted(str(path) for pattern in ("nvidia[0-9]*", "accel[0-9]*") for path in Path("/dev").glob(pattern))
    code = "import jax; d = jax.devices(); print(jax.__version__, d[0].platform, len(d), d[0].device_kind, sep='|')"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
        version, platform, count, kind = done.stdout.strip().splitlines()[-1].split("|")
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return Finding(name="accelerators", status="missing", found="JAX does not start", remedy="pip install swerve")
    found = f"JAX {version} computes on {count} x {kind} ({platform})"
    unused = bool(devices) and platform == "cpu"
    return Finding(
        name="accelerators",
        status="limited" if unused else "ok",
        found=found + (f"; unused: {', '.join(devices)}" if unused else ""),
        remedy="install swerve[cuda] or swerve[tpu] to use them" if unused else "",
    )


def find_tool(name: str, programs: tuple[str, ...], remedy: str, service: str = "") -> Finding:
    """An optional program.

    Args:
        name: Of the finding.
        programs: Names to look for, best first.
        remedy: What to do to have it.
        service: Subcommand that succeeds only if the service behind the program answers; empty where there is none.

    Returns:
        The first that answers to `--version`.
    """
    for program in programs:
        path = shutil.which(program)
        if path is None:
            continue
        version = _answer([path, "--version"])
        if not version:
            continue
        found = f"{version} at {path}"
        if service and not _answer([path, service]):
            start = f"start its service, or let this user reach it; {remedy}"
            return Finding(name=name, status="absent", found=f"{found}, whose service does not answer", remedy=start)
        return Finding(name=name, status="ok", found=found)
    return Finding(name=name, status="absent", found="not installed", remedy=remedy)


def _answer(command: list[str]) -> str:
    """First line that a command prints; empty where it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().partition("\n")[0]


def find_namespaces() -> Finding:
    """Whether the kernel lets this user make namespaces: tried, not guessed."""
    # CLONE_NEWUSER, CLONE_NEWNS, CLONE_NEWPID and CLONE_NEWNET; os.unshare is there only from Python 3.12 on.
    attempt = "import ctypes; raise SystemExit(ctypes.CDLL(None).unshare(0x70020000) != 0)"
    done = subprocess.run([sys.executable, "-c", attempt], capture_output=True, timeout=30, check=False)
    if done.returncode == 0:
        return Finding(name="namespaces", status="ok", found="user, mount, pid and network namespaces")
    for setting, bad, good in (
        ("kernel.unprivileged_userns_clone", "0", "1"),
        ("kernel.apparmor_restrict_unprivileged_userns", "1", "0"),
        ("user.max_user_namespaces", "0", "10000"),
    ):
        path = Path("/proc/sys") / setting.replace(".", "/")
        if path.exists() and path.read_text().strip() == bad:
            remedy = f"as root: sysctl -w {setting}={good}"
            return Finding(name="namespaces", status="missing", found=f"{setting} = {bad}", remedy=remedy)
    remedy = "allow user namespaces in the surrounding container (docker: --security-opt seccomp=unconfined)"
    return Finding(name="namespaces", status="missing", found="refused by the kernel or a container", remedy=remedy)


def find_cgroups() -> Finding:
    """Control groups that limits could be put in."""
    root = Path("/sys/fs/cgroup")
    if (root / "cgroup.controllers").exists():
        kind, controllers = "v2", (root / "cgroup.controllers").read_text().split()
        writable = os.access(root, os.W_OK) and os.access(root / "cgroup.subtree_control", os.W_OK)
    else:
        controllers = [name for name in ("memory", "pids", "cpu") if (root / name / "tasks").exists()]
        kind, writable = "v1", all(os.access(root / name, os.W_OK) for name in controllers)
    usable = writable and {"memory", "pids"} <= set(controllers)
    return Finding(
        name="cgroups",
        status="ok" if usable else "limited",
        found=f"{kind}, {'writable' if writable else 'read-only'}: {' '.join(controllers) or 'no controllers'}",
        remedy="" if usable else "none needed: limits are set per process instead (rlimits)",
    )
