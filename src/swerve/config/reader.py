"""Reads recipes: TOML files and command-line settings in, checked dataclasses out.

One rule of precedence: the files a recipe extends, then the recipe, then the command line. The environment sets
nothing. Each fault is one line that names where it stands, its key, its value and what to do; all faults of a recipe
are reported at once.
"""

import dataclasses
import difflib
import tomllib
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from swerve.config import laws
from swerve.config.describe import Setting, field_types, is_section, is_union, settings, split_annotated
from swerve.config.render import render_value
from swerve.config.schema import SCHEMAS, AbRecipe, PretrainRecipe, Recipe, TrainRecipe
from swerve.types import SwerveError

COMMAND_LINE = "command line"
_MAX_PARENTS = 8

R = TypeVar("R", TrainRecipe, PretrainRecipe, AbRecipe)
S = TypeVar("S")

Arm = Literal["reference", "candidate"]
ARM_SECTIONS = ("algorithm", "optimizer", "packing", "mesh", "execution", "remat", "training")
"""Sections of a training recipe in whose settings the arms of a comparison may differ."""
_OF_ALL_ARMS = ("training.num_steps", "training.time_limit_s", "optimizer.beta1")


class RecipeError(SwerveError):
    """A recipe that cannot be used.

    Attributes:
        problems: One line per fault.
    """

    def __init__(self, problems: Iterable[str]) -> None:
        """Takes one line per fault."""
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


@dataclasses.dataclass(slots=True)
class _Source:
    """Values gathered from files and the command line, with where each came from.

    Attributes:
        tree: Nested tables, as TOML has them.
        origins: Where the value of each key was last set: a file, or the command line.
        path: The recipe file, named where no value is at fault but their combination.
    """

    tree: dict[str, object]
    origins: dict[str, str]
    path: str

    def line(self, key: str, text: str) -> str:
        """One line about the value at `key`."""
        origin = self.origins.get(key, self.path)
        return f"{origin}: {'--' if origin == COMMAND_LINE else ''}{key} {text}"


def read_recipe(path: Path | str, overrides: Mapping[str, str] | None = None) -> Recipe:
    """Reads a recipe of any kind.

    Args:
        path: TOML file. `kind` in it chooses the schema; `extends` names a file, relative to this one, whose values
            hold where this one says nothing.
        overrides: Values from the command line by key (`rollout.temperature`), as text.

    Returns:
        The recipe, complete and checked.

    Raises:
        RecipeError: The file, a key, a value or a combination of values cannot be used.
    """
    source = _read_files(Path(path))
    return _finish(_schema_of(source), source, (COMMAND_LINE, overrides or {}))


def read_recipe_as(schema: type[R], path: Path | str, overrides: Mapping[str, str] | None = None) -> R:
    """Reads a recipe that must be of one kind.

    Args:
        schema: The recipe's class.
        path: As for `read_recipe`.
        overrides: As for `read_recipe`.

    Returns:
        The recipe, complete and checked.

    Raises:
        RecipeError: As for `read_recipe`, or the recipe is of another kind.
    """
    recipe = read_recipe(path, overrides)
    if not isinstance(recipe, schema):
        raise RecipeError([f'{path}: kind = "{recipe.kind}": this command needs kind = "{schema.KIND}"'])
    return recipe


def read_layered(schema: type[R], path: Path | str, layers: Iterable[tuple[str, Mapping[str, str]]]) -> R:
    """Reads a recipe under several sources of settings, each above those before it.

    Args:
        schema: The recipe's class.
        path: As for `read_recipe`.
        layers: What faults call a source, and its values by key, as text.

    Returns:
        The recipe, complete and checked.

    Raises:
        RecipeError: As for `read_recipe_as`; a fault names the source of the value.
    """
    source = _read_files(Path(path))
    found = _schema_of(source)
    if found is not schema:
        raise RecipeError([f'{path}: kind = "{found.KIND}": this command needs kind = "{schema.KIND}"'])
    return _finish(schema, source, *layers)


def settings_by_law(global_batch_size: int, named: Collection[str]) -> dict[str, str]:
    """What `--gbs` comes to.

    Args:
        global_batch_size: Given by it.
        named: Keys that the command line gives by their own names.

    Returns:
        The settings of `laws.settings`, as text by key.

    Raises:
        RecipeError: It is no global batch size of the benchmark, or the batch is given twice.
    """
    for key in ("rollout.prompts_per_step", "rollout.generations_per_prompt"):
        if key in named:
            raise RecipeError([f"--gbs and --{key} both say how large a batch is: give one of them"])
    try:
        return {key: render_value(value) for key, value in laws.settings(global_batch_size).items()}
    except ValueError as error:
        raise RecipeError([f"--gbs {global_batch_size}: {error}"]) from None


