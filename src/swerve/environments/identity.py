"""Identity of a data file: rows, bytes and SHA-256, kept beside it and held against it before a run."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from swerve.telemetry import write_atomic
from swerve.types import SwerveError

_SUFFIX = ".identity.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Identity:
    """What a file is.

    Attributes:
        rows: Lines that are not blank.
        bytes: Its size.
        sha256: Hexadecimal digest of its bytes.
    """

    rows: int
    bytes: int
    sha256: str


def identity_path(path: Path) -> Path:
    """Where a file's identity is kept: `<file>.identity.json`."""
    return path.with_name(path.name + _SUFFIX)


def identity_of(path: Path) -> Identity:
    """Measure a file.

    Raises:
        SwerveError: It cannot be read.
    """
    digest, rows, size = hashlib.sha256(), 0, 0
    try:
        with path.open("rb") as file:
            for line in file:
                digest.update(line)
                rows += bool(line.strip())
                size += len(line)
    except FileNotFoundError:
        raise SwerveError(f"{path}: no such file") from None
    except OSError as error:
        raise SwerveError(f"{path}: cannot be read: {error.strerror}") from None
    return Identity(rows=rows, bytes=size, sha256=digest.hexdigest())


def write_identity(path: Path) -> Identity:
    """Measure a file, and write its identity beside it.

    Raises:
        SwerveError: It cannot be read.
        MachineError: Its identity cannot be written.
    """
    identity = identity_of(path)
    write_atomic(identity_path(path), json.dumps(asdict(identity), indent=2, sort_keys=True) + "\n")
    return identity


def verify_identity(path: Path, recorded: Path | None = None) -> Identity:
    """Hold a file against its identity.

    Args:
        path: The file.
        recorded: Where its identity is kept, if not beside it.

    Returns:
        What it is.

    Raises:
        SwerveError: It differs; names the figure and both values. Or the identity is missing or malformed.
    """
    recorded = recorded or identity_path(path)
    wanted = _read(recorded)
    found = identity_of(path)
    for figure, value in asdict(wanted).items():
        actual = getattr(found, figure)
        if actual != value:
            raise SwerveError(
                f"{path}: {figure} is {actual}, expected {value} by {recorded}: fetch or convert the file again"
            )
    return found


def _read(path: Path) -> Identity:
    try:
        record = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise SwerveError(f"{path}: no such identity file") from None
    except (OSError, ValueError) as error:
        raise SwerveError(f"{path}: no JSON that can be read: {error}") from None
    types = {"rows": int, "bytes": int, "sha256": str}
    if not isinstance(record, dict):
        raise SwerveError(f"{path}: expected an object with {', '.join(types)}")
    for key in record:
        if key not in types:
            raise SwerveError(f"{path}: key {key}: unknown; known are {', '.join(types)}")
    for key, kind in types.items():
        if type(record.get(key)) is not kind:
            told = "missing" if key not in record else f"expected {'an integer' if kind is int else 'a string'}"
            raise SwerveError(f"{path}: key {key}: {told}")
    return Identity(**record)
