"""The backends by name, and the one that a recipe asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from swerve.sandboxes.apptainer import ApptainerBackend
from swerve.sandboxes.bubblewrap import find_bubblewrap
from swerve.sandboxes.docker import DockerBackend, local_images
from swerve.sandboxes.images import MANIFEST, read_manifest
from swerve.sandboxes.local import LocalBackend
from swerve.sandboxes.protocol import SandboxImage
from swerve.sandboxes.sif import root_of
from swerve.sandboxes.solo import SoloBackend
from swerve.types import MachineError


class BubblewrapBackend:
    """Forks sandboxes from one warm container per image; the default."""

    name = "bubblewrap"

    def __init__(self, images: str = "") -> None:
        """Create the backend.

        Args:
            images: Directory that holds SIF files; empty for images of the machine's own system.
        """
        self._images = images

    def check(self) -> None:
        """Raise `MachineError`, with a remedy, if there is no bwrap that runs."""
        find_bubblewrap()

    def root(self, image: SandboxImage) -> Path | None:
        """The root file system of an image, unpacked; `None` for the machine's own system."""
        return root_of(image, self._images)


Backend = BubblewrapBackend | SoloBackend

BACKENDS: Mapping[str, Callable[[str], Backend]] = {
    "bubblewrap": BubblewrapBackend,
    "apptainer": ApptainerBackend,
    "docker": DockerBackend,
    "unsafe-local": LocalBackend,
}


def image_digests(name: str, images: str) -> dict[str, str]:
    """Digests of the images that sandboxes may be started from.

    Args:
        name: Value of `sandbox.backend`, which works on this machine.
        images: Value of `sandbox.images`.

    Returns:
        By name: what Docker or Podman calls each image of the prefix, or the SHA-256 on record of each SIF file. Empty
        where images are the machine's own system, or the folder has no list of them.

    Raises:
        SwerveError: The folder's list is at fault.
    """
    if name == "docker":
        return local_images(images) if images else {}
    if not images or not (Path(images) / MANIFEST).exists():
        return {}
    return {image: built.sha256 for image, built in read_manifest(Path(images)).items()}


def make_backend(name: str, images: str = "") -> Backend:
    """The backend that a recipe asks for.

    Args:
        name: Value of `sandbox.backend`.
        images: Value of `sandbox.images`.

    Raises:
        MachineError: This machine cannot do it; says what to do.
    """
    backend = BACKENDS[name](images)
    try:
        backend.check()
    except MachineError as error:
        raise MachineError(f'sandbox.backend = "{name}": {error}') from None
    return backend
