"""Every recipe that ships reads, survives the way through TOML, and is named in the documentation."""

import re
import shlex
from pathlib import Path

import pytest

from swerve.cli.parser import Parser
from swerve.cli.registry import commands
from swerve.config import parse_recipe, read_recipe, render
from swerve.environments.repository import recipe as factory

ROOT = Path(__file__).resolve().parent.parent.parent
RECIPES = sorted(path for path in ROOT.glob("recipes/**/*.toml") if path.parent.name != "tasks")
FACTORY_RECIPES = [path for path in sorted(ROOT.glob("recipes/tasks/*.toml")) if ".lock" not in path.name]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def shown_commands():
    """Command lines of `swerve` in indented or fenced blocks of the documentation."""
    for page in PAGES:
        fenced = False
        for line in page.read_text().replace("\\\n", " ").splitlines():
            if line.lstrip().startswith("```"):
                fenced = not fenced
                continue
            text = line.strip().removeprefix("$ ").removeprefix(".venv/bin/")
            if (fenced or line.startswith("    ")) and text.startswith("swerve "):
                yield pytest.param(text.partition(" #")[0].strip(), id=f"{page.name}:{text}")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.name)
def test_a_recipe_reads_and_round_trips(path):
    recipe = read_recipe(path)
    assert parse_recipe(render(recipe)) == recipe


@pytest.mark.parametrize("path", FACTORY_RECIPES, ids=lambda path: path.name)
def test_a_recipe_of_the_task_factory_and_its_lock_agree(path):
    settings, wanted = factory.read_recipe(path)
    locked_settings, packages = factory.read_lock(path.with_suffix(".lock.toml"))
    assert locked_settings == settings and len(packages) >= 12
    assert [one.name for one in packages] == [one.name for one in wanted]
    assert all(one.version in ("", locked.version) for one, locked in zip(wanted, packages, strict=True))


def test_there_are_recipes():
    assert {path.name for path in RECIPES} >= {"demo.toml", "functions.toml", "mini.toml", "tiny_pretrain.toml"}


def test_every_recipe_is_documented():
    text = "".join(page.read_text() for page in PAGES)
    assert [path.name for path in RECIPES if f"recipes/{path.relative_to(ROOT / 'recipes')}" not in text] == []


@pytest.mark.parametrize("line", list(shown_commands()))
def test_commands_in_the_documentation_parse(line):
    _, name, *words = shlex.split(line)
    if name == "--help":
        return
    assert name in commands()
    parser = Parser(prog=f"swerve {name}")
    commands()[name].load().add_arguments(parser)
    if "--help" in words:
        return
    parser.parse(words)


def test_files_named_in_the_documentation_exist():
    missing = []
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
            if not (page.parent / target).exists():
                missing.append(f"{page.name}: {target}")
    assert missing == []


def test_pages_of_the_documentation_link_to_each_other_only():
    """What lies outside of docs/ is not in the site that is built of it."""
    docs = ROOT / "docs"
    outside = [
        f"{page.name}: {target}"
        for page in docs.glob("**/*.md")
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).resolve().is_relative_to(docs)
    ]
    assert outside == []
