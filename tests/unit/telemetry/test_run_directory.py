"""A run's folder is made whole, held by one process, resumed only by the same recipe, and free of secrets."""

import dataclasses
import json
import subprocess
import sys
import time

import pytest

from swerve.config import TrainRecipe, parse_recipe
from swerve.config.schema import Rollout, Run, Training
from swerve.telemetry import PeakMemory, RunDirectory, choose_path, latest_path
from swerve.types import MachineError, SwerveError

RECIPE = TrainRecipe()
FACTS = {"command": ["swerve"]}


def test_a_new_run_has_its_recipe_and_provenance(tmp_path):
    directory = RunDirectory.create(tmp_path / "runs" / "a", RECIPE, FACTS)
    assert parse_recipe(directory.recipe.read_text()) == RECIPE
    assert json.loads((directory.path / "provenance.json").read_text()) == FACTS
    assert directory.checkpoints.is_dir()
    assert [entry.name for entry in (tmp_path / "runs").iterdir()] == ["a"]
    directory.close()
    directory.close()


def test_a_used_folder_is_refused_and_untouched(tmp_path):
    (tmp_path / "a").mkdir()
    RunDirectory.create(tmp_path / "a", RECIPE, FACTS).close()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(SwerveError, match=r"exists already: resume that run with --resume, or choose another"):
        RunDirectory.create(tmp_path / "a", RECIPE, FACTS)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_place_that_cannot_be_written_is_the_machines_fault(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match="cannot be written"):
        RunDirectory.create(tmp_path / "file" / "a", RECIPE, FACTS)


def test_a_run_is_resumed_by_the_same_recipe_only(tmp_path):
    RunDirectory.create(tmp_path / "a", RECIPE, FACTS).close()
    other = dataclasses.replace(RECIPE, rollout=Rollout(num_slots=4))
    with pytest.raises(SwerveError, match=r"differs in rollout\.num_slots: 64 -> 4: resume it unchanged"):
        RunDirectory.resume(tmp_path / "a", other, FACTS)
    longer = dataclasses.replace(RECIPE, training=Training(num_steps=99))
    directory = RunDirectory.resume(tmp_path / "a", longer, FACTS)
    assert parse_recipe(directory.recipe.read_text()) == longer
    assert (directory.path / "provenance.resume1.json").exists()
    directory.close()
    with pytest.raises(SwerveError, match="not the directory of a run"):
        RunDirectory.resume(tmp_path, RECIPE, FACTS)


def test_two_processes_never_share_a_run(tmp_path):
    directory = RunDirectory.create(tmp_path / "a", RECIPE, FACTS)
    with pytest.raises(SwerveError, match="another process runs in it"):
        RunDirectory.resume(tmp_path / "a", RECIPE, FACTS)
    directory.close()
    RunDirectory.resume(tmp_path / "a", RECIPE, FACTS).close()


def test_unnamed_runs_are_named_by_recipe_and_time_and_found_again(tmp_path):
    recipe = dataclasses.replace(RECIPE, run=Run(directory=str(tmp_path)))
    file = tmp_path / "demo.toml"
    with pytest.raises(SwerveError, match=r"holds no run of .*demo\.toml to resume"):
        latest_path(recipe, file)
    early, late = choose_path(recipe, file, now=0), choose_path(recipe, file, now=1e9)
    for path in (late, early):
        RunDirectory.create(path, recipe, FACTS).close()
    (tmp_path / "demo-20990101-000000").mkdir()
    assert latest_path(recipe, file) == late
    named = dataclasses.replace(recipe, run=Run(directory=str(tmp_path), name="x"))
    assert choose_path(named, file) == tmp_path / "x"


def test_peak_memory_sees_children():
    code = "x = bytearray(60 * 2**20); print('ready', flush=True); input()"
    with PeakMemory(interval_s=0.02) as alone:
        pass
    with (
        PeakMemory(interval_s=0.02) as peak,
        subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as child,
    ):
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.3)
        child.communicate("\n", timeout=30)
    assert peak.peak_bytes > 0
    assert peak.peak_bytes >= alone.peak_bytes
