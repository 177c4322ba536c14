"""What the factory of repository-level tasks is asked for, and the lock that repeats it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swerve.environments.archives import canonical, extracted, fetch, resolve
from swerve.environments.repository.environment import Release, load_release
from swerve.environments.repository.layout import inspect
from swerve.telemetry import file_digest, write_atomic
from swerve.types import SwerveError

KINDS = ("mutation", "release")
_HOW_MANY = frozenset({"kinds", "per_package", "per_function", "max_candidates"})


@dataclass(frozen=True, kw_only=True, slots=True)
class FactorySettings:
    """How tasks are made.

    Attributes:
        kinds: `mutation` breaks one place; `release` undoes what a release mended, whole and file by file.
        per_package: Tasks of one package at most.
        per_function: Tasks of one function at most.
        max_candidates: Broken states of one package that are tried: the budget.
        max_calls_per_test: Function calls one test may make; a repeatable measure of its time.
        max_calls: Function calls all tests of one task may make together.
        max_tests: Tests of one task.
        max_failing: Tests that one task may turn from failing to passing.
        seed: Decides which broken states are tried first.
    """

    kinds: tuple[str, ...] = KINDS
    per_package: int = 200
    per_function: int = 2
    max_candidates: int = 400
    max_calls_per_test: int = 200_000
    max_calls: int = 1_000_000
    max_tests: int = 150
    max_failing: int = 20
    seed: int = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class LockedPackage:
    """One package to make tasks of, with everything that decides on them.

    Attributes:
        name: Of the distribution.
        version: Its release.
        sha256: Of its source distribution.
        previous_version: The release before it; empty if none is undone.
        previous_sha256: Of that one's source distribution.
        requires: What it, and its tests, need from elsewhere, as `name==version`.
    """

    name: str
    version: str
    sha256: str
    previous_version: str = ""
    previous_sha256: str = ""
    requires: tuple[str, ...] = ()

    def release(self) -> Release:
        """The release, fetched if need be."""
        return load_release(self.name, self.version, self.sha256, self.requires)

    def previous(self) -> Release | None:
        """The release before it, if it is to be undone."""
        if not self.previous_version:
            return None
        return load_release(self.name, self.previous_version, self.previous_sha256, self.requires)


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedPackage:
    """A package as a recipe or a command names it; `requires` are requirements of its tests."""

    name: str
    version: str = ""
    previous_version: str = ""
    requires: tuple[str, ...] = ()


def parse_wanted(text: str) -> WantedPackage:
    """Read `NAME` or `NAME==VERSION`.

    Raises:
        SwerveError: It is neither.
    """
    found = re.fullmatch(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:==([A-Za-z0-9.!+_-]+))?", text)
    if found is None:
        raise SwerveError(f"package {text!r}: expected NAME or NAME==VERSION")
    return WantedPackage(name=canonical(found[1]), version=found[2] or "")


def lock_package(wanted: WantedPackage, settings: FactorySettings) -> LockedPackage:
    """Decide on a package's releases and requirements.

    Raises:
        SwerveError: There is no such source distribution, or its requirements cannot be met.
    """
    archive = fetch(f"{wanted.name}=={wanted.version}" if wanted.version else wanted.name)
    version = wanted.version or _version_of(archive)
    sha256 = file_digest(archive)
    layout = inspect(extracted(archive, wanted.name, version, sha256))
    requires = resolve([*layout.requires, *wanted.requires])
    previous_version = previous_sha256 = ""
    if "release" in settings.kinds:
        try:
            earlier = wanted.previous_version
            previous = fetch(f"{wanted.name}=={earlier}" if earlier else f"{wanted.name}<{version}")
        except SwerveError:
            if wanted.previous_version:
                raise
        else:
            previous_version, previous_sha256 = _version_of(previous), file_digest(previous)
    return LockedPackage(
        name=wanted.name,
        version=version,
        sha256=sha256,
        previous_version=previous_version,
        previous_sha256=previous_sha256,
        requires=requires,
    )


def _version_of(archive: Path) -> str:
    return re.sub(r"\.(tar\.(gz|bz2|xz)|tgz|zip)$", "", archive.name).rpartition("-")[2]


def read_recipe(path: Path) -> tuple[FactorySettings, list[WantedPackage]]:
    """Read what to make from a TOML file: a table `[factory]`, and a `[[package]]` each.

    Raises:
        SwerveError: A key is unknown or of the wrong type.
    """
    document = _read(path, {"factory", "package"})
    settings = _build(FactorySettings, document.get("factory", {}), f"{path}: factory")
    check_settings(settings, str(path))
    packages = [_build(WantedPackage, one, f"{path}: package") for one in document.get("package", [])]
    if not packages:
        raise SwerveError(f"{path}: names no [[package]]")
    return settings, packages


def read_lock(path: Path) -> tuple[FactorySettings, list[LockedPackage]]:
    """Read a lock file.

    Raises:
        SwerveError: A key is unknown, missing or of the wrong type.
    """
    document = _read(path, {"factory", "package"})
    settings = _build(FactorySettings, document.get("factory", {}), f"{path}: factory")
    check_settings(settings, str(path))
    return settings, [_build(LockedPackage, one, f"{path}: package") for one in document.get("package", [])]


def write_lock(path: Path, settings: FactorySettings, packages: Iterable[LockedPackage]) -> None:
    """Write a lock file; the same decisions always give the same bytes."""
    lines = ["# What these tasks were made of: `swerve tasks mint --lock` of this file makes the same bytes again.", ""]
    for title, record in [("[factory]", settings), *(("[[package]]", package) for package in packages)]:
        values = dataclasses.asdict(record)
        lines += [title, *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""]
    write_atomic(path, "\n".join(lines).encode())


def verdicts_identity(settings: FactorySettings, package: LockedPackage) -> str:
    """Digest of all that decides on the verdicts of a package's candidates: not how many are tried or kept."""
    asked = dataclasses.asdict(settings) | {"package": dataclasses.asdict(package)}
    decides = {key: value for key, value in asked.items() if key not in _HOW_MANY}
    return hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:16]


