"""What is what in the tree of a source distribution: sources, tests, and what of the rest an agent may see."""

from __future__ import annotations

import email
import email.message
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePosixPath

MAX_FILE_BYTES = 1 << 20

_TEST_DIRS = frozenset({"test", "tests", "testing_data"})
_TEST_FILE = re.compile(r"(test_.*|.*_test|tests|conftest)\.py")
_OTHER_DIRS = frozenset(
    (
        "bench",
        "benchmark",
        "benchmarks",
        "build",
        "ci",
        "dist",
        "doc",
        "docs",
        "example",
        "examples",
        "scripts",
        "tools",
    )
)
_OTHER_MODULES = frozenset({"setup", "noxfile", "fabfile", "tasks", "versioneer", "ez_setup", "release", "conf"})
_BUILD_FILES = frozenset({"pyproject.toml", "setup.py", "setup.cfg", "tox.ini", "pytest.ini"})
_TELLTALE = re.compile(r"(change|history|news|release|readme|authors|contribut)", re.I)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The parts of a source tree; all paths are relative to it, sorted.

    Attributes:
        import_paths: Directories that go on the import path.
        roots: Packages (with a slash at the end) and modules whose files are the agent's to edit.
        sources: Python files of these, no tests among them.
        tests: Python files that may hold tests.
        files: All that sandboxes see, sources and tests included: no change logs, and nothing generated.
        license: As the distribution's metadata state it, or `unknown`.
        requires: Requirements stated there, without extras.
    """

    import_paths: tuple[str, ...]
    roots: tuple[str, ...]
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    files: tuple[str, ...]
    license: str
    requires: tuple[str, ...]

    def is_editable(self, path: str) -> bool:
        """Whether a file counts as the agent's work: what lies in the sources, and is no test and no hook of pytest."""
        pure = PurePosixPath(path)
        if pure.is_absolute() or ".." in pure.parts or str(pure) != path or is_test(path):
            return False
        return any(path.startswith(root) if root.endswith("/") else path == root for root in self.roots)


def is_test(path: str) -> bool:
    """Whether a file belongs to the tests, by its name and its directories."""
    pure = PurePosixPath(path)
    return not _TEST_DIRS.isdisjoint(pure.parts[:-1]) or _TEST_FILE.fullmatch(pure.name) is not None


@lru_cache(maxsize=64)
def inspect(tree: Path) -> Layout:
    """Look at a tree; a function of its files alone."""
    names = sorted(
        path.relative_to(tree).as_posix()
        for path in tree.rglob("*")
        if path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_FILE_BYTES
    )
    names = [name for name in names if not _is_generated(name)]
    base = "src/" if any(name.startswith("src/") and name.endswith(".py") for name in names) else ""
    roots = sorted({root for name in names if (root := _root_of(name, base, names)) is not None})
    inside = tuple(root for root in roots if root.endswith("/"))
    sources = [name for name in names if name.endswith(".py") and not is_test(name)]
    sources = [name for name in sources if name.startswith(inside) or name in roots]
    tests = [name for name in names if name.endswith(".py") and is_test(name) and not _is_aside(name)]
    support = [name for name in names if is_test(name) and not _is_aside(name)]
    data = [name for name in names if name.startswith(inside) and not _TELLTALE.search(PurePosixPath(name).name)]
    metadata = _metadata(tree)
    return Layout(
        import_paths=(base.rstrip("/") or ".", *((".",) if base else ())),
        roots=tuple(roots),
        sources=tuple(sources),
        tests=tuple(tests),
        files=tuple(sorted({*sources, *support, *data, *(_BUILD_FILES & set(names))})),
        license=_license(metadata),
        requires=tuple(sorted(_requires(metadata))),
    )


def _is_generated(name: str) -> bool:
    parts = PurePosixPath(name).parts
    return any(part.startswith(".") or part.endswith(".egg-info") or part == "__pycache__" for part in parts)


def _is_aside(name: str) -> bool:
    return PurePosixPath(name).parts[0] in _OTHER_DIRS


def _root_of(name: str, base: str, names: list[str]) -> str | None:
    """The package or module that a file belongs to, if it is a source."""
    if not name.startswith(base) or not name.endswith(".py") or is_test(name):
        return None
    first, *rest = name[len(base) :].split("/")
    if not rest:
        return None if first.removesuffix(".py") in _OTHER_MODULES or first.startswith("_") else name
    package = f"{base}{first}/"
    return package if first not in _OTHER_DIRS and f"{package}__init__.py" in names else None


def _metadata(tree: Path) -> email.message.Message:
    path = tree / "PKG-INFO"
    return email.message_from_string(path.read_text("utf-8", errors="replace") if path.is_file() else "")


def _license(metadata: email.message.Message) -> str:
    stated = str(metadata.get("License-Expression") or metadata.get("License") or "").strip()
    if stated and "\n" not in stated and len(stated) <= 60 and stated.upper() != "UNKNOWN":
        return stated
    classifiers = [str(value) for value in metadata.get_all("Classifier", []) if str(value).startswith("License ::")]
    return classifiers[0].rpartition(":: ")[2] if classifiers else "unknown"


def _requires(metadata: email.message.Message) -> list[str]:
    from packaging.requirements import Requirement

    stated = [Requirement(str(line)) for line in metadata.get_all("Requires-Dist", [])]
    held = [one for one in stated if one.marker is None or one.marker.evaluate({"extra": ""})]
    return [f"{one.name}{one.specifier}" for one in held]
