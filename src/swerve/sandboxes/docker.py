"""Sandboxes as Docker or Podman containers: one container each, removed by the runtime when its standard input ends.

Inside, processes have the image's user and none of its capabilities. The runtime limits memory, processes and CPU of
all of them together. Run with Podman; Docker documents every option used here with the same meaning.
"""

from __future__ import annotations

import functools
import os
import subprocess
import uuid
from pathlib import Path

from swerve.sandboxes.plan import find_program, plan_container
from swerve.sandboxes.protocol import SandboxImage, SandboxLimits
from swerve.sandboxes.reaper import Leftovers
from swerve.sandboxes.solo import Launch, guest_config
from swerve.types import MachineError, SwerveError

REMEDY = 'install Docker or Podman and start its service, or set sandbox.backend = "bubblewrap"'

_VARIABLES = ("PATH", "HOME", "XDG_RUNTIME_DIR", "DOCKER_HOST", "DOCKER_CONTEXT", "DOCKER_CONFIG", "CONTAINERS_CONF")
"""What the runtime's own program may need of this process's environment; nothing of it reaches the container."""
_COMPLAINTS = {
    "Unable to find image": "pull it first: sandboxes fetch nothing",
    "image not known": "pull it first: sandboxes fetch nothing",
    "No such image": "pull it first: sandboxes fetch nothing",
    "permission denied while trying to connect": "let this user talk to the service, or use rootless Podman",
}


@functools.cache
def find_runtime() -> Path:
    """The program, which answers.

    Raises:
        MachineError: There is none, or its service does not answer.
    """

    def answers(done: subprocess.CompletedProcess[str]) -> bool:
        # Docker's program exits with 0 even where only its own half could be told.
        return done.returncode == 0 and "Cannot connect" not in done.stderr and "ERROR" not in done.stderr

    path, complaint = find_program(("docker", "podman"), "info", 30.0, answers)
    if path is None:
        raise MachineError(f"{complaint or 'neither Docker nor Podman is installed'}: {REMEDY}")
    return path


def local_images(prefix: str) -> dict[str, str]:
    """The digest of every image that is there and whose name begins with `prefix`, by name.

    Raises:
        MachineError: The runtime does not answer.
    """
    command = [str(find_runtime()), "image", "ls", "--no-trunc", "--format", "{{.Repository}}:{{.Tag}} {{.ID}}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise MachineError(f"{command[0]} does not list its images: {' '.join(done.stderr.split())[:300]}: {REMEDY}")
    named = (line.split() for line in done.stdout.splitlines())
    return {name: identity for name, identity in sorted(named) if name.startswith(prefix)}


class DockerBackend:
    """Starts a container of an image for every sandbox."""

    name = "docker"

    def __init__(self, images: str = "") -> None:
        """Create the backend.

        Args:
            images: Put before the names of images that name no root of their own, as in `registry/r2e:`.
        """
        self._images = images

    def check(self) -> None:
        """See `SoloBackend.check`."""
        find_runtime()

    def launch(self, image: SandboxImage, limits: SandboxLimits) -> Launch:
        """See `SoloBackend.launch`."""
        program = str(find_runtime())
        if not image.root and not self._images:
            raise SwerveError(
                f"sandbox image {image.name}: names no container image: set sandbox.images to a prefix of them"
            )
        reference = image.root or f"{self._images}{image.name.lower()}"
        plan = plan_container(image, foreign=True)
        # The user id is the machine's own or shared with other containers: the runtime counts processes, not the guest.
        config = guest_config(image, limits, plan)
        config["limits"] |= {"num_processes": None}
        name = f"swerve-{uuid.uuid4().hex}"
        command = container_arguments(program, name, reference, limits)
        for target, source in plan.binds.items():
            if target not in config["remove"]:
                command[-1:-1] = ["--volume", f"{source}:{target}:ro"]
        command[-1:-1] = ["--entrypoint", plan.guest[0]]
        return Launch(
            command=(*command, *plan.guest[1:], "solo"),
            environment={key: os.environ[key] for key in _VARIABLES if key in os.environ},
            config=config,
            leftovers=Leftovers(container=(program, name)),
            complaints=_COMPLAINTS,
        )


def container_arguments(program: str, name: str, reference: str, limits: SandboxLimits) -> list[str]:
    """The command line of one container, mounts and command left out.

    Args:
        program: Docker or Podman.
        name: Of the container.
        reference: Of the image, which must be there: it is not pulled.
        limits: Of all processes together; a process may open no more files than here.
    """
    return [
        *(program, "run", "--rm", "--interactive", "--pull", "never", "--name", name, "--label", "swerve=sandbox"),
        *("--network", "none", "--cap-drop", "ALL", "--security-opt", "no-new-privileges"),
        *(
            "--pids-limit",
            str(limits.num_processes),
            "--memory",
            str(limits.memory_bytes),
            "--cpus",
            f"{limits.cpus:g}",
        ),
        *("--ulimit", f"nofile={limits.num_open_files}:{limits.num_open_files}", "--ulimit", "core=0:0"),
        *("--tmpfs", f"/tmp:rw,exec,nosuid,nodev,mode=1777,size={limits.disk_bytes}", "--workdir", "/", reference),
    ]
