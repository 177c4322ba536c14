"""`swerve config`, and settings on the command line."""

import json
import tomllib

import pytest

from swerve.cli.main import main
from swerve.cli.parser import Parser
from swerve.cli.recipe_arguments import add_recipe_arguments, dry_run_text, overrides_from, recipe_from
from swerve.config import PretrainRecipe, TrainRecipe, parse_recipe, read_recipe, render_value, settings

DEMO = "recipes/demo.toml"


def run(capsys, *words):
    code = main(words)
    return code, *capsys.readouterr()


def test_show_prints_every_setting(capsys):
    code, out, _ = run(capsys, "config", "show", DEMO, "--rollout.num_slots", "3")
    assert code == 0
    shown = parse_recipe(out)
    assert isinstance(shown, TrainRecipe)
    assert shown.rollout.num_slots == 3
    assert shown == read_recipe(DEMO, {"rollout.num_slots": "3"})
    _, commented, _ = run(capsys, "config", "show", DEMO, "--comments", "--rollout.num_slots=3")
    assert parse_recipe(commented) == shown
    _, as_json, _ = run(capsys, "config", "show", DEMO, "--json")
    assert json.loads(as_json)["tasks.family"] in ("functions", "mini")


def test_check_reports_every_recipe(capsys, tmp_path):
    bad = tmp_path / "bad.toml"
    bad.write_text('kind = "train"\n[run]\nsed = 1\nnam = ""\n')
    code, out, err = run(capsys, "config", "check", DEMO, str(bad))
    assert code == 2
    assert out.startswith(f"{DEMO}: ok, train, digest ")
    assert err.splitlines() == [
        f"swerve: {bad}: run.sed is unknown; did you mean run.seed?",
        f"swerve: {bad}: run.nam is unknown; did you mean run.name?",
    ]


def test_diff_lists_what_differs(capsys, tmp_path):
    other = tmp_path / "other.toml"
    other.write_text('kind = "train"\n[run]\nseed = 5\n')
    base = tmp_path / "base.toml"
    base.write_text('kind = "train"\n')
    assert run(capsys, "config", "diff", str(base), str(other))[:2] == (1, "run.seed: 0 -> 5\n")
    assert run(capsys, "config", "diff", str(base), str(base))[:2] == (0, "the same settings\n")
    _, out, _ = run(capsys, "config", "diff", str(base), str(other), "--json")
    assert json.loads(out) == {"run.seed": [0, 5]}


@pytest.mark.parametrize("schema", [TrainRecipe, PretrainRecipe])
def test_every_setting_is_an_option_with_help(schema):
    parser = Parser(prog="swerve test")
    add_recipe_arguments(parser, schema)
    text = " ".join(parser.format_help().split())
    for setting in settings(schema):
        if setting.key == "kind":
            continue
        assert f"--{setting.key} " in text
        value = render_value(setting.default)
        word = value.strip('"')
        arguments = parser.parse(["r.toml", f"--{setting.key}", word])
        assert overrides_from(arguments) == {setting.key: word}


def test_a_setting_given_in_both_places_takes_the_command_line(tmp_path):
    path = tmp_path / "r.toml"
    path.write_text('kind = "train"\n[rollout]\nnum_slots = 8\nretries = 1\n')
    parser = Parser(prog="swerve test")
    add_recipe_arguments(parser, TrainRecipe)
    recipe = recipe_from(parser.parse([str(path), "--rollout.num_slots", "4", "--dry-run"]), TrainRecipe)
    assert (recipe.rollout.num_slots, recipe.rollout.retries) == (4, 1)


def test_a_dry_run_is_a_recipe_with_its_arithmetic():
    text = dry_run_text(TrainRecipe(), num_train_tasks=700, extra={"memory_estimate": "1.2 GiB", "parameters": 5e6})
    assert parse_recipe(text) == TrainRecipe()
    assert "global_batch_size           128" in text
    assert "5,000,000" in text
    data = json.loads(dry_run_text(PretrainRecipe(), as_json=True))
    assert tomllib.loads(data["recipe"])["kind"] == "pretrain"
    assert data["optimizer_steps"] > 1
