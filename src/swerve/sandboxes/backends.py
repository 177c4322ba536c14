"""The backends by name, and the one that a recipe asks for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from swerve.sandboxes.apptainer import ApptainerBackend
from swerve.sandboxes.bubblewrap import find_bubblewrap
from swerve.sandboxes.docker import DockerBackend
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
