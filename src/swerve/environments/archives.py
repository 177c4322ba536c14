"""Source distributions: those that ship with Swerve, those fetched with pip, both verified and extracted once."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from swerve.config import cache_directory
from swerve.telemetry import file_digest
from swerve.types import MachineError, SwerveError

ARCHIVES_DIR = Path(__file__).parent / "data" / "archives"
_PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
_TIMEOUT_S = 900.0
_SUFFIXES = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".zip")


def canonical(name: str) -> str:
    """A distribution's name as registries compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def extracted(archive: Path, name: str, version: str, sha256: str) -> Path:
    """Directory of an archive's verified, extracted source tree; made at first use.

    Args:
        archive: The file.
        name: Of the distribution.
        version: Its release.
        sha256: What the file's digest must be.

    Raises:
        SwerveError: The archive is missing or its digest is not that one.
        MachineError: It cannot be extracted.
    """
    target = cache_directory() / "archives" / f"{name}-{version}-{sha256[:16]}"
    if target.is_dir():
        return target
    try:
        digest = file_digest(archive)
    except FileNotFoundError:
        raise SwerveError(f"{archive}: missing; install the package again") from None
    if digest != sha256:
        raise SwerveError(f"{archive}: SHA-256 is {digest}, expected {sha256}; fetch it again")
    scratch = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".extract.", dir=target.parent))
        _unpack(archive, scratch)
        (top,) = scratch.iterdir()
        for path in [top, *(path for path in top.rglob("*") if not path.is_symlink())]:
            path.chmod(0o755 if path.is_dir() else 0o644)
        try:
            top.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    except (OSError, ValueError, tarfile.TarError, zipfile.BadZipFile) as error:
        raise MachineError(f"{target}: cannot extract {archive.name}: {error}") from None
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)
    return target


def _unpack(archive: Path, target: Path) -> None:
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as file:
            file.extractall(target)
    else:
        with tarfile.open(archive) as file:
            file.extractall(target, filter="data")


def find_archive(name: str, version: str, sha256: str = "") -> Path | None:
    """The file of a release among those that ship with Swerve and those fetched before.

    Args:
        name: Of the distribution.
        version: Its release.
        sha256: What the file's digest must be; any if empty.
    """
    for folder in (ARCHIVES_DIR, _fetched_directory()):
        for path in sorted(folder.glob("*")) if folder.is_dir() else []:
            if _release_of(path) == (canonical(name), version) and (not sha256 or file_digest(path) == sha256):
                return path
    return None


def fetch(requirement: str, sha256: str = "") -> Path:
    """The source distribution that a requirement names, fetched from the registry that pip is set up for.

    Args:
        requirement: Of one distribution, for example `parse==1.22.3` or `parse<1.22.3`.
        sha256: What the file's digest must be; any if empty.

    Raises:
        SwerveError: There is no such source distribution, or it is another one.
    """
    exact = re.fullmatch(r"([A-Za-z0-9._-]+)==([^=<>!~ ,;]+)", requirement)
    found = find_archive(exact[1], exact[2], sha256) if exact else None
    if found is not None:
        return found
    folder = _fetched_directory()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch.", dir=folder) as scratch:
            wanted = Path(scratch) / "requirements.txt"
            wanted.write_text(f"{requirement}{f' --hash=sha256:{sha256}' if sha256 else ''}\n")
            command = ["download", "--no-deps", "--no-binary", ":all:", "--dest", scratch, "-r", str(wanted)]
            _pip(command, f"no source distribution of {requirement} can be fetched")
            (path,) = [path for path in Path(scratch).iterdir() if path.name.endswith(_SUFFIXES)]
            return path.rename(folder / path.name)
    except OSError as error:
        raise MachineError(f"{folder}: cannot be written: {error.strerror}") from None


def resolve(requirements: list[str]) -> tuple[str, ...]:
    """Pins, as `name==version`, of all that some requirements need, themselves included; sorted."""
    if not requirements:
        return ()
    command = ["install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", "--only-binary", ":all:"]
    told = _pip([*command, *requirements], f"{', '.join(requirements)}: cannot be resolved")
    metadata = [one["metadata"] for one in json.loads(told)["install"]]
    return tuple(sorted(f"{canonical(one['name'])}=={one['version']}" for one in metadata))


def installed(pins: tuple[str, ...]) -> Path | None:
    """A directory to import pinned distributions from; `None` if there are none.

    Raises:
        SwerveError: One cannot be installed.
    """
    if not pins:
        return None
    name = hashlib.sha256("\n".join((sys.version, *pins)).encode()).hexdigest()[:32]
    target = cache_directory() / "requirements" / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".install.", dir=target.parent))
    try:
        command = ["install", "--quiet", "--no-deps", "--only-binary", ":all:", "--no-compile", "--target"]
        _pip([*command, str(scratch), *pins], f"{', '.join(pins)}: cannot be installed")
        scratch.chmod(0o755)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _pip(arguments: list[str], complaint: str) -> str:
    try:
        done = subprocess.run([*_PIP, *arguments], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise MachineError(f"{complaint}: pip did not end within {_TIMEOUT_S:g} s") from None
    if done.returncode != 0:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        raise SwerveError(f"{complaint}: pip says: {' '.join(' '.join(errors[:2]).split())[:300]}")
    return done.stdout


def _fetched_directory() -> Path:
    return cache_directory() / "archives" / "fetched"


def _release_of(path: Path) -> tuple[str, str] | None:
    """Name and version of a source distribution, by its file name; subsets of one are none."""
    suffix = next((suffix for suffix in _SUFFIXES if path.name.endswith(suffix)), None)
    if suffix is None or ".subset." in path.name:
        return None
    name, _, version = path.name.removesuffix(suffix).rpartition("-")
    return canonical(name), version
