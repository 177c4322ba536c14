"""The `r2egym` family as an environment: one image per task, found by the sandbox backend under the task's name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from swerve.environments.r2egym.gold import gold_files
from swerve.environments.r2egym.reference import FAMILY
from swerve.sandboxes import Sandbox, SandboxImage
from swerve.types import SwerveError, Task, Work

HARNESS_FILE = Path(__file__).with_name("harness.py")
_COLLECT_TIMEOUT_S = 60.0
_HASH = re.compile(r"[0-9a-f]{40}")


class R2EGymEnvironment:
    """Repairs of whole repositories, judged by the tests of their images."""

    family = FAMILY

    def __init__(self, tasks: Iterable[Task]) -> None:
        """Create the environment.

        Args:
            tasks: All tasks that may be attempted.

        Raises:
            SwerveError: A task is of another family.
        """
        self._images: dict[str, SandboxImage] = {}
        for task in tasks:
            if task.family != FAMILY:
                raise SwerveError(f"task {task.id}: key family: '{task.family}', expected '{FAMILY}'")
            self._images[task.image] = SandboxImage(name=task.image, harness=HARNESS_FILE)

    def images(self) -> list[SandboxImage]:
        """One image per task, in the tasks' order; `sandbox.images` of the recipe says where they are."""
        return list(self._images.values())

    def image_for(self, task: Task) -> str:
        """Name of the image a task starts from."""
        return task.image

    def prepare_payload(self, task: Task) -> Any:
        """The base commit, where it is a whole hash that the image can be held against."""
        return {"base_commit": task.base_commit if _HASH.fullmatch(task.base_commit) else ""}

    async def collect(self, task: Task, sandbox: Sandbox) -> Work:
        """Files that the agent changed, added or removed; no tests, and nothing that steers how tests run."""
        return await sandbox.call("collect", {}, _COLLECT_TIMEOUT_S)

    def grade_payload(self, task: Task, work: Work) -> Any:
        """The work alone: the tests are in the image, and what is expected of them stays here."""
        return {"work": dict(work)}

    def no_work(self, task: Task) -> Work:
        """Nothing."""
        return {}

    def gold_work(self, task: Task) -> Work:
        """The files of the fix as it leaves them."""
        return gold_files(task.gold_patch, f"task {task.id}")
