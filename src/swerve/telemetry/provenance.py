"""Where a run's numbers come from: source, packages, machine, command. Never the environment, which carries secrets."""

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import psutil

import swerve


def collect_provenance(argv: Sequence[str] | None = None) -> dict[str, object]:
    """Facts that say what produced a run.

    Args:
        argv: The command line; that of this process where `None`.

    Returns:
        JSON values. User names and passwords inside addresses are cut out of the command line.
    """
    return {
        "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [_without_credentials(word) for word in (sys.argv if argv is None else argv)],
        "swerve_version": swerve.__version__,
        "source": source_revision(),
        "python": platform.python_version(),
        "packages": installed_packages(),
        "host": host_facts(),
    }


def source_revision() -> dict[str, object]:
    """Commit of the checkout that this package runs from.

    Returns:
        `commit` (empty where it does not run from a checkout) and `dirty` (whether tracked files differ from it).
    """
    package = Path(swerve.__file__).resolve().parent
    root = package.parent.parent
    commit = _git(root, "rev-parse", "HEAD") if (root / ".git").exists() else ""
    dirty = bool(_git(root, "status", "--porcelain", "--untracked-files=no")) if commit else False
    return {"commit": commit, "dirty": dirty}


def installed_packages() -> dict[str, str]:
    """Version of every installed distribution, by lower-case name."""
    pairs = ((dist.metadata["Name"], dist.version) for dist in importlib.metadata.distributions())
    return dict(sorted((name.lower(), version) for name, version in pairs if name))


def host_facts() -> dict[str, object]:
    """What this machine is: system, processor, cores this process may use, memory in bytes."""
    return {
        "system": platform.platform(),
        "machine": platform.machine(),
        "processor": _processor(),
        "num_cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return platform.processor()


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _without_credentials(word: str) -> str:
    return re.sub(r"://[^/@\s]+@", "://***@", word)