def stated_values(path: Path | str) -> dict[str, object]:
    """What a recipe and those it extends state, by key, unchecked: what they leave out is left out."""
    return dict(_values(_read_files(Path(path)).tree))


def read_settings(
    schema: type[S], path: Path | None, what: str, layers: Iterable[tuple[str, Mapping[str, str]]] = ()
) -> S:
    """Reads a file of settings that is no recipe, as strictly as one.

    Args:
        schema: A dataclass as those of recipes are.
        path: TOML file; `None` for a file that says nothing.
        what: What a fault calls such a file.
        layers: As for `read_layered`.

    Returns:
        The settings, complete and checked.

    Raises:
        RecipeError: The file, a key, a value or a combination of values cannot be used.
    """
    tree = _parse_toml(_read_text(path, None, what), str(path)) if path else {}
    name = str(path) if path else what
    return _finish(schema, _Source(tree=tree, origins=dict.fromkeys(_leaves(tree), name), path=name), *layers)


def parse_recipe(text: str, name: str = "<text>", overrides: Mapping[str, str] | None = None) -> Recipe:
    """Reads a recipe from TOML text that extends nothing, for example a run's resolved recipe.

    Args:
        text: TOML.
        name: What faults call it.
        overrides: As for `read_recipe`.

    Returns:
        The recipe, complete and checked.

    Raises:
        RecipeError: As for `read_recipe`.
    """
    tree = _parse_toml(text, name)
    source = _Source(tree=tree, origins=dict.fromkeys(_leaves(tree), name), path=name)
    return _finish(_schema_of(source), source, (COMMAND_LINE, overrides or {}))


def check_recipe(recipe: Recipe, name: str = "recipe") -> None:
    """Checks a recipe that was built in Python: types, ranges, contradictions.

    Args:
        recipe: Any recipe.
        name: What faults call it.

    Raises:
        RecipeError: A value or a combination of values cannot be used.
    """
    tree = cast("dict[str, object]", dataclasses.asdict(recipe))
    _finish(type(recipe), _Source(tree=tree, origins={}, path=name))


def check_startable(recipe: TrainRecipe, name: str = "recipe") -> None:
    """Checks that a recipe leaves nothing open that a run has to say.

    Args:
        recipe: Complete and checked.
        name: What faults call it.

    Raises:
        RecipeError: It does; each line names the key.
    """
    found = [f"{name}: {key} {text}: add --{key} TEXT, or set it in a recipe that extends this one"
             for key, text in recipe.left_open()]  # fmt: skip
    if found:
        raise RecipeError(found)


def arm_recipe(recipe: AbRecipe, arm: Arm, name: str = "recipe") -> TrainRecipe:
    """The training recipe of one arm of a comparison.

    Args:
        recipe: The comparison.
        arm: Which.
        name: What faults call the recipe.

    Returns:
        The recipe, complete and checked.

    Raises:
        RecipeError: The arm's settings cannot be used, are none that arms may differ in, or have sequences dropped.
    """
    place = f"{name}: arms.{arm}"
    pairs = (one.partition("=") for one in getattr(recipe.arms, arm))
    overrides = {key.strip(): value.strip() for key, _, value in pairs}
    for key in overrides:
        if key.partition(".")[0] not in ARM_SECTIONS or key in _OF_ALL_ARMS:
            sections = ", ".join(f"[{section}]" for section in ARM_SECTIONS)
            raise RecipeError([f"{place}: {key} is the same for all arms: they differ in settings of {sections}"])
    tree = cast("dict[str, object]", dataclasses.asdict(recipe.without_arms()))
    made = cast("TrainRecipe", _finish(TrainRecipe, _Source(tree=tree, origins={}, path=place), (place, overrides)))
    algorithm, common = made.algorithm, recipe.without_arms().algorithm
    for key in ("overlong_filter", "logprob_error_threshold"):
        if getattr(algorithm, key) != getattr(common, key):
            raise RecipeError([f"{place}: algorithm.{key} would drop sequences, which hides errors: remove it"])
    if algorithm.importance == "sequence_mask":
        raise RecipeError([f"{place}: algorithm.importance would drop sequences, which hides errors: remove it"])
    return made


