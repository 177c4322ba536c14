"""Switches of how a step is computed: each of their values is taken, and each conflict names the place and the key."""

import math

import pytest

from swerve.config import RecipeError, flatten, read_recipe, render_value

ON_A_MESH = {"mesh.fsdp": 2, "mesh.context": 2, "packing.rows_per_micro_batch": 4}
NARROW = {"execution.parameter_dtype": "bfloat16"}

TAKEN = [
    ({}, "execution.head", ["sharded", "plain"]),
    (ON_A_MESH, "execution.head", ["sharded", "plain"]),
    ({"training.max_trajectory_age": 1}, "training.pipelined", [False, True]),
    ({"training.max_trajectory_age": 1, "training.pipelined": True}, "training.staged", [False, True]),
    (ON_A_MESH, "execution.delta_precision", ["default", "high", "highest"]),
    (ON_A_MESH | NARROW, "execution.gradient_sum_dtype", ["parameter", "float32"]),
    ({}, "execution.buffer_factor", ["dropless", 0.5, 1.25, 2.0]),
    ({}, "training.max_trajectory_age", [0, 1]),
    ({"remat.attention_key": "recompute"}, "remat.enabled", [False, True]),
    ({"remat.enabled": True}, "remat.layer_input", ["keep", "recompute", "offload"]),
]
REFUSED = [
    ({}, "execution.head", "sharped", 'must be one of sharded, plain; did you mean sharded? (default "sharded")'),
    ({}, "training.pipelined", True, "needs max_trajectory_age = 1"),
    ({"training.max_trajectory_age": 1}, "training.staged", True, "needs pipelined = true"),
    ({}, "execution.delta_precision", "high", "has no effect with mesh.context = 1"),
    ({}, "execution.delta_precision", "exact", "must be one of default, high, highest"),
    (ON_A_MESH, "execution.gradient_sum_dtype", "float32", 'has no effect with parameter_dtype = "float32"'),
    (NARROW, "execution.gradient_sum_dtype", "float32", "has no effect on one device"),
    (
        ON_A_MESH | NARROW | {"execution.head": "plain"},
        "execution.gradient_sum_dtype",
        "float32",
        'cannot be chosen with head = "plain"',
    ),
    ({}, "execution.buffer_factor", 0, "must be a number above 0 or dropless"),
    ({}, "execution.buffer_factor", -1.5, "must be a number above 0 or dropless"),
    ({}, "execution.buffer_factor", "roomy", "must be a number above 0 or dropless"),
    ({}, "execution.buffer_factor", math.nan, "must be a number above 0 or dropless"),
    ({}, "execution.buffer_factor", True, "must be a number above 0 or dropless"),
    ({}, "training.max_trajectory_age", -1, "must be an integer at least 0"),
    ({}, "training.max_trajectory_age", 2, "must be 0 or 1: at most one step is played ahead"),
    ({}, "remat.delta_mixed", "keep", "has no effect with enabled = false"),
    ({"remat.enabled": True}, "remat.delta_mixed", "drop", "must be one of keep, recompute, offload"),
]


def file(path, extends="", **settings):
    head = f'extends = "{extends}"' if extends else 'kind = "train"'
    path.write_text("\n".join([head, *(f"{key} = {render_value(value)}" for key, value in settings.items())]) + "\n")
    return path


def word(value):
    return value if isinstance(value, str) else render_value(value)


@pytest.mark.parametrize(("companions", "key", "values"), TAKEN)
def test_every_value_of_a_switch_is_taken_from_file_and_command_line(tmp_path, companions, key, values):
    base = file(tmp_path / "base.toml", **companions)
    for value in values:
        child = file(tmp_path / "child.toml", extends="base.toml", **{key: value})
        found = read_recipe(child)
        assert flatten(found)[key] == value
        assert read_recipe(base, {key: word(value)}) == found


@pytest.mark.parametrize(("companions", "key", "value", "text"), REFUSED)
def test_a_conflict_names_the_place_and_the_key(tmp_path, companions, key, value, text):
    base = file(tmp_path / "base.toml", **companions)
    child = file(tmp_path / "child.toml", extends="base.toml", **{key: value})
    for path, words, place in ((child, {}, f"{child}: "), (base, {key: word(value)}, "command line: --")):
        with pytest.raises(RecipeError) as caught:
            read_recipe(path, words)
        (line,) = caught.value.problems
        assert line.startswith(f"{place}{key} = {render_value(value)} {text}"), line
