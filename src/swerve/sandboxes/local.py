"""Commands as plain processes of this machine, isolated by nothing: `unsafe-local`, for machines that allow no more.

An agent's commands run as the user who started Swerve: they see, and may change, whatever that user may. Limits per
process, timeouts, the environment built from nothing, and the removal of what is left hold as elsewhere. Nothing
chooses this backend by itself.
"""

from __future__ import annotations

import sys
import tempfile
import uuid
from dataclasses import asdict
from pathlib import Path
from typing import Any

from swerve.sandboxes.plan import GUEST_DIR, GUEST_PROGRAM, distribution_paths, sandbox_environment
from swerve.sandboxes.protocol import Json, SandboxImage, SandboxLimits
from swerve.sandboxes.reaper import Leftovers
from swerve.sandboxes.solo import Launch, archive

MARKER = "SWERVE_SANDBOX"


class LocalBackend:
    """Starts a process for every sandbox, in a temporary folder."""

    name = "unsafe-local"

    def __init__(self, images: str = "") -> None:
        """Create the backend.

        Args:
            images: Without effect: there is only one system.
        """

    def check(self) -> None:
        """See `SoloBackend.check`."""

    def launch(self, image: SandboxImage, limits: SandboxLimits) -> Launch:
        """See `SoloBackend.launch`."""
        key = uuid.uuid4().hex
        base = Path(tempfile.gettempdir()) / f"swerve-{key}"
        interpreter = Path(sys.executable).resolve()
        # What other backends mount at a place of its own lies somewhere else here, so places are renamed.
        moved = {mount.target: str(mount.source) for mount in image.mounts}
        trees, remove = {}, []
        for mount in image.mounts:
            if mount.target in image.hide:
                moved[mount.target] = str(base / "hidden" / str(len(remove)))
                remove.append(moved[mount.target])
                trees[moved[mount.target]] = archive(mount.source)
        if image.workspace is not None:
            trees[str(base / "testbed")] = archive(image.workspace)
        python_paths = [str(path) for path in image.python_paths]
        links = {path.name: str(path) for path in distribution_paths(image.distributions)}
        if links:
            python_paths.insert(0, str(base / "site"))
        path = f"{interpreter.parent}:/usr/local/bin:/usr/bin:/bin"
        environment = sandbox_environment(path, python_paths) | {"HOME": str(base / "tmp"), "TMPDIR": str(base / "tmp")}
        environment[MARKER] = key
        config = {
            # The user's other processes count against such a limit, too, so there is none.
            "limits": asdict(limits) | {"num_processes": None},
            "workdir": str(base / "testbed"),
            "service_parent": str(base),
            "harness": None if image.harness is None else str(image.harness),
            "harness_args": _relocated(image.harness_args, moved),
            "python_paths": python_paths,
            "environment": environment,
            "inherit": False,
            "trees": trees,
            "links": {str(base / "site" / name): target for name, target in links.items()},
            "directories": [str(base / "tmp")],
            "remove": remove,
            "discard": [str(base)],
        }
        program = (str(interpreter), "-I", "-S", "-c", GUEST_PROGRAM, str(GUEST_DIR.parent), "solo")
        return Launch(
            command=program,
            environment={"LC_ALL": "C", MARKER: key},
            config=config,
            leftovers=Leftovers(directory=str(base), marker=f"{MARKER}={key}"),
        )


def _relocated(value: Json, moved: dict[str, str]) -> Any:
    """A JSON value in which texts that are a place, or below one, say where that is."""
    if isinstance(value, dict):
        return {key: _relocated(item, moved) for key, item in value.items()}
    if isinstance(value, list):
        return [_relocated(item, moved) for item in value]
    if isinstance(value, str):
        for place, where in moved.items():
            if value == place or value.startswith(f"{place}/"):
                return where + value.removeprefix(place)
    return value
