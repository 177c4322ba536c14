"""Which commands there are, known without importing any of them."""

import ast
import importlib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, cast

_COMMANDS = Path(__file__).parent / "commands"
_ORDER = (
    *("train", "pretrain", "eval", "serve", "rollout", "tasks", "sandbox", "plan", "simulate", "bench", "ab"),
    *("mlperf", "launch", "view", "checkpoint", "config", "doctor"),
)


class CommandModule(Protocol):
    """What a module of `swerve.cli.commands` provides."""

    add_arguments: Callable[[ArgumentParser], None]
    run: Callable[[Namespace], int | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """One command, not imported yet.

    Attributes:
        name: As typed.
        module: Name of its module.
        description: Its docstring.
    """

    name: str
    module: str
    description: str

    @property
    def summary(self) -> str:
        """First line of the description, without its full stop."""
        return self.description.partition("\n")[0].rstrip(".")

    def load(self) -> CommandModule:
        """Imports it."""
        return cast("CommandModule", importlib.import_module(self.module))


def commands() -> dict[str, Command]:
    """Every command by name, in the order of a run's life."""
    found: dict[str, Command] = {}
    for path in _COMMANDS.glob("*.py"):
        if path.stem.startswith("_"):
            continue
        name = path.stem.replace("_", "-")
        description = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        found[name] = Command(name=name, module=f"swerve.cli.commands.{path.stem}", description=description)
    rank = {name: number for number, name in enumerate(_ORDER)}
    return dict(sorted(found.items(), key=lambda item: (rank.get(item[0], len(rank)), item[0])))
