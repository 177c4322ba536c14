"""The benchmark's recipes: what they set follows from the batch size by law, and what they resolve to is on record."""

import itertools
from pathlib import Path

import pytest

from recipe_goldens import GOLDENS, RECIPES, ROOT
from swerve.cli.parser import Parser
from swerve.cli.recipe_arguments import add_recipe_arguments, recipe_from
from swerve.config import RecipeError, TrainRecipe, check_startable, diff, flatten, laws, read_recipe_as, render
from swerve.types import SwerveError

MLPERF = ROOT / "recipes" / "mlperf"
SYSTEMS = sorted(path.stem.removeprefix("qwen35_397b_") for path in MLPERF.glob("qwen35_397b_*.toml")
                 if "gbs" not in path.stem)  # fmt: skip
MOVES_WITH_THE_BATCH = set(laws.settings(256)) - {"rollout.generations_per_prompt"}


def recipe(path: Path, *words: str) -> TrainRecipe:
    parser = Parser(prog="swerve test")
    add_recipe_arguments(parser, TrainRecipe)
    return recipe_from(parser.parse([str(path), *words]), TrainRecipe)


def of_system(system: str) -> Path:
    return MLPERF / f"qwen35_397b_{system}.toml"


def test_every_system_has_a_recipe_for_every_batch_size():
    assert {"v7x128", "v7x256", "gpu64x4"} <= set(SYSTEMS)
    wanted = {f"qwen35_397b_gbs{gbs}_{system}.toml" for gbs in laws.BATCH_SIZES for system in SYSTEMS}
    assert wanted == {path.name for path in MLPERF.glob("*gbs*.toml")}


@pytest.mark.parametrize(("gbs", "system"), list(itertools.product(laws.BATCH_SIZES, SYSTEMS)))
def test_a_recipe_is_that_of_its_system_at_its_batch_size_by_law(gbs, system):
    found = recipe(MLPERF / f"qwen35_397b_gbs{gbs}_{system}.toml")
    settings = flatten(found)
    for key, value in laws.settings(gbs).items():
        assert settings[key] == pytest.approx(value, rel=1e-9), key
    assert found.rollout.global_batch_size == gbs
    assert found.first_evaluation_step == laws.first_evaluation_step(gbs)
    assert (found.mlperf.enabled, found.mlperf.division) == (True, "closed")
    assert found == recipe(of_system(system), "--gbs", str(gbs))
    moved = {line.key for line in diff(recipe(of_system(system)), found)}
    assert moved == (set() if gbs == 256 else MOVES_WITH_THE_BATCH)


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_system_says_how_to_compute_and_nothing_of_the_benchmark(system):
    sections = {
        line.key.partition(".")[0] for line in diff(recipe(MLPERF / "qwen35_397b.toml"), recipe(of_system(system)))
    }
    assert sections <= {"engine", "execution", "mesh", "packing", "remat"}


def test_the_mesh_of_the_published_cell():
    mesh, packing = (getattr(recipe(of_system("v7x128")), name) for name in ("mesh", "packing"))
    assert (mesh.fsdp, mesh.context, mesh.expert, mesh.num_devices) == (32, 4, 2, 256)
    assert (packing.rows_per_micro_batch, packing.row_length) == (64, 65_536)
    assert recipe(of_system("v7x256")).mesh.num_devices == 512


def test_gpus_get_the_kernels_that_run_everywhere_and_sample_with_vllm():
    found = recipe(of_system("gpu64x4"))
    assert (found.execution.attention, found.execution.experts) == ("blocked", "sorted")
    assert found.mesh.num_devices + 8 * len(found.engine.urls) == 64 * 4


def test_the_smaller_model_trains_by_the_same_laws():
    found = flatten(recipe(RECIPES["qwen35_35b_v5p128.toml"]))
    assert {key: found[key] for key in laws.settings(256)} == laws.settings(256)
    assert found["policy.model"] == "qwen35_35b_a3b"


def test_another_batch_size_follows_by_law_and_settings_of_ones_own_stand_above_it():
    found = recipe(of_system("v7x128"), "--gbs", "384", "--training.num_steps", "15")
    assert found.rollout.global_batch_size == 384
    assert found.optimizer.learning_rate == laws.learning_rate(384)
    assert found.training.num_steps == 15
    with pytest.raises(
        RecipeError, match=r"--optimizer\.learning_rate = 0\.001 must be 1\.4142135624e-06 in the closed"
    ):
        recipe(of_system("v7x128"), "--gbs", "512", "--optimizer.learning_rate", "1e-3")
    with pytest.raises(SwerveError, match="--gbs 100: a global batch size is a positive multiple of 16"):
        recipe(of_system("v7x128"), "--gbs", "100")
    with pytest.raises(SwerveError, match=r"--gbs and --rollout\.prompts_per_step both say how large a batch is"):
        recipe(of_system("v7x128"), "--gbs", "512", "--rollout.prompts_per_step", "32")


@pytest.mark.parametrize(
    ("key", "value", "wanted"),
    [
        ("rollout.temperature", "0.9", "1"),
        ("evaluation.attempts", "8", "4"),
        ("optimizer.beta2", "0.99", "0.999"),
        ("agent.max_turns", "31", "30"),
        ("agent.episode_timeout_s", "3600.0", "1800"),
        ("algorithm.loss", "cispo", "forced_on_policy"),
        ("algorithm.advantage", "rloo", "leave_one_out"),
        ("algorithm.sequence_gate_high", "1.01", "1.002"),
        ("algorithm.normaliser", "sequence", "token"),
        ("algorithm.overlong_filter", "false", "true"),
        ("algorithm.skip_zero_advantage", "true", "false"),
        ("algorithm.logprob_error_threshold", "3.0", "2.0"),
        ("policy.freeze_router", "false", "true"),
        ("mlperf.target_accuracy", "0.7", "0.69"),
        ("mlperf.first_evaluation_step", "19", "18"),
    ],
)
def test_the_closed_division_keeps_to_the_benchmark_and_the_open_one_need_not(key, value, wanted):
    path = MLPERF / "qwen35_397b.toml"
    with pytest.raises(RecipeError, match=rf"--{key} = \S+ must be {wanted} in the closed division"):
        recipe(path, f"--{key}", value)
    assert flatten(recipe(path, f"--{key}", value, "--mlperf.division", "open"))[key] is not None


def test_a_scored_run_says_whose_it_is_before_it_starts():
    path = of_system("v7x128")
    with pytest.raises(RecipeError) as caught:
        check_startable(recipe(path, "--mlperf.org", " "), "r.toml")
    assert caught.value.problems == tuple(
        f"r.toml: mlperf.{key} is missing: a scored run names it: add --mlperf.{key} TEXT, or set it in a recipe that "
        "extends this one" for key in ("org", "platform")
    )  # fmt: skip
    check_startable(recipe(path, "--mlperf.org", "Us", "--mlperf.platform", "a pod"))
    check_startable(TrainRecipe())


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_resolves_to_what_is_on_record(name):
    golden = GOLDENS / name
    assert golden.is_file() and golden.read_text(encoding="utf-8") == render(
        read_recipe_as(TrainRecipe, RECIPES[name])
    ), f"recipes/.../{name} resolves to something else than tests/goldens/{name}: `make goldens`, if that is meant"


def test_nothing_on_record_is_of_no_recipe():
    assert {path.name for path in GOLDENS.iterdir()} == set(RECIPES)
