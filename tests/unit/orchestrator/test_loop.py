"""What cannot be played ends the run with its cause."""

import asyncio
import io
from typing import Any, cast

import numpy as np
import pytest

from swerve.checkpoint import DataPosition
from swerve.config import TrainRecipe
from swerve.config.schema import Evaluation, Rollout
from swerve.environments import load_tasks, shipped_file
from swerve.orchestrator import LoopRoles, LoopState, TrainingLoop
from swerve.orchestrator.loop import check_played
from swerve.rollout import EpisodeRoles
from swerve.telemetry import Metrics, TrajectoryLog, open_progress, read_trajectories
from swerve.types import EpisodeStatus, MachineError, Trajectory

NOTHING: Any = None


class NoPolicy:
    """Every episode fails at its very start, so that nothing else is needed."""

    context_length = 8

    async def open(self, session_id, seed):
        raise MachineError("no engine")


class IdleTrainer:
    """Never gets a batch."""

    num_warm_ups = 0

    def warm_up(self):
        self.num_warm_ups += 1


def loop_of(tmp_path, **evaluation):
    recipe = TrainRecipe(
        rollout=Rollout(prompts_per_step=2, generations_per_prompt=3, retries=1),
        evaluation=Evaluation(attempts=2, **evaluation),
    )
    tasks = load_tasks(shipped_file("mini", "validation"))[:3]
    roles = LoopRoles(
        episode=EpisodeRoles(policy=NoPolicy(), pool=NOTHING, environment=NOTHING, grader=NOTHING, renderer=NOTHING),
        trainer=cast("Any", IdleTrainer()),
        publisher=NOTHING,
        metrics=Metrics(tmp_path / "metrics.jsonl"),
        progress=open_progress("none", 3, io.StringIO()),
        trajectories=TrajectoryLog(tmp_path / "trajectories.jsonl"),
        train_tasks=tasks,
        validation_tasks=tasks,
    )
    return TrainingLoop(recipe, roles, LoopState(position=DataPosition(num_tasks=3)), lambda state, worth: None)


@pytest.mark.timeout(60)
def test_a_step_that_cannot_be_played_ends_the_run_with_its_cause(tmp_path):
    loop = loop_of(tmp_path, before=False)
    with pytest.raises(MachineError) as caught:
        asyncio.run(loop.run())
    assert str(caught.value) == "step 1: each of the 3 episodes of task mini.0700.sum_squares failed: error: no engine"
    assert caught.value.exit_code == 1
    assert loop.state.step == 0
    kept = [one for _, one in read_trajectories(tmp_path / "trajectories.jsonl")]
    assert [one.error for one in kept] == ["no engine"] * 6  # what happened can be looked up


@pytest.mark.timeout(60)
def test_an_evaluation_that_cannot_be_played_ends_the_run_with_its_cause(tmp_path):
    with pytest.raises(MachineError, match="evaluation after step 0: each of the 6 episodes failed: error: no engine"):
        asyncio.run(loop_of(tmp_path).run())


@pytest.mark.timeout(60)
def test_the_trainer_compiles_once_there_is_a_reward_or_none_to_wait_for(tmp_path):
    failing = loop_of(tmp_path)
    with pytest.raises(MachineError):
        asyncio.run(failing.run())
    assert cast("Any", failing._roles.trainer).num_warm_ups == 0
    training = loop_of(tmp_path, before=False)
    with pytest.raises(MachineError, match="step 1"):
        asyncio.run(training.run())
    assert cast("Any", training._roles.trainer).num_warm_ups == 1


def attempt(task, status, error="", reward=None):
    empty = np.zeros(0, np.int32)
    return Trajectory(
        task_id=task,
        sample_index=0,
        tokens=empty,
        sampled=empty.astype(bool),
        behaviour_logprobs=empty.astype(np.float32),
        weights_versions=empty,
        status=status,
        reward=reward,
        error=error,
    )


def test_the_most_frequent_cause_is_named():
    good = attempt("a", EpisodeStatus.SUCCEEDED, reward=1.0)
    lost = [attempt("b", EpisodeStatus.ERROR, error) for error in ("full", "gone", "gone")]
    late = attempt("b", EpisodeStatus.AGENT_TIMEOUT, "the episode's 2 s ran out")
    check_played("step 1", [[good, lost[0]], [good, late]])
    check_played("step 1", [[good], [late, late]])  # slow, but not broken: others are trained on
    with pytest.raises(MachineError, match="3 episodes of task b failed: 2 times error: gone"):
        check_played("step 1", [[good], lost])
    with pytest.raises(MachineError, match="none of the 4 episodes has a verdict: 2 times agent_timeout: the ep"):
        check_played("step 1", [[late, late], [lost[0], attempt("b", EpisodeStatus.CANCELLED)]])