def _faults_of_arms(recipe: AbRecipe, name: str) -> Iterator[str]:
    arms: tuple[Arm, ...] = ("reference", "candidate")
    for arm in arms:
        try:
            arm_recipe(recipe, arm, name)
        except RecipeError as error:
            yield from error.problems


# -------------------------------------------------------------------------------------------------------- files


def _read_files(path: Path) -> _Source:
    chain: list[tuple[str, dict[str, object]]] = []
    seen: list[Path] = []
    current: Path | None = path
    while current is not None:
        if current.resolve() in seen or len(seen) == _MAX_PARENTS:
            raise RecipeError([f"{path}: extends itself by way of {current}: remove one extends"])
        seen.append(current.resolve())
        tree = _parse_toml(_read_text(current, seen_from=chain[-1][0] if chain else None), str(current))
        parent = tree.pop("extends", None)
        if parent is not None and not isinstance(parent, str):
            raise RecipeError([f"{current}: extends = {_show(parent)} must be a text: the path of a recipe"])
        chain.append((str(current), tree))
        current = None if parent is None else current.parent / parent
    merged = _Source(tree={}, origins={}, path=str(path))
    for name, tree in reversed(chain):
        _merge(merged.tree, tree)
        merged.origins.update(dict.fromkeys(_leaves(tree), name))
    return merged


