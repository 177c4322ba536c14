"""Where a run's numbers come from: source, packages, machine, command, and what it started from, by digest.

Never the environment, which carries secrets.
"""

import datetime
import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import psutil

import swerve
from swerve.config import Recipe, digest
from swerve.telemetry.files import file_digest
from swerve.types import MachineError

CONTAINER = Path("/opt/swerve/provenance.json")
"""Where an image says what it was built from: source commit, base image, locks."""
SMALL_FILE_BYTES = 64 << 20
"""Files of a folder up to this size are told by their digests, larger ones by their sizes."""
_ROOT = Path(swerve.__file__).resolve().parents[2]


def collect_provenance(
    argv: Sequence[str] | None = None, *, recipe: Recipe | None = None, inputs: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Facts that say what produced a run.

    Args:
        argv: The command line; that of this process where `None`.
        recipe: What is run, resolved.
        inputs: What it starts from, by digest.

    Returns:
        JSON values. User names and passwords inside addresses are cut out of the command line.

    Raises:
        MachineError: The image that it runs in does not say what it was built from.
    """
    container, packages = container_facts(CONTAINER), installed_packages()
    return {
        "started_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": [_without_credentials(word) for word in (sys.argv if argv is None else argv)],
        "swerve_version": swerve.__version__,
        "source": source_revision(container),
        "container": container,
        "recipe_sha256": digest(recipe) if recipe is not None else None,
        "inputs": dict(inputs or {}),
        "python": platform.python_version(),
        "lock_sha256": lock_digest(),
        "packages_sha256": packages_digest(packages),
        "packages": packages,
        "host": host_facts(),
    }


def container_facts(path: Path) -> dict[str, Any] | None:
    """What the image that this process runs in was built from.

    Args:
        path: Where an image says so.

    Returns:
        What it says; `None` where there is nothing, outside of an image of ours.

    Raises:
        MachineError: The file is no JSON object.
    """
    if not path.exists():
        return None
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise MachineError(f"{path}: cannot be read: {error}: build the image again") from None
    if not isinstance(facts, dict):
        raise MachineError(f"{path}: no JSON object: build the image again")
    return cast("dict[str, Any]", facts)


def source_revision(container: Mapping[str, Any] | None = None) -> dict[str, object]:
    """Commit that this package comes from.

    Args:
        container: From `container_facts`.

    Returns:
        `commit`, of the checkout that it runs from or else that of the image (empty where neither is known), and
        `dirty` (whether tracked files of the checkout differ from it).
    """
    commit = _git("rev-parse", "HEAD") if (_ROOT / ".git").exists() else ""
    dirty = bool(_git("status", "--porcelain", "--untracked-files=no")) if commit else False
    return {"commit": commit or (container or {}).get("source_commit", ""), "dirty": dirty}


def lock_digest() -> str | None:
    """SHA-256 of the checkout's package lock; `None` where it does not run from a checkout."""
    lock = _ROOT / "requirements.lock"
    return file_digest(lock) if lock.is_file() and (_ROOT / "pyproject.toml").is_file() else None


def packages_digest(packages: Mapping[str, str]) -> str:
    """SHA-256 over the lines `name==version` of installed distributions, in order of their names."""
    return hashlib.sha256("".join(f"{name}=={packages[name]}\n" for name in sorted(packages)).encode()).hexdigest()


def folder_facts(directory: Path) -> dict[str, dict[str, int | str]]:
    """What lies in a folder, for example a policy's files.

    Large files are not read: hundreds of gigabytes take longer than a run's start may. Lists of their digests that lie
    beside them are small, and thereby pinned.

    Args:
        directory: The folder; not entered further.

    Returns:
        `bytes` of each file by name, and `sha256` of those of at most `SMALL_FILE_BYTES`.
    """
    facts: dict[str, dict[str, int | str]] = {}
    for path in sorted(path for path in directory.iterdir() if path.is_file()):
        size = path.stat().st_size
        facts[path.name] = {"bytes": size}
        if size <= SMALL_FILE_BYTES:
            facts[path.name]["sha256"] = file_digest(path)
    return facts


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


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(_ROOT), *arguments], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _without_credentials(word: str) -> str:
    return re.sub(r"://[^/@\s]+@", "://***@", word)
