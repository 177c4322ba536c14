"""Strict reading of JSON objects: every key known, none missing, every value of its type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swerve.types import SwerveError

_NAMES = {
    str: "a string",
    int: "an integer",
    float: "a number",
    list: "a list",
    dict: "an object",
    bool: "true or false",
}


@dataclass(frozen=True, slots=True)
class Key:
    """What may stand under a key.

    Attributes:
        types: Types of the value, `type(None)` among them where it may be null.
        required: Whether it must be there.
    """

    types: tuple[type, ...]
    required: bool = True


def text(*, required: bool = True) -> Key:
    """A key whose value is a string."""
    return Key((str,), required)


def optional(*types: type) -> Key:
    """A key that may be missing or null."""
    return Key((*types, type(None)), required=False)


def check(record: Any, keys: Mapping[str, Key], prefix: str = "", *, strict: bool = True) -> dict[str, Any]:
    """Hold one object against its keys.

    Args:
        record: What was read.
        keys: By name.
        prefix: Put before a key's name in a complaint.
        strict: Whether keys that are not listed are refused.

    Returns:
        The object.

    Raises:
        SwerveError: A key is missing, unknown or of a wrong type; names it, and neither file nor line.
    """
    if not isinstance(record, dict):
        where = f"key {prefix.rstrip('.')}: " if prefix else ""
        raise SwerveError(f"{where}expected an object, found {_shown(record)}")
    for name in record:
        if strict and name not in keys:
            raise SwerveError(f"key {prefix}{name}: unknown; known are {', '.join(keys)}")
    for name, key in keys.items():
        if name not in record:
            if key.required:
                raise SwerveError(f"key {prefix}{name}: missing")
        elif type(record[name]) not in key.types:
            wanted = " or ".join(_NAMES[kind] for kind in key.types if kind in _NAMES)
            raise SwerveError(f"key {prefix}{name}: expected {wanted}, found {_shown(record[name])}")
    return record


def parse(value: str, key: str) -> Any:
    """Read JSON that stands in a string.

    Raises:
        SwerveError: It is none.
    """
    try:
        return json.loads(value)
    except ValueError as error:
        raise SwerveError(f"key {key}: no JSON: {error}") from None


def _shown(value: Any) -> str:
    return json.dumps(value, default=repr)[:60]
