"""Frozen dataclasses from the plain values that JSON keeps of them."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def from_plain(kind: type[T], value: Any) -> T:
    """Rebuild a record.

    Args:
        kind: A dataclass whose fields are plain values, dataclasses, tuples of either, or mappings to plain values.
        value: What `dataclasses.asdict` made of one, after a trip through JSON.

    Returns:
        The record, equal to the one it was.
    """
    hints = typing.get_type_hints(kind)
    fields = dataclasses.fields(kind)  # pyright: ignore[reportArgumentType]
    return kind(**{field.name: _value(hints[field.name], value[field.name]) for field in fields})


def _value(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    options = [option for option in typing.get_args(hint) if option is not type(None)]
    if type(None) in typing.get_args(hint):
        return _value(options[0], value)
    if dataclasses.is_dataclass(hint):
        return from_plain(typing.cast(type, hint), value)
    if typing.get_origin(hint) is tuple:
        return tuple(_value(options[0], each) for each in value)
    return dict(value) if isinstance(value, Mapping) else value
