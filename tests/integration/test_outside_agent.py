"""The policy that ships plays the same episode through the built-in agent and through a program: the same tokens."""

import asyncio
import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from swerve.cli.composition import episode_roles, load_policy, make_engine, read_tasks
from swerve.config import TrainRecipe, read_recipe_as
from swerve.orchestrator import training_settings
from swerve.rollout import run_episode
from swerve.telemetry import trajectory_from_json

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "mini.toml"
COMMAND = f"{sys.executable} {ROOT / 'examples' / 'outside_agent.py'}"


pytestmark = pytest.mark.slow


def test_an_episode_is_the_same_through_a_program():
    recipe = read_recipe_as(TrainRecipe, RECIPE, {"agent.command": COMMAND})
    task = read_tasks(recipe.tasks).validation[0]

    async def play():
        policy = load_policy(recipe.policy, 0)
        engine = make_engine(
            policy, dataclasses.replace(recipe, rollout=dataclasses.replace(recipe.rollout, num_slots=1))
        )
        async with episode_roles(recipe, [task], policy.tokenizer, engine) as theirs:
            ours = dataclasses.replace(theirs, outside=None)
            settings = training_settings(recipe)
            return [await run_episode(task, 0, roles=roles, settings=settings, seed=7) for roles in (ours, theirs)]

    ours, theirs = asyncio.run(play())
    assert theirs.requests.num_answered == len(ours.turns) > 1
    assert (theirs.status, theirs.reward, theirs.error) == (ours.status, ours.reward, "")
    for name in ("tokens", "sampled", "behaviour_logprobs", "weights_versions"):
        assert getattr(ours, name).tolist() == getattr(theirs, name).tolist(), name
    assert [turn.text for turn in ours.turns] == [turn.text for turn in theirs.turns]


def test_the_command_of_the_documentation_plays_an_episode():
    """What stands in docs/agents.md."""
    words = ["rollout", "first", "--recipe", str(RECIPE), "--agent.command", COMMAND]
    done = subprocess.run(
        [sys.executable, "-m", "swerve.cli", *words, "--json"], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    trajectory = trajectory_from_json(json.loads(done.stdout))
    assert trajectory.requests.num_answered > 1
