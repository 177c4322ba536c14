"""The `mini` family as an environment: one sandbox image, tests that travel with the task."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from swerve.environments.mini.generator import FAMILY, IMAGE
from swerve.environments.tasks import REPAIR_FILE, gold_text
from swerve.sandboxes import Sandbox, SandboxImage, read_files
from swerve.types import SwerveError, Task, Work

HARNESS_FILE = Path(__file__).with_name("harness.py")


class MiniEnvironment:
    """Repairs of generated functions, judged by calls with known values."""

    family = FAMILY

    def __init__(self, tasks: Iterable[Task] = ()) -> None:
        """Create the environment.

        Args:
            tasks: Tasks that may be attempted; only checked.

        Raises:
            SwerveError: A task is of another family.
        """
        for task in tasks:
            if task.family != FAMILY:
                raise SwerveError(f"task {task.id}: key family: '{task.family}', expected '{FAMILY}'")

    def images(self) -> list[SandboxImage]:
        """The one image, which holds nothing but Python."""
        return [SandboxImage(name=IMAGE, harness=HARNESS_FILE, harness_args={})]

    def image_for(self, task: Task) -> str:
        """Name of the image a task starts from."""
        return task.image

    def prepare_payload(self, task: Task) -> Any:
        """The workspace and the visible tests."""
        return {"visible": list(task.visible_tests), "files": dict(task.workspace)}

    async def collect(self, task: Task, sandbox: Sandbox) -> Work:
        """The one file that the agent repairs."""
        return await read_files(sandbox, (REPAIR_FILE,))

    def grade_payload(self, task: Task, work: Work) -> Any:
        """The repaired text and all tests; a missing file counts as an empty one."""
        return {"text": work.get(REPAIR_FILE) or "", "tests": [*task.fail_to_pass, *task.pass_to_pass]}

    def no_work(self, task: Task) -> Work:
        """The broken function."""
        return {REPAIR_FILE: task.workspace[REPAIR_FILE]}

    def gold_work(self, task: Task) -> Work:
        """The right function."""
        return {REPAIR_FILE: gold_text(task)}
