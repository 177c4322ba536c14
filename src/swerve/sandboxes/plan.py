"""What an image's container sees of the machine: files, environment, and the interpreter of the guest."""

from __future__ import annotations

import functools
import importlib.metadata
import os
import re
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swerve.sandboxes.protocol import WORKDIR, SandboxImage
from swerve.types import MachineError, SwerveError

GUEST_DIR = Path(__file__).with_name("guest")
GUEST_PROGRAM = """
import ast, os, sys
if sys.flags.hash_randomization:
    held = {name: os.environ.pop(name) for name in list(os.environ) if name.startswith("PYTHON")}
    os.environ.update(PYTHONHASHSEED="0", SWERVE_HELD=repr(held))
    command = open("/proc/self/cmdline", "rb").read().split(b"\\0")[:-1]
    command[command.index(b"-I")] = b"-sP"
    os.execve(command[0], command, os.environ)
del os.environ["PYTHONHASHSEED"]
os.environ.update(ast.literal_eval(os.environ.pop("SWERVE_HELD")))
sys.path.insert(0, sys.argv[1])
from guest.__main__ import main
main(sys.argv[2:])
"""
"""What the guest's interpreter runs: it starts anew with a fixed order of sets, which `-I` alone would not keep."""
UNPRIVILEGED_ID = 65532
"""User and group a root launcher becomes. No files belong to it."""

_GUEST_DIR = "/opt/swerve"
_PYTHON_DIR = "/opt/python"
_HOST_DIR = "/run/host"
_LOADED = """
import contextlib, ctypes, importlib, pathlib, sysconfig
for file in pathlib.Path(sysconfig.get_path("stdlib"), "lib-dynload").glob("*.so"):
    with contextlib.suppress(Exception):
        if "_tkinter" in file.name: continue
        importlib.import_module(file.name.partition(".")[0])
class Loaded(ctypes.Structure):
    _fields_ = [("address", ctypes.c_void_p), ("name", ctypes.c_char_p)]
@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(Loaded), ctypes.c_size_t, ctypes.c_void_p)
def tell(loaded, size, data):
    print((loaded.contents.name or b"").decode())
    return 0
ctypes.CDLL(None).dl_iterate_phdr(tell, None)
"""
"""Prints the files of all shared libraries that this Python's own modules need."""
_RESERVED = (WORKDIR, "/tmp", "/dev", "/proc", "/run", _GUEST_DIR, _PYTHON_DIR)


