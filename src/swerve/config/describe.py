"""The schema as data: every setting with key, type, range, default and help, for the reader and the command line."""

import dataclasses
import functools
import inspect
import re
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, cast

from swerve.config.constraints import Range


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting of a recipe.

    Attributes:
        key: Path within the recipe, parts joined by dots.
        type: Python type without annotations: `bool`, `int`, `float`, `str`, a `Literal`, a `tuple[T, ...]`, or a union
            of a number and a `Literal`.
        range: Interval that a number must lie in, or `None`.
        default: Value where the recipe says nothing.
        help: What it does, from the schema's docstring.
    """

    key: str
    type: Any
    range: Range | None
    default: object
    help: str

    @property
    def type_text(self) -> str:
        """What a value looks like, in words that follow "must be"."""
        text = type_text(self.type)
        if self.range is None:
            return text
        if is_union(self.type):
            number, *others = map(type_text, typing.get_args(self.type))
            return " or ".join([f"{number} {self.range}", *others])
        return f"{text} {self.range}"


def type_text(tp: Any) -> str:
    """A type in words that follow "must be"."""
    if typing.get_origin(tp) is Literal:
        choices = [str(choice) for choice in typing.get_args(tp)]
        return "one of " + ", ".join(choices) if len(choices) > 1 else choices[0]
    if is_union(tp):
        return " or ".join(map(type_text, typing.get_args(tp)))
    if typing.get_origin(tp) is tuple:
        return f"a list, each {type_text(split_annotated(typing.get_args(tp)[0])[0])}"
    names = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
    return names.get(tp, "a table")


def is_union(tp: Any) -> bool:
    """Whether a value may be of several types."""
    return typing.get_origin(tp) in (typing.Union, types.UnionType)


def split_annotated(tp: Any) -> tuple[Any, Range | None]:
    """A type without its annotation, and the range from the annotation if there is one."""
    if typing.get_origin(tp) is not Annotated:
        return tp, None
    bare, *notes = typing.get_args(tp)
    return bare, next((note for note in notes if isinstance(note, Range)), None)


def is_section(tp: Any) -> bool:
    """Whether a type is a table of settings rather than one setting."""
    return isinstance(tp, type) and dataclasses.is_dataclass(tp)


@functools.cache
def field_types(schema: type) -> dict[str, Any]:
    """Annotated type of every field of a schema class, in order of definition."""
    hints = typing.get_type_hints(schema, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(schema)}


@functools.cache
def field_help(schema: type) -> dict[str, str]:
    """Help of every field of a schema class, from the `Attributes` of its docstring."""
    _, _, attributes = inspect.cleandoc(schema.__doc__ or "").partition("Attributes:\n")
    entries = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", attributes, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def default_of(field: "dataclasses.Field[Any]") -> object:
    """Default of a dataclass field; every setting has one."""
    if field.default is not dataclasses.MISSING:
        return field.default
    assert field.default_factory is not dataclasses.MISSING, f"the setting {field.name} has no default"
    return field.default_factory()


def settings(schema: type, prefix: str = "") -> Iterator[Setting]:
    """Every setting of a schema class, sections entered, in order of definition."""
    types_by_name = field_types(schema)
    help_by_name = field_help(schema)
    for field in dataclasses.fields(schema):
        tp, allowed = split_annotated(types_by_name[field.name])
        if is_section(tp):
            yield from settings(tp, f"{prefix}{field.name}.")
        else:
            yield Setting(
                key=prefix + field.name,
                type=tp,
                range=allowed,
                default=default_of(field),
                help=help_by_name.get(field.name, ""),
            )


def flatten(recipe: object, prefix: str = "") -> dict[str, object]:
    """Every setting of a recipe by its key, in order of definition."""
    flat: dict[str, object] = {}
    for field in dataclasses.fields(cast("Any", recipe)):
        value = getattr(recipe, field.name)
        if dataclasses.is_dataclass(value):
            flat.update(flatten(value, f"{prefix}{field.name}."))
        else:
            flat[prefix + field.name] = value
    return flat
