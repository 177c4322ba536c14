"""One rule for every setting there is: the recipes it extends, the recipe, the command line; the environment never."""

import datetime
import random
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from swerve.config import SCHEMAS, RecipeError, Setting, flatten, read_recipe, reader, render_value, settings
from swerve.config.describe import is_union

LEVELS = ("grandparent.toml", "parent.toml", "recipe.toml", reader.COMMAND_LINE)
NAMED = {setting.key: setting for kind in SCHEMAS for setting in settings(SCHEMAS[kind])}


def values(setting: Setting) -> Sequence[object]:
    """Two values that a setting may have by its type and range."""
    if setting.type is bool:
        return [False, True]
    if setting.type is str:
        return ["one", "two"]
    if typing.get_origin(setting.type) is typing.Literal:
        return list(typing.get_args(setting.type))[:2]
    if is_union(setting.type):
        return [1.5, typing.get_args(typing.get_args(setting.type)[1])[0]]
    if typing.get_origin(setting.type) is tuple:
        (lists, *_) = typing.get_args(setting.type)
        return [(), _list_of(lists)]
    assert setting.type in (int, float)
    kind = typing.cast("type[Any]", setting.type)
    tried = [kind(value) for value in (0, 1, 2, 3, 16, 17)] if kind is int else [0.0, 0.5, 1.0, 2.0, 3.0]
    return [value for value in tried if setting.range is None or setting.range.allows(value)][:2]


def _list_of(element: Any) -> tuple[Any, ...]:
    element = element.__origin__ if hasattr(element, "__metadata__") else element
    if typing.get_origin(element) is tuple:
        return ((0, 1),)
    if typing.get_origin(element) is typing.Literal:
        return (typing.get_args(element)[0],)
    return ("a", "b") if element is str else (1.0, 2.0)


def write(directory: Path, kind: str, levels: Mapping[str, Mapping[str, object]]) -> tuple[Path, dict[str, str]]:
    """The files of a recipe and the words on its command line, from values by level and key."""
    below = ""
    for name in LEVELS[:-1]:
        lines = [f'kind = "{kind}"', *([f'extends = "{below}"'] if below else [])]
        lines += [f"{key} = {render_value(value)}" for key, value in levels[name].items()]
        (directory / name).write_text("\n".join(lines) + "\n")
        below = name
    words = {}
    for key, value in levels[reader.COMMAND_LINE].items():
        words[key] = value if isinstance(value, str) else render_value(value)
    return directory / below, words


@pytest.fixture
def unrelated(monkeypatch):
    """What settings say of each other is another matter: here each is looked at alone."""
    monkeypatch.setattr(reader, "_contradictions", lambda recipe, prefix: iter(()))
    monkeypatch.setattr(reader, "_faults_of_arms", lambda recipe, name: iter(()))


@pytest.mark.parametrize("kind", SCHEMAS)
@pytest.mark.parametrize("seed", range(6))
def test_of_every_setting_the_value_nearest_to_the_command_line_holds(kind, seed, tmp_path, unrelated):
    rng = random.Random(seed)
    levels: dict[str, dict[str, object]] = {name: {} for name in LEVELS}
    wanted: dict[str, object] = {"kind": kind}
    for setting in settings(SCHEMAS[kind]):
        if setting.key == "kind":
            continue
        pair = values(setting)
        assert len({repr(value) for value in pair}) == 2, setting.key
        wanted[setting.key] = setting.default
        present = [name for name in LEVELS if rng.random() < 0.5]
        for index, name in enumerate(present):
            # Neighbours differ, so that a level that is left out, or comes in another place, shows.
            wanted[setting.key] = levels[name][setting.key] = pair[(index + seed) % 2]
    path, words = write(tmp_path, kind, levels)
    found = flatten(read_recipe(path, words))
    assert {key for key in wanted if found[key] != wanted[key]} == set()


@pytest.mark.parametrize("kind", SCHEMAS)
def test_of_every_setting_a_fault_names_the_place_and_the_key(kind, tmp_path):
    rng = random.Random(kind)
    levels: dict[str, dict[str, object]] = {name: {} for name in LEVELS}
    wanted: list[str] = []
    for setting in settings(SCHEMAS[kind]):
        if setting.key == "kind":
            continue
        first = rng.randrange(4) if setting.type is not str else rng.randrange(3)
        for name in LEVELS[: first + 1]:  # those below hold a fault, too; the one that counts is told
            levels[name][setting.key] = datetime.date(1979, 5, 27)
        name = LEVELS[first]
        place = name if name == reader.COMMAND_LINE else str(tmp_path / name)
        wanted.append(f"{place}: {'--' if name == reader.COMMAND_LINE else ''}{setting.key} = ")
    path, words = write(tmp_path, kind, levels)
    with pytest.raises(RecipeError) as caught:
        read_recipe(path, words)
    unnamed = [line for line in wanted if not any(problem.startswith(line) for problem in caught.value.problems)]
    assert unnamed == []
    assert len(caught.value.problems) == len(wanted)


def test_the_environment_sets_nothing(tmp_path, monkeypatch):
    path = tmp_path / "r.toml"
    for kind in SCHEMAS:
        path.write_text(f'kind = "{kind}"\n')
        before = read_recipe(path)
        for key, setting in NAMED.items():
            for name in (key, key.rpartition(".")[2], key.replace(".", "_"), key.replace(".", "__")):
                for spelling in (name, name.upper(), f"SWERVE_{name.upper()}", f"MLPERF_{name.upper()}"):
                    monkeypatch.setenv(spelling, render_value(values(setting)[-1]).strip('"'))
        assert read_recipe(path) == before
        monkeypatch.undo()
