"""The `functions` family as an environment: one sandbox image per package, the package's tests inside."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from swerve.environments.functions.packages import Package, modules, packages, source_tree
from swerve.environments.guest import GUEST_DIR
from swerve.environments.tasks import REPAIR_FILE, gold_text
from swerve.sandboxes import Mount, Sandbox, SandboxImage, read_files
from swerve.types import Provenance, SwerveError, Task, Work

FAMILY = "functions"
HARNESS_FILE = Path(__file__).with_name("harness.py")
TREE_DIR = "/opt/package"
"""Where a package's source tree is mounted; hidden once the package is loaded."""


def image_name(package: str) -> str:
    """Name of the image that holds a package."""
    return f"{FAMILY}/{package}"


def package_image(package: Package, tests: Iterable[str] | None = None) -> SandboxImage:
    """The sandbox image of a package.

    Args:
        package: Extracted into the cache if it is not there.
        tests: Ids of the tests to hold, or `None` for all the package has.

    Raises:
        SwerveError: The vendored archive is missing or altered.
    """
    tree = source_tree(package)
    keep = None if tests is None else sorted(set(tests))
    files = package.tests if keep is None else sorted({identifier.split("::")[0] for identifier in keep})
    return SandboxImage(
        name=image_name(package.name),
        harness=HARNESS_FILE,
        harness_args={
            "root": TREE_DIR,
            "import_paths": list(package.import_paths),
            "modules": modules(package, tree),
            "tests": list(files),
            "test_roots": list(package.tests),
            "requires": list(package.requires),
            "keep": keep,
        },
        mounts=(Mount(source=tree, target=TREE_DIR),),
        python_paths=(GUEST_DIR,),
        distributions=("pytest", *package.requires),
        hide=(TREE_DIR,),
    )


class FunctionsEnvironment:
    """Repairs of real functions, judged by their packages' own tests."""

    family = FAMILY

    def __init__(self, tasks: Iterable[Task]) -> None:
        """Create the environment.

        Args:
            tasks: All tasks that may be attempted; their tests are what the images hold.

        Raises:
            SwerveError: A task is of another family or of an unknown package or release.
        """
        self._tests: dict[str, set[str]] = {}
        known = packages()
        for task in tasks:
            provenance = _provenance(task)
            package = known.get(provenance.package)
            if package is None or package.sha256 != provenance.archive_sha256:
                raise SwerveError(
                    f"task {task.id}: key provenance.archive_sha256: {provenance.package} {provenance.version} is not "
                    "among the vendored archives; mint the tasks again"
                )
            self._tests.setdefault(package.name, set()).update(task.visible_tests, task.hidden_tests)

    def images(self) -> list[SandboxImage]:
        """One image per package that occurs, in order of name."""
        known = packages()
        return [package_image(known[name], tests) for name, tests in sorted(self._tests.items())]

    def image_for(self, task: Task) -> str:
        """Name of the image a task starts from."""
        return task.image

    def prepare_payload(self, task: Task) -> Any:
        """The broken function, its place, the visible tests and the workspace; nothing of the hidden ones."""
        return {
            "function": function_payload(task),
            "visible": list(task.visible_tests),
            "files": dict(task.workspace),
        }

    async def collect(self, task: Task, sandbox: Sandbox) -> Work:
        """The one file that the agent repairs."""
        return await read_files(sandbox, (REPAIR_FILE,))

    def grade_payload(self, task: Task, work: Work) -> Any:
        """The repaired text, and all tests with those first that failed; a missing file counts as an empty one."""
        return {
            "function": function_payload(task),
            "text": work.get(REPAIR_FILE) or "",
            "tests": [*task.fail_to_pass, *task.pass_to_pass],
            "probe": task.fail_to_pass[0],
        }

    def no_work(self, task: Task) -> Work:
        """The broken function."""
        return {REPAIR_FILE: task.workspace[REPAIR_FILE]}

    def gold_work(self, task: Task) -> Work:
        """The right function."""
        return {REPAIR_FILE: gold_text(task)}


def function_payload(task: Task) -> dict[str, Any]:
    """Where a task's function lives, and the text the agent starts from."""
    provenance = _provenance(task)
    return {
        "file": provenance.file,
        "line": provenance.line,
        "qualname": provenance.qualname,
        "source": task.workspace[REPAIR_FILE],
    }


def _provenance(task: Task) -> Provenance:
    if task.family != FAMILY or task.provenance is None:
        raise SwerveError(f"task {task.id}: key family: '{task.family}', expected '{FAMILY}' with a provenance")
    return task.provenance
