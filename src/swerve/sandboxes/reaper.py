"""What sandboxes of a killed launcher leave behind, written down when they start and swept by whoever comes next.

Sandboxes of the default backend leave nothing: the kernel ends them with their launcher. Other backends may leave a
process, a container or a folder. Each sandbox has a file that names them, until it is closed; a file whose launcher is
gone, or whose time has come, is swept.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from swerve.config import cache_directory
from swerve.telemetry import write_atomic

TIME_TO_LIVE_S = 24 * 3600.0
"""Seconds after which a sandbox is swept even though its launcher lives."""

_RUNTIME_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Leftovers:
    """What one sandbox may leave behind.

    Attributes:
        container: Program, global options and name of a container, or empty.
        directory: A folder, or empty.
        marker: A text in the environment of its processes that no other process has, or empty.
    """

    container: tuple[str, ...] = ()
    directory: str = ""
    marker: str = ""

    def sweep(self) -> None:
        """Kill and remove all of it; what is not there is no fault."""
        if self.container:
            *program, name = self.container
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(
                    [*program, "rm", "--force", name], capture_output=True, timeout=_RUNTIME_TIMEOUT_S, check=False
                )
        if self.marker:
            for _ in range(3):
                if not _kill_marked(self.marker):
                    break
        if self.directory:
            shutil.rmtree(self.directory, ignore_errors=True)


def record(leftovers: Leftovers, time_to_live_s: float = TIME_TO_LIVE_S) -> Path | None:
    """Write down what a sandbox may leave behind; returns the file, or `None` if it can leave nothing.

    Raises:
        MachineError: The file cannot be written.
    """
    if leftovers == Leftovers():
        return None
    path = _directory() / f"{uuid.uuid4().hex}.json"
    entry = {
        "launcher": os.getpid(),
        "launcher_started": _started(os.getpid()),
        "expires": time.time() + time_to_live_s,
        "leftovers": asdict(leftovers),
    }
    write_atomic(path, json.dumps(entry))
    return path


def forget(path: Path) -> None:
    """Remove a sandbox's file, once the sandbox is closed."""
    path.unlink(missing_ok=True)


def reap() -> int:
    """Sweep what sandboxes of dead launchers, or sandboxes past their time, have left; returns of how many."""
    num_swept = 0
    for path in sorted(_directory().glob("*.json")):
        try:
            entry = json.loads(path.read_text(encoding="utf-8"))
            leftovers = Leftovers(**entry["leftovers"] | {"container": tuple(entry["leftovers"]["container"])})
            alive = _started(entry["launcher"]) == entry["launcher_started"] and entry["expires"] > time.time()
        except FileNotFoundError:
            continue
        except (OSError, ValueError, KeyError, TypeError):
            forget(path)
            continue
        if not alive:
            leftovers.sweep()
            forget(path)
            num_swept += 1
    return num_swept


def _directory() -> Path:
    return cache_directory() / "sandboxes"


def _started(pid: int) -> str:
    """When a process started, in the kernel's count; empty if there is none of that id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _kill_marked(marker: str) -> int:
    """Kill every process whose environment holds a text; returns how many there were."""
    num_killed = 0
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker.encode() in (entry / "environ").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
                num_killed += 1
    return num_killed
