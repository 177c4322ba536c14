"""Sandboxes as Apptainer containers of SIF files: one container each, started as an ordinary user in namespaces.

Apptainer mounts a SIF itself where `squashfuse` and /dev/fuse let it; elsewhere it runs the same file system as
`sandboxes.sif` has unpacked it. All files then belong to the sandbox's user, and what is written lies in memory.
Apptainer sets no limit here on all processes together (that needs control groups that are delegated to it): each
process is limited, and the number of processes.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from pathlib import Path

from swerve.sandboxes.bubblewrap import LAUNCHER_FILE
from swerve.sandboxes.plan import UNPRIVILEGED_ID, find_program, gives_root_away, plan_container
from swerve.sandboxes.protocol import SandboxImage, SandboxLimits
from swerve.sandboxes.sif import root_of
from swerve.sandboxes.solo import Launch, guest_config
from swerve.types import MachineError

REMEDY = 'install Apptainer (or set sandbox.backend = "bubblewrap", which runs SIF files without it)'

_STAGE_DIR = "/tmp"
_ARGUMENTS = (
    *("--silent", "exec", "--userns", "--no-init", "--containall", "--cleanenv", "--no-home"),
    *("--net", "--network", "none", "--writable-tmpfs", "--pwd", "/"),
)
_COMPLAINTS = {
    "namespace": "allow unprivileged user namespaces; see `swerve doctor`",
    "unknown userid": "give this user an account: Apptainer refuses users without one",
}


@functools.cache
def find_apptainer() -> Path:
    """The program.

    Raises:
        MachineError: There is none that runs.
    """
    path, complaint = find_program(("apptainer", "singularity"), "--version", 20.0, lambda done: done.returncode == 0)
    if path is None:
        raise MachineError(f"{complaint or 'Apptainer is not installed'}: {REMEDY}")
    return path


class ApptainerBackend:
    """Starts a container of a SIF file for every sandbox."""

    name = "apptainer"

    def __init__(self, images: str = "") -> None:
        """Create the backend.

        Args:
            images: Directory that holds the SIF files of images that name no root of their own.
        """
        self._images = images

    def check(self) -> None:
        """See `SoloBackend.check`."""
        find_apptainer()

    def launch(self, image: SandboxImage, limits: SandboxLimits) -> Launch:
        """See `SoloBackend.launch`."""
        program = find_apptainer()
        root = root_of(image, self._images, needs_one=True, mounted=_can_mount())
        plan = plan_container(image, foreign=True)
        config = guest_config(image, limits, plan)
        hidden = set(config["remove"])
        binds = {target: source for target, source in plan.binds.items() if target not in hidden}
        drop = gives_root_away()
        assert root is not None
        sources = {str(index): str(source) for index, source in enumerate([root, *binds.values()])}
        located = [f"{_STAGE_DIR}/{name}" for name in sources] if drop else list(sources.values())
        command = [str(program), *_ARGUMENTS]
        for source, target in zip(located[1:], binds, strict=True):
            command += ["--bind", f"{source}:{target}:ro"]
        command += [located[0], *plan.guest, "solo"]
        environment = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin", "LC_ALL": "C"}
        if not drop:
            environment["HOME"] = str(Path.home())
            return Launch(command=tuple(command), environment=environment, config=config, complaints=_COMPLAINTS)
        plan_for_launcher = {
            "sources": sources,
            "directory": _STAGE_DIR,
            "uid": UNPRIVILEGED_ID,
            "gid": UNPRIVILEGED_ID,
            "files": _accounts(),
            "environment": environment | {"HOME": f"{_STAGE_DIR}/home"},
            "command": command,
        }
        launcher = (sys.executable, "-I", "-S", str(LAUNCHER_FILE), json.dumps(plan_for_launcher))
        return Launch(command=launcher, environment={"LC_ALL": "C"}, config=config, complaints=_COMPLAINTS)


def _can_mount() -> bool:
    """Whether Apptainer can mount a SIF as an ordinary user."""
    try:
        mode = Path("/dev/fuse").stat().st_mode
    except OSError:
        return False
    allowed = bool(mode & 0o006 == 0o006) if gives_root_away() else os.access("/dev/fuse", os.R_OK | os.W_OK)
    return allowed and any(shutil.which(name) for name in ("squashfuse_ll", "squashfuse"))


def _accounts() -> dict[str, str]:
    """The user database with the unprivileged user in it: Apptainer refuses users without an account."""
    lines = {
        "/etc/passwd": f"swerve:x:{UNPRIVILEGED_ID}:{UNPRIVILEGED_ID}::{_STAGE_DIR}/home:/bin/sh\n",
        "/etc/group": f"swerve:x:{UNPRIVILEGED_ID}:\n",
    }
    return {path: Path(path).read_text(encoding="utf-8") + line for path, line in lines.items()}