def _read_text(path: Path, seen_from: str | None, what: str = "recipe") -> str:
    asked = f" ({seen_from} extends it)" if seen_from else ""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError([f"{path}: no such {what}{asked}{_near_file(path)}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise RecipeError([f"{path}: cannot be read: {reason}{asked}"]) from None


def _near_file(path: Path) -> str:
    near = difflib.get_close_matches(path.name, [other.name for other in path.parent.glob("*.toml")], n=1)
    return f"; did you mean {path.parent / near[0]}?" if near else ""


def _parse_toml(text: str, name: str) -> dict[str, object]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RecipeError([f"{name}: not TOML: {str(error)[:1].lower()}{str(error)[1:]}"]) from None


def _leaves(tree: Mapping[str, object], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _leaves(cast("dict[str, object]", value), f"{prefix}{key}.")


def _values(tree: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _values(cast("dict[str, object]", value), f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _merge(base: dict[str, object], over: Mapping[str, object]) -> None:
    for key, value in over.items():
        below = base.get(key)
        if isinstance(below, dict) and isinstance(value, dict):
            _merge(cast("dict[str, object]", below), cast("dict[str, object]", value))
        else:
            base[key] = value


# ----------------------------------------------------------------------------------------------------- building


def _schema_of(source: _Source) -> type[TrainRecipe] | type[PretrainRecipe] | type[AbRecipe]:
    kind = source.tree.get("kind")
    if isinstance(kind, str) and kind in SCHEMAS:
        return SCHEMAS[kind]
    known = " or ".join(f'"{name}"' for name in SCHEMAS)
    found = "is missing" if kind is None else f"= {_show(kind)} is unknown"
    raise RecipeError([source.line("kind", f"{found}: write kind = {known}")])


def _finish(schema: type[Any], source: _Source, *layers: tuple[str, Mapping[str, str]]) -> Any:
    known = {setting.key: setting for setting in settings(schema)}
    problems = [line for origin, values in layers for line in _apply_overrides(source, values, known, origin)]
    recipe = _build(schema, source.tree, "", source, known, problems)
    if not problems:
        problems.extend(source.line(key, _valued(recipe, key, text)) for key, text in _contradictions(recipe, ""))
    if not problems and isinstance(recipe, AbRecipe):
        problems.extend(_faults_of_arms(recipe, source.path))
    if problems:
        raise RecipeError(problems)
    return recipe


def _apply_overrides(
    source: _Source, overrides: Mapping[str, str], known: Mapping[str, Setting], origin: str
) -> Iterator[str]:
    for key, text in overrides.items():
        setting = known.get(key)
        if setting is None:
            source.origins[key] = origin
            yield source.line(key, f"is unknown{_near_key(key, known)}")
            continue
        *sections, name = key.split(".")
        table = source.tree
        for section in sections:
            inner = table.setdefault(section, {})
            if not isinstance(inner, dict):
                break
            table = cast("dict[str, object]", inner)
        else:
            source.origins[key] = origin
            table[name] = parse_value(setting.type, text)


def parse_value(tp: Any, text: str) -> object:
    """A command-line word as the TOML value it stands for; text that is none stays text, and is refused later.

    Args:
        tp: Type of the setting.
        text: The word.

    Returns:
        A value as `tomllib` would give.
    """
    if tp is str or typing.get_origin(tp) is Literal:
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (tomllib.TOMLDecodeError, KeyError):
        pass
    try:
        return float(text)  # Python's spellings, such as 1e-4 (which TOML has) and .5 (which it has not)
    except ValueError:
        return text


def _build(
    schema: type[Any],
    tree: Mapping[str, object],
    prefix: str,
    source: _Source,
    known: Mapping[str, Setting],
    problems: list[str],
) -> Any:
    hints = field_types(schema)
    for name in [name for name in tree if name not in hints]:
        problems.append(source.line(prefix + name, f"is unknown{_near_key(prefix + name, known)}"))
    values: dict[str, object] = {}
    for name, tp in hints.items():
        if name not in tree:
            continue
        key = prefix + name
        bare, _ = split_annotated(tp)
        if not is_section(bare):
            values[name] = _convert(known[key], tree[name], source, problems)
        elif isinstance(tree[name], dict):
            inner = cast("dict[str, object]", tree[name])
            values[name] = _build(bare, inner, f"{key}.", source, known, problems)
        else:
            problems.append(source.line(key, f"= {_show(tree[name])} must be a table: write [{key}]"))
    return schema(**values)


def _convert(setting: Setting, value: object, source: _Source, problems: list[str]) -> object:
    converted, fits = _as_type(setting.type, value)
    if fits and setting.range is not None and not isinstance(converted, str):
        fits = setting.range.allows(cast("float", converted))
    if not fits:
        default = _show(setting.default)
        near = _near_choice(setting.type, value)
        problems.append(
            source.line(setting.key, f"= {_show(value)} must be {setting.type_text}{near} (default {default})")
        )
    return converted


def _as_type(tp: Any, value: object) -> tuple[object, bool]:
    """The value in the exact type, and whether it fits; integers are numbers, nothing else is converted."""
    origin = typing.get_origin(tp)
    if origin is Literal:
        return value, value in typing.get_args(tp)
    if is_union(tp):
        tried = [_as_type(member, value) for member in typing.get_args(tp)]
        return next((one for one in tried if one[1]), (value, False))
    if origin is tuple:
        if not isinstance(value, list | tuple):
            return value, False
        element, allowed = split_annotated(typing.get_args(tp)[0])
        parts = [_as_type(element, part) for part in cast("list[object]", value)]
        fits = all(ok and (allowed is None or allowed.allows(cast("float", part))) for part, ok in parts)
        return tuple(part for part, _ in parts), fits
    if tp is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value), True
    return value, type(value) is tp


def _contradictions(section: object, prefix: str) -> Iterator[tuple[str, str]]:
    for field in dataclasses.fields(cast("Any", section)):
        value = getattr(section, field.name)
        if dataclasses.is_dataclass(value):
            yield from _contradictions(value, f"{prefix}{field.name}.")
    check = getattr(section, "contradictions", None)
    if check is not None:
        for key, text in check():
            yield prefix + key, text


# -------------------------------------------------------------------------------------------------------- words


def _valued(recipe: object, key: str, text: str) -> str:
    value = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return text if value in ("", ()) else f"= {_show(value)} {text}"


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, dict):
        return "{...}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_show, cast('Sequence[object]', value)))}]"
    return str(value)


def _near_key(key: str, known: Mapping[str, Setting]) -> str:
    """A hint at the key that was meant: in the same section first, then the same name elsewhere, then any like it."""
    *_, name = key.split(".")
    section = key[: -len(name)]
    siblings = {other.removeprefix(section).split(".")[0]: other for other in known if other.startswith(section)}
    if near := difflib.get_close_matches(name, siblings, n=1, cutoff=0.6):
        return f"; did you mean {section}{near[0]}?"
    if namesakes := [other for other in known if other.rsplit(".", 1)[-1] == name]:
        return f"; did you mean {' or '.join(namesakes)}?"
    if near := difflib.get_close_matches(key, known, n=1, cutoff=0.8):
        return f"; did you mean {near[0]}?"
    return ": remove it"


def _near_choice(tp: Any, value: object) -> str:
    if typing.get_origin(tp) is not Literal or not isinstance(value, str):
        return ""
    near = difflib.get_close_matches(value, [str(choice) for choice in typing.get_args(tp)], n=1)
    return f"; did you mean {near[0]}?" if near else ""