def find_program(
    names: Sequence[str], argument: str, timeout_s: float, answers: Callable[[subprocess.CompletedProcess[str]], bool]
) -> tuple[Path | None, str]:
    """Search for the first program that answers.

    Args:
        names: In order of preference.
        argument: Given to each.
        timeout_s: Wall-clock seconds each may take.
        answers: Whether an answer is good.

    Returns:
        Its path, or `None` and the last one's complaint; the complaint is empty if none is installed.
    """
    complaint = ""
    for name in names:
        path = shutil.which(name)
        if path is None:
            continue
        try:
            done = subprocess.run([path, argument], capture_output=True, text=True, timeout=timeout_s, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            complaint = f"{path} does not answer ({type(error).__name__})"
            continue
        if answers(done):
            return Path(path).absolute(), ""
        complaint = f"{path} does not answer: {' '.join((done.stderr or done.stdout).split())[:200]}"
    return None, complaint


@functools.cache
def gives_root_away() -> bool:
    """Whether containers are started as another user: so it is for root, unless root of a small user namespace.

    There root is an ordinary user outside, and may have no other identity to take.
    """
    if os.geteuid() != 0:
        return False
    ranges = (line.split() for line in Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines())
    return any(int(first) <= UNPRIVILEGED_ID < int(first) + int(count) for first, _, count in ranges)


@dataclass(frozen=True, kw_only=True, slots=True)
class HostPython:
    """This interpreter, in a form that runs below any root.

    Attributes:
        binds: Sandbox path to host path.
        command: How it is started there.
    """

    binds: dict[str, Path]
    command: tuple[str, ...]


@functools.cache
def host_python() -> HostPython:
    """Find the interpreter, its library, its dynamic linker, and what it and its own modules load.

    Raises:
        MachineError: If it is a static program.
    """
    interpreter = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib")).resolve()
    python = f"{_HOST_DIR}/python"
    binds = {f"{python}/bin/python3": interpreter, f"{python}/lib/{library.name}": library}
    command = [interpreter, "-I", "-S", "-c", _LOADED]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    needed = {Path(line) for line in told.stdout.split("\n") if line.startswith("/")}
    needed = {path for path in needed if path != interpreter and not path.is_relative_to(library)}
    linker = next((path for path in needed if path.name.startswith("ld-")), None)
    if linker is None:
        raise MachineError(f"{interpreter}: has no dynamic linker: use a Python that is linked to its libraries by one")
    binds |= {f"{_HOST_DIR}/lib/{path.name}": path.resolve() for path in sorted(needed)}
    loader = (f"{_HOST_DIR}/lib/{linker.name}", "--library-path", f"{_HOST_DIR}/lib")
    return HostPython(binds=binds, command=(*loader, f"{python}/bin/python3"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ContainerPlan:
    """Everything needed to start an image's container.

    Attributes:
        root: Host directory that is the container's root, or `None` for the machine's own system.
        binds: Sandbox path to host path, in the order they are mounted.
        environment: The whole environment of every process inside.
        guest: Command that starts the guest; what it is to be follows.
        python_paths: Directories inside that it imports from.
        hide: Paths covered in each sandbox.
        keep: Paths that stay visible in each sandbox where it has a root of its own.
        covered: Directories already covered in the container.
        harness: The harness inside, or `None`.
    """

    root: Path | None
    binds: dict[str, Path]
    environment: dict[str, str]
    guest: tuple[str, ...]
    python_paths: tuple[str, ...]
    hide: tuple[str, ...]
    keep: tuple[str, ...]
    covered: tuple[str, ...]
    harness: str | None


def plan_container(image: SandboxImage, root: Path | None = None, *, foreign: bool = False) -> ContainerPlan:
    """Decide what an image's container sees.

    Args:
        image: Of the pool.
        root: Directory to be the container's root, in place of the machine's own system.
        foreign: The root is not this machine's system: so the interpreter of the guest comes along with its libraries.

    Raises:
        SwerveError: If a file of the image does not exist.
    """
    foreign = foreign or root is not None
    guest_dir, python_dir = ("/run/guest", "/run/python") if foreign else (_GUEST_DIR, _PYTHON_DIR)
    prefix, interpreter = Path(sys.base_prefix).resolve(), Path(sys.executable).resolve()
    if foreign:
        binds, command = dict(host_python().binds), host_python().command
    else:
        binds, command = _system_binds(prefix, interpreter), (str(interpreter),)
    keep = list(binds)
    binds[f"{guest_dir}/guest"] = GUEST_DIR
    harness = None
    if image.harness is not None:
        harness = f"{guest_dir}/harness.py"
        binds[harness] = image.harness
    python_paths = []
    if image.distributions:
        python_paths.append(f"{python_dir}/site")
        binds.update({f"{python_dir}/site/{path.name}": path for path in distribution_paths(image.distributions)})
    for index, path in enumerate(image.python_paths):
        python_paths.append(f"{python_dir}/{index}")
        binds[python_paths[-1]] = path
    for mount in image.mounts:
        if any(Path(mount.target).is_relative_to(place) for place in _RESERVED) or not mount.target.startswith("/"):
            raise SwerveError(f"sandbox image {image.name}: nothing can be mounted at {mount.target}")
        binds[mount.target] = mount.source
        if mount.target not in image.hide:
            keep.append(mount.target)
    if image.workspace is not None and (root is not None or not foreign):
        binds["/run/source"] = image.workspace
    for source in (*binds.values(), *([] if root is None else [root])):
        _check_source(image.name, source)
    search = dict.fromkeys([*(() if foreign else [str(interpreter.parent)]), "/usr/local/bin", "/usr/bin", "/bin"])
    return ContainerPlan(
        root=root,
        binds=binds,
        environment=sandbox_environment(":".join(search), python_paths),
        guest=(*command, "-I", "-S", "-c", GUEST_PROGRAM, guest_dir),
        python_paths=tuple(python_paths),
        hide=(guest_dir, *(["/run/source", "/run/lower"] if "/run/source" in binds else []), *image.hide),
        keep=(*keep, *([python_dir] if python_paths else [])),
        covered=() if foreign else _package_directories(prefix),
        harness=harness,
    )


def sandbox_environment(path: str, python_paths: Sequence[str]) -> dict[str, str]:
    """Every variable of a sandbox; none comes from the launcher.

    Args:
        path: Where programs are searched for.
        python_paths: What Python imports from besides its own library.
    """
    environment = {
        "PATH": path,
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
    return environment | ({"PYTHONPATH": ":".join(python_paths)} if python_paths else {})


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
