"""Recipes back into TOML, compared, and identified by a digest."""

import dataclasses
import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any, cast

from swerve.config.describe import field_help, flatten
from swerve.config.schema import Recipe


def render(recipe: Recipe, comments: bool = False) -> str:
    """A recipe as TOML that reads back into an equal recipe.

    Args:
        recipe: Any recipe.
        comments: Put what each setting does above it.

    Returns:
        TOML text with every setting, ended by a newline.
    """
    return "\n".join(_render_section(recipe, "", comments)) + "\n"


def render_value(value: object) -> str:
    """One value in TOML's notation.

    Args:
        value: A bool, number, text, or tuple of such.

    Returns:
        The value as TOML.
    """
    match value:
        case bool():
            return "true" if value else "false"
        case float():
            return ("inf" if value > 0 else "-inf") if math.isinf(value) else repr(value)
        case tuple() | list():
            return "[" + ", ".join(render_value(part) for part in cast("list[object]", value)) + "]"
        case str():
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case _:
            return str(value)


def _render_section(section: object, prefix: str, comments: bool) -> list[str]:
    lines: list[str] = []
    help_by_name = field_help(type(section))
    inner: list[tuple[str, object]] = []
    for field in dataclasses.fields(cast("Any", section)):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            inner.append((field.name, value))
            continue
        if comments and field.name in help_by_name:
            lines.append(f"# {help_by_name[field.name]}")
        lines.append(f"{field.name} = {render_value(value)}")
    for name, value in inner:
        lines += ["", f"[{prefix}{name}]", *_render_section(value, f"{prefix}{name}.", comments)]
    return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """One setting in which two recipes differ.

    Attributes:
        key: The setting.
        left: Its value in the first recipe, `None` where that kind of recipe has no such setting.
        right: Its value in the second.
    """

    key: str
    left: object
    right: object

    def __str__(self) -> str:
        """One line: the key and both values."""
        left, right = ("-" if value is None else render_value(value) for value in (self.left, self.right))
        return f"{self.key}: {left} -> {right}"


def diff(left: Recipe, right: Recipe) -> list[Difference]:
    """What differs between two recipes.

    Args:
        left: First recipe.
        right: Second recipe.

    Returns:
        The settings whose values differ, in order of definition.
    """
    one, two = flatten(left), flatten(right)
    keys = dict.fromkeys([*one, *two])
    return [Difference(key=key, left=one.get(key), right=two.get(key)) for key in keys if one.get(key) != two.get(key)]


def digest(recipe: Recipe) -> str:
    """Identity of a recipe: equal recipes, however written, have the same one.

    Args:
        recipe: Any recipe.

    Returns:
        Hexadecimal SHA-256 of the rendered recipe.
    """
    return hashlib.sha256(render(recipe).encode()).hexdigest()
