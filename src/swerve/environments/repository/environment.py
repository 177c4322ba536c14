"""The `repository` family as an environment: one sandbox image per release, the whole package in the workspace."""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swerve.environments.archives import canonical, extracted, fetch, installed
from swerve.environments.functions.mutations import parse
from swerve.environments.guest import GUEST_DIR
from swerve.environments.patches import apply_patch, patched_paths, split_lines
from swerve.environments.repository.layout import Layout, inspect
from swerve.sandboxes import Mount, Sandbox, SandboxImage
from swerve.types import MachineError, Provenance, SwerveError, Task, Work

FAMILY = "repository"
HARNESS_FILE = Path(__file__).with_name("harness.py")
TREE_DIR = "/opt/repository"
"""Where the right tree is mounted; hidden once it is read."""
_COLLECT_TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """One release of a package, extracted, with what it needs.

    Attributes:
        name: Of the distribution.
        version: Its release.
        sha256: Of its source distribution.
        tree: Its files.
        layout: What is what among them.
        requires: What it needs from elsewhere, as `name==version`.
    """

    name: str
    version: str
    sha256: str
    tree: Path
    layout: Layout
    requires: tuple[str, ...]

    @property
    def image_name(self) -> str:
        """Name of its sandbox image."""
        return f"{FAMILY}/{self.name}-{self.version}"

    def text(self, path: str) -> str:
        """Text of one of its files; bytes that are no UTF-8 are escaped as lone surrogates."""
        return (self.tree / path).read_bytes().decode("utf-8", "surrogateescape")


@functools.lru_cache(maxsize=256)
def load_release(name: str, version: str, sha256: str, requires: tuple[str, ...]) -> Release:
    """A release, fetched and extracted if it is not there.

    Raises:
        SwerveError: There is no such source distribution, or it is another one.
    """
    tree = extracted(fetch(f"{name}=={version}", sha256), canonical(name), version, sha256)
    return Release(
        name=canonical(name), version=version, sha256=sha256, tree=tree, layout=inspect(tree), requires=requires
    )


def release_image(release: Release) -> SandboxImage:
    """The sandbox image of a release.

    Raises:
        SwerveError: What the release needs cannot be installed.
    """
    requirements = installed(release.requires)
    names = [] if requirements is None else sorted({path.name.partition(".")[0] for path in requirements.iterdir()})
    return SandboxImage(
        name=release.image_name,
        harness=HARNESS_FILE,
        harness_args={
            "root": TREE_DIR,
            "files": list(release.layout.files),
            "import_paths": list(release.layout.import_paths),
            "requires": names,
        },
        mounts=(Mount(source=release.tree, target=TREE_DIR),),
        python_paths=(GUEST_DIR, *([] if requirements is None else [requirements])),
        distributions=("pytest",),
        hide=(TREE_DIR,),
    )


class RepositoryEnvironment:
    """Repairs of whole packages, judged by their own tests."""

    family = FAMILY

    def __init__(self, tasks: Iterable[Task]) -> None:
        """Create the environment; releases are fetched and extracted where they are not there yet.

        Args:
            tasks: All tasks that may be attempted.

        Raises:
            SwerveError: A task is of another family, or its release is not to be had.
        """
        self._releases: dict[str, Release] = {}
        for task in tasks:
            release = release_of(task)
            if task.image != release.image_name:
                raise SwerveError(f"task {task.id}: key image: '{task.image}', expected '{release.image_name}'")
            self._releases[task.image] = release

    def images(self) -> list[SandboxImage]:
        """One image per release that occurs, in order of name."""
        return [release_image(self._releases[name]) for name in sorted(self._releases)]

    def image_for(self, task: Task) -> str:
        """Name of the image a task starts from."""
        return task.image

    def prepare_payload(self, task: Task) -> Any:
        """What is broken, what of the tests is left, and which of them can be run; nothing of the others."""
        release = self._releases[task.image]
        return {
            "files": broken_files(task, release) | visible_test_files(task, release),
            "visible": list(task.visible_tests),
            "roots": list(release.layout.roots),
        }

    async def collect(self, task: Task, sandbox: Sandbox) -> Work:
        """What differs from the start among the sources."""
        found: Work = await sandbox.call("collect", None, _COLLECT_TIMEOUT_S)
        return found

    def grade_payload(self, task: Task, work: Work) -> Any:
        """What was broken, the agent's changes to sources, and all tests with those first that failed."""
        release = self._releases[task.image]
        return {
            "files": broken_files(task, release),
            "work": {path: text for path, text in work.items() if release.layout.is_editable(path)},
            "tests": [*task.fail_to_pass, *task.pass_to_pass],
            "stop_on_failure": True,
        }

    def no_work(self, task: Task) -> Work:
        """Nothing."""
        return {}

    def gold_work(self, task: Task) -> Work:
        """The files of the gold patch as the release has them."""
        release = self._releases[task.image]
        broken = {path: text for path, text in broken_files(task, release).items() if text is not None}
        return apply_patch(broken, task.gold_patch)


