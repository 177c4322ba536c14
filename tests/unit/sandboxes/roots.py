"""Root file systems for tests: a few programs with their libraries, as a directory, a SIF file or a container image."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from swerve.sandboxes.sif import write_sif

APPTAINER_BIN = Path(__file__).parents[3] / ".cache" / "apptainer" / "bin"
"""Where `make apptainer` puts it."""
_PROGRAMS = (
    "bash",
    "sh",
    "cat",
    "env",
    "grep",
    "head",
    "id",
    "ls",
    "mkdir",
    "rm",
    "setsid",
    "sleep",
    "sort",
    "tail",
    "touch",
    "tr",
)


def build_root(directory: Path) -> Path:
    """Fill a directory with a root file system that has a shell and no Python."""
    for name in ("usr/bin", "usr/lib", "tmp", "etc", "proc", "dev", "sys", "run", "testbed"):
        (directory / name).mkdir(parents=True)
    for name in ("bin", "lib", "lib64"):
        (directory / name).symlink_to("usr/bin" if name == "bin" else "usr/lib")
    (directory / "etc/passwd").write_text("root:x:0:0::/:/bin/sh\n")
    (directory / "etc/group").write_text("root:x:0:\n")
    (directory / "etc/hosts").write_text("")
    (directory / "etc/resolv.conf").write_text("")
    for name in _PROGRAMS:
        program = shutil.which(name)
        assert program is not None
        shutil.copy(program, directory / "usr/bin" / name)
        told = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for library in re.findall(r"(/\S+) \(0x", told):
            target = directory / "usr/lib" / ("" if "/ld-" in library else library.split("/lib/")[-1])
            target = target / Path(library).name if "/ld-" in library else target
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library, target)
    (directory / "testbed/repository.txt").write_text("of the image\n")
    return directory


def build_sif(root: Path, path: Path) -> Path:
    """Make a SIF file of a directory."""
    program = tool("mksquashfs", "squashfs-tools, or `make apptainer`")
    squashfs = path.with_suffix(".squashfs")
    path.parent.mkdir(parents=True, exist_ok=True)
    options = ["-noappend", "-comp", "zstd", "-Xcompression-level", "3", "-quiet", "-no-progress", "-all-root"]
    subprocess.run([program, str(root), str(squashfs), *options], check=True, capture_output=True)
    write_sif(path, squashfs)
    squashfs.unlink()
    return path


def tool(name: str, remedy: str) -> str:
    """A program's path; the test is skipped, and says so, where it is missing."""
    path = shutil.which(name, path=f"{APPTAINER_BIN}:{os.environ['PATH']}")
    if path is None:
        pytest.skip(f"NOT TESTED: {name} is not installed: install {remedy}")
    return path


def podman(directory: Path, root: Path) -> tuple[Path, str]:
    """Podman with storage of its own and an image in it; returns its folder, to be put in PATH, and the reference."""
    program = tool("podman", "podman")
    storage = f"--root {directory}/storage --runroot {directory}/run --storage-driver vfs --cgroup-manager cgroupfs"
    script = ["#!/bin/sh", f'set -- {storage} "$@"', f'exec {program} "$@"']
    if Path("/sys/fs/cgroup/unified").exists():  # crun refuses hierarchies of both versions side by side
        script[-1] = f'exec unshare -m sh -c \'umount /sys/fs/cgroup/unified; exec {program} "$@"\' podman "$@"'
    # Containers inside containers: the runtime's own defaults may lie above what is allowed here.
    script.insert(1, 'if [ "$1" = run ]; then shift; set -- run --ulimit nproc=1000:1000 "$@"; fi')
    wrapper = directory / "bin" / "podman"
    wrapper.parent.mkdir(parents=True)
    wrapper.write_text("\n".join(script) + "\n")
    wrapper.chmod(0o755)
    archive = directory / "root.tar"
    subprocess.run(["tar", "-C", str(root), "-cf", str(archive), "."], check=True)
    done = subprocess.run(
        [wrapper, "import", "--quiet", archive, "swerve-test"], capture_output=True, text=True, check=False
    )
    tried = subprocess.run(
        [
            wrapper,
            "run",
            "--rm",
            "--network",
            "none",
            "--ulimit",
            "nofile=64:64",
            "swerve-test",
            "/bin/sh",
            "-c",
            "echo runs",
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if "runs" not in tried.stdout:
        pytest.skip(f"NOT TESTED: Podman cannot run containers here: {done.stderr} {tried.stderr}")
    return wrapper.parent, "swerve-test"
