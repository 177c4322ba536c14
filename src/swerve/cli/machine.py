"""What this machine offers a run beyond sandboxes: interpreter, cores, memory, disk, accelerators."""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil

from swerve.sandboxes.probe import Finding

_GIB = 2**30
_NEEDED_MEMORY_BYTES = 3 * _GIB
_NEEDED_DISK_BYTES = 2 * _GIB


def find_python() -> Finding:
    """The interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    tested = (3, 11) <= sys.version_info[:2] <= (3, 13)
    remedy = "" if tested else "use Python 3.11 to 3.13, on which Swerve is tested"
    return Finding(name="python", ok=tested, required=False, detail=version, remedy=remedy)


def find_cores() -> Finding:
    """Cores this process may use, by affinity and by control group."""
    cores = len(os.sched_getaffinity(0))
    quota = _cpu_quota()
    detail = f"{cores} cores" + (f", of which the control group grants {quota:g}" if quota and quota < cores else "")
    enough = min(cores, quota or cores) >= 2
    remedy = "" if enough else "expect the demo to take twice as long: its times are stated for two cores"
    return Finding(name="cores", ok=enough, required=False, detail=detail, remedy=remedy)


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
    detail = f"{memory.available / _GIB:.1f} of {memory.total / _GIB:.1f} GiB available"
    remedy = "" if enough else "close something, or lower rollout.num_slots: the demo needs up to 3 GiB"
    return Finding(name="memory", ok=enough, required=False, detail=detail, remedy=remedy)


def find_disk(directory: Path) -> Finding:
    """Space where runs and temporary files go."""
    places = dict.fromkeys([str(directory.resolve()), tempfile.gettempdir()])
    free = {place: shutil.disk_usage(place).free for place in places}
    enough = min(free.values()) >= _NEEDED_DISK_BYTES
    detail = ", ".join(f"{value / _GIB:.1f} GiB free in {place}" for place, value in free.items())
    remedy = "" if enough else "keep 2 GiB free, or choose another run.directory or TMPDIR"
    return Finding(name="disk", ok=enough, required=False, detail=detail, remedy=remedy)


def ask_jax() -> tuple[str, str, int, str] | None:
    """What JAX computes on, asked in a process of its own.

    Returns:
        Its version, the platform, how many devices, and their name; `None` where it does not start.
    """
    code = "import jax; d = jax.devices(); print(jax.__version__, d[0].platform, len(d), d[0].device_kind, sep='|')"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
        version, platform, count, kind = done.stdout.strip().splitlines()[-1].split("|")
        return version, platform, int(count), kind
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


def find_accelerators() -> Finding:
    """Devices that JAX computes on."""
    present = sorted(str(path) for pattern in ("nvidia[0-9]*", "accel[0-9]*") for path in Path("/dev").glob(pattern))
    told = ask_jax()
    if told is None:
        remedy = "install Swerve again: python -c 'import jax; jax.devices()' fails"
        return Finding(name="accelerators", ok=False, required=True, detail="JAX does not start", remedy=remedy)
    version, platform, count, kind = told
    detail = f"JAX {version} computes on {count} x {kind} ({platform})"
    if present and platform == "cpu":
        unused = f"{detail}; unused: {', '.join(present)}"
        remedy = "install swerve[cuda] or swerve[tpu] to use them"
        return Finding(name="accelerators", ok=False, required=False, detail=unused, remedy=remedy)
    return Finding(name="accelerators", ok=True, required=False, detail=detail)