def release_of(task: Task) -> Release:
    """The release that a task is about.

    Raises:
        SwerveError: The task is of another family, or there is no such release.
    """
    provenance = _provenance(task)
    try:
        return load_release(
            provenance.package, provenance.version, provenance.archive_sha256, tuple(provenance.requires)
        )
    except MachineError:
        raise
    except SwerveError as error:
        raise SwerveError(f"task {task.id}: key provenance: {error}") from None


def broken_files(task: Task, release: Release) -> dict[str, str | None]:
    """The gold patch undone: texts that the agent finds in place of the release's own.

    Raises:
        SwerveError: The patch does not lead to the release's texts.
    """
    paths = [path for path in patched_paths(task.gold_patch) if (release.tree / path).is_file()]
    try:
        return apply_patch({path: release.text(path) for path in paths}, task.gold_patch, reverse=True)
    except SwerveError as error:
        raise SwerveError(f"task {task.id}: key gold_patch: {error}") from None


def visible_test_files(task: Task, release: Release) -> dict[str, str | None]:
    """Test files of which the agent may not see all, without what it may not see; `None` where nothing is left."""
    hidden: dict[str, set[str]] = {}
    for identifier in task.hidden_tests:
        path, _, names = identifier.partition("[")[0].partition("::")
        hidden.setdefault(path, set()).add(names)
    return {path: without_tests(release.text(path), names) for path, names in hidden.items()}


def without_tests(text: str, names: set[str]) -> str | None:
    """A test module without some of its tests.

    Args:
        text: Its text.
        names: Tests to take out, as `function` or `Class::function`.

    Returns:
        The rest; `None` if no test is left, or if one of the names is not to be found and may be anywhere.
    """
    try:
        functions = dict(test_functions(parse(text)))
    except (SyntaxError, ValueError):
        return None
    if not names <= functions.keys() or names == functions.keys():
        return None
    lines = split_lines(text)
    for node in sorted((functions[name] for name in names), key=lambda node: -node.lineno):
        first = min([node.lineno, *(one.lineno for one in node.decorator_list)])
        margin = lines[node.lineno - 1][: node.col_offset]
        lines[first - 1 : node.end_lineno] = [f"{margin}pass\n"] if margin else []
    return "".join(lines)


def test_functions(tree: ast.Module) -> Iterable[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Tests of a module by their names in pytest's ids, without parameters."""
    for node in tree.body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        for one in inside:
            if isinstance(one, (ast.FunctionDef, ast.AsyncFunctionDef)) and one.name.startswith("test"):
                yield f"{prefix}{one.name}", one


def start_digest(files: Mapping[str, str | None], release: Release) -> str:
    """Digest of the workspace that an agent starts from: names and contents."""
    digests = dict(tree_digests(release.tree, release.layout.files))
    for path, text in files.items():
        digests.pop(path, None)
        if text is not None:
            digests[path] = hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()
    return hashlib.sha256(json.dumps(digests, sort_keys=True).encode()).hexdigest()


@functools.lru_cache(maxsize=64)
def tree_digests(tree: Path, files: tuple[str, ...]) -> tuple[tuple[str, str], ...]:
    """SHA-256 of each of some files of a tree."""
    return tuple((path, hashlib.sha256((tree / path).read_bytes()).hexdigest()) for path in files)


def _provenance(task: Task) -> Provenance:
    if task.family != FAMILY or task.provenance is None:
        raise SwerveError(f"task {task.id}: key family: '{task.family}', expected '{FAMILY}' with a provenance")
    return task.provenance
