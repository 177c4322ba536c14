"""The packages that tasks are made of: vendored source archives, verified and extracted at first use.

`data/archives/archives.lock.toml` names every archive, its SHA-256 and its licence. An archive is the unmodified
source distribution, or, where that is large, a subset of its files made by `write_subset`. It is extracted once into
the cache directory, under its digest, atomically.
"""

from __future__ import annotations

import ast
import io
import lzma
import tarfile
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from swerve.environments.archives import ARCHIVES_DIR, extracted
from swerve.environments.functions.mutations import normalise_function, parse
from swerve.types import SwerveError

LOCK_FILE = ARCHIVES_DIR / "archives.lock.toml"
PERMISSIVE = frozenset({"Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "ISC", "MIT", "PSF-2.0"})

_LOCK_KEYS = {
    "name": str,
    "version": str,
    "file": str,
    "sha256": str,
    "license": str,
    "import_paths": list,
    "sources": list,
    "tests": list,
    "requires": list,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Package:
    """One vendored source distribution.

    Attributes:
        name: Distribution name.
        version: Its release.
        file: Archive, within the archives' directory.
        sha256: Hexadecimal digest of the archive.
        license: SPDX identifier.
        import_paths: Directories of the tree that go on the import path.
        sources: Packages or modules of the tree that functions are taken from.
        tests: Directories or modules of the tree that hold tests.
        requires: Importable names needed from outside the tree.
        skip: Files, or functions as `file::qualname`, that behave differently from one Python release to another.
    """

    name: str
    version: str
    file: str
    sha256: str
    license: str
    import_paths: tuple[str, ...]
    sources: tuple[str, ...]
    tests: tuple[str, ...]
    requires: tuple[str, ...]
    skip: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceFunction:
    """A function as it stands in a package.

    Attributes:
        package: Name of the distribution.
        file: Path within the source tree.
        line: 1-based line of its `def`.
        qualname: Dotted name within its module.
        source: Normalised text.
    """

    package: str
    file: str
    line: int
    qualname: str
    source: str


@cache
def packages() -> dict[str, Package]:
    """All vendored packages by name, as the lock file lists them.

    Raises:
        SwerveError: The lock file is malformed.
    """
    try:
        document = tomllib.loads(LOCK_FILE.read_text("utf-8"))
    except FileNotFoundError:
        raise SwerveError(f"{LOCK_FILE}: missing; install the package again") from None
    except tomllib.TOMLDecodeError as error:
        raise SwerveError(f"{LOCK_FILE}: {error}") from None
    result: dict[str, Package] = {}
    for entry in document["archive"]:
        for key, kind in _LOCK_KEYS.items():
            if not isinstance(entry.get(key), kind):
                raise SwerveError(f"{LOCK_FILE}: archive {entry.get('name')}: key {key}: missing or of a wrong type")
        values: dict[str, Any] = {
            key: tuple(entry[key]) if kind is list else entry[key] for key, kind in _LOCK_KEYS.items()
        }
        package = Package(**values, skip=tuple(entry.get("skip", ())))
        if package.license not in PERMISSIVE:
            raise SwerveError(f"{LOCK_FILE}: archive {package.name}: key license: {package.license} is not permissive")
        result[package.name] = package
    return result


def source_tree(package: Package) -> Path:
    """Directory of a package's verified, extracted source tree; made at first use.

    Raises:
        SwerveError: The archive is missing or its digest is not the recorded one.
        MachineError: It cannot be extracted.
    """
    return extracted(ARCHIVES_DIR / package.file, package.name, package.version, package.sha256)


def source_files(package: Package, tree: Path) -> list[str]:
    """Python files that functions may be taken from, relative to the tree, sorted; no tests among them."""
    tests = tuple(package.tests)
    found = []
    for source in package.sources:
        path = tree / source
        for file in [path] if path.is_file() else sorted(path.rglob("*.py")):
            relative = file.relative_to(tree)
            is_test = relative.as_posix() in tests or not {"test", "tests"}.isdisjoint(relative.parts)
            if not is_test:
                found.append(relative.as_posix())
    return sorted(set(found))


def write_subset(archive: Path, target: Path, prefixes: tuple[str, ...]) -> None:
    """Copy part of a source distribution, unmodified, into an archive whose bytes depend on nothing else.

    Args:
        archive: The published source distribution.
        target: A `.tar.xz` file.
        prefixes: Paths below the archive's top directory; Python files below them, and files named exactly so, stay.
    """
    buffer = io.BytesIO()
    with tarfile.open(archive) as source, tarfile.open(fileobj=buffer, mode="w", format=tarfile.USTAR_FORMAT) as kept:
        for member in sorted(source.getmembers(), key=lambda member: member.name):
            path = member.name.partition("/")[2]
            wanted = path in prefixes or (path.endswith(".py") and path.startswith(prefixes))
            data = source.extractfile(member) if member.isfile() and wanted else None
            if data is not None:
                entry = tarfile.TarInfo(member.name)
                entry.size, entry.mode = member.size, 0o644
                kept.addfile(entry, data)
    target.write_bytes(lzma.compress(buffer.getvalue(), check=lzma.CHECK_SHA256, preset=9))


def modules(package: Package, tree: Path) -> list[str]:
    """Dotted names of all modules of a package."""
    names = []
    for file in source_files(package, tree):
        for entry in sorted(package.import_paths, key=len, reverse=True):
            prefix = "" if entry == "." else entry + "/"
            if file.startswith(prefix):
                dotted = file[len(prefix) : -len(".py")].replace("/", ".").removesuffix(".__init__")
                if not dotted.endswith("__main__"):
                    names.append(dotted)
                break
    return names


def functions(package: Package, tree: Path) -> Iterator[SourceFunction]:
    """All functions of a package that can be shown to an agent, in order of file and line."""
    for file in source_files(package, tree):
        text = (tree / file).read_text("utf-8", errors="replace")
        try:
            module = parse(text)
        except (SyntaxError, ValueError):
            continue
        lines = text.split("\n")
        for node, qualname in definitions(module, ""):
            if file in package.skip or f"{file}::{qualname}" in package.skip:
                continue
            source = normalise_function("\n".join(lines[node.lineno - 1 : node.end_lineno]))
            if source is not None:
                yield SourceFunction(
                    package=package.name, file=file, line=node.lineno, qualname=qualname, source=source
                )


def definitions(parent: ast.AST, prefix: str) -> Iterator[tuple[ast.FunctionDef, str]]:
    """Functions of a module and of its classes; none that are made inside another function."""
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef):
            yield node, prefix + node.name
        elif isinstance(node, ast.ClassDef):
            yield from definitions(node, f"{prefix}{node.name}.")
        elif isinstance(node, (ast.If, ast.Try, ast.With, ast.ExceptHandler)):
            yield from definitions(node, prefix)


def test_source(tree: Path, identifier: str) -> str:
    """Text of a test, dedented and without decorators, for an agent to read.

    Args:
        tree: Source tree.
        identifier: pytest's id: `file::Class::function[parameters]`.

    Returns:
        The text, or an empty string where it cannot be found (a test inherited from elsewhere).
    """
    path, _, names = identifier.partition("[")[0].partition("::")
    lines, places = _test_places(tree / path)
    if names not in places:
        return ""
    first, last = places[names]
    text = lines[first - 1 : last]
    margin = len(text[0]) - len(text[0].lstrip())
    return "\n".join(line[margin:] if not line[:margin].strip() else line for line in text).rstrip() + "\n"


@lru_cache(maxsize=8)
def _test_places(path: Path) -> tuple[list[str], dict[str, tuple[int, int]]]:
    """Lines of a test module, and the first and last one of each of its functions by `Class::function`."""
    text = path.read_text("utf-8", errors="replace")
    try:
        tree = parse(text)
    except (SyntaxError, ValueError):
        return [], {}
    places = {
        qualname.replace(".", "::"): (node.lineno, node.end_lineno or node.lineno)
        for node, qualname in definitions(tree, "")
    }
    return text.split("\n"), places