def check_settings(settings: FactorySettings, where: str) -> None:
    """Refuse settings that cannot be.

    Raises:
        SwerveError: A kind is unknown, or a number is below 1.
    """
    unknown = sorted(set(settings.kinds) - set(KINDS))
    if unknown or not settings.kinds:
        raise SwerveError(f"{where}: factory.kinds: {', '.join(unknown) or 'empty'}: known are {', '.join(KINDS)}")
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if field.name not in ("kinds", "seed") and value < 1:
            raise SwerveError(f"{where}: factory.{field.name}: {value}: must be at least 1")


def _read(path: Path, known: set[str]) -> dict[str, Any]:
    try:
        document = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise SwerveError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SwerveError(f"{path}: not TOML: {error}") from None
    for key in document:
        if key not in known:
            raise SwerveError(f"{path}: key {key}: unknown; known are {', '.join(sorted(known))}")
    return document


def _build(kind: type[Any], values: Any, where: str) -> Any:
    if not isinstance(values, dict):
        raise SwerveError(f"{where}: expected a table")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for key, value in values.items():
        if key not in fields:
            raise SwerveError(f"{where}.{key}: unknown; known are {', '.join(fields)}")
        wanted = {"int": int, "str": str}.get(str(fields[key].type), list)
        right = type(value) is wanted and (wanted is not list or all(type(one) is str for one in value))
        if not right:
            raise SwerveError(f"{where}.{key}: expected {fields[key].type}, found {json.dumps(value)[:60]}")
    missing = [name for name, field in fields.items() if field.default is dataclasses.MISSING and name not in values]
    if missing:
        raise SwerveError(f"{where}.{missing[0]}: missing")
    return kind(**{key: tuple(value) if isinstance(value, list) else value for key, value in values.items()})
