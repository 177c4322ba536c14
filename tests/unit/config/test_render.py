"""Recipes survive the way into TOML and back, and compare by value."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swerve.config import PretrainRecipe, TrainRecipe, diff, digest, parse_recipe, render, render_value
from swerve.config.schema import Optimizer, Rollout, Run, Training


@pytest.mark.parametrize("recipe", [TrainRecipe(), PretrainRecipe()])
@pytest.mark.parametrize("comments", [False, True])
def test_a_rendered_recipe_reads_back_equal(recipe, comments):
    assert parse_recipe(render(recipe, comments=comments)) == recipe


@given(
    name=st.text(st.characters(exclude_categories=["Cs"])),
    seed=st.integers(0, 2**31 - 1),
    rate=st.floats(min_value=0, exclude_min=True, allow_infinity=False),
    limit=st.just(math.inf) | st.floats(min_value=1e-3, max_value=1e9),
    slots=st.integers(1, 10**9),
)
def test_any_value_survives(name, seed, rate, limit, slots):
    recipe = TrainRecipe(
        run=Run(name=name, seed=seed),
        rollout=Rollout(num_slots=slots),
        optimizer=Optimizer(learning_rate=rate),
        training=Training(time_limit_s=limit),
    )
    assert parse_recipe(render(recipe)) == recipe


def test_values_in_toml():
    assert render_value((1, 2.0, "a", False)) == '[1, 2.0, "a", false]'
    assert render_value(1e-7) == "1e-07"


def test_difference_names_each_setting_that_differs():
    left = TrainRecipe()
    right = dataclasses.replace(left, rollout=Rollout(num_slots=4), run=Run(name="x"))
    assert [str(line) for line in diff(left, right)] == ['run.name: "" -> "x"', "rollout.num_slots: 64 -> 4"]
    assert diff(left, left) == []
    assert "rollout.num_slots: 64 -> -" in [str(line) for line in diff(left, PretrainRecipe())]


def test_the_digest_is_of_the_values():
    assert digest(TrainRecipe()) == digest(parse_recipe('kind = "train"'))
    assert digest(TrainRecipe()) != digest(TrainRecipe(run=Run(seed=1)))
