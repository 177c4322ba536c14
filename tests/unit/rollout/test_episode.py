import asyncio

import numpy as np
import pytest

from swerve.rollout import EpisodeSettings, run_episode
from swerve.sandboxes import SandboxLostError
from swerve.types import EpisodeStatus, Limits, MachineError, SamplingParams, SwerveError


@pytest.fixture
def play(run, world, words):
    def play(script, *, task=None, limits=None, **changes):
        here = world(lambda session_id, number: script, **changes)
        settings = EpisodeSettings(sampling=SamplingParams(), limits=limits)
        trajectory = run(run_episode(task or words.task(), 3, roles=here.roles, settings=settings, seed=11))
        assert not here.policy.open_now, "the session is closed"
        return trajectory, here

    return play


def test_a_repair(play, words, renderer):
    trajectory, here = play(words.RIGHT)
    assert trajectory.status is EpisodeStatus.SUCCEEDED
    assert trajectory.reward == 1.0
    assert trajectory.test_statuses == {"test_inc": "passed", "test_hidden": "passed"}
    assert (trajectory.task_id, trajectory.sample_index, trajectory.seed, trajectory.error) == ("inc", 3, 11, "")
    assert here.policy.opened == [("inc#0003", 11)]
    source = words.BROKEN.removesuffix("\n")
    turns = list(zip(words.RIGHT, [[source], ["edited", "test_inc ok\nall passed"], []], strict=True))
    tokens, sampled = renderer.demonstration(words.task().problem_statement, turns)
    assert trajectory.tokens.tolist() == tokens.tolist()
    assert trajectory.sampled.tolist() == sampled.tolist()
    assert trajectory.num_sampled_tokens == sampled.sum()
    assert (trajectory.weights_versions[sampled] == 7).all()
    assert trajectory.behaviour_logprobs.dtype == np.float32
    assert set(trajectory.seconds) == {"start", "generate", "tools", "grade"}


def test_a_wrong_repair_is_a_reward_of_zero(play, words):
    trajectory, _ = play(words.WRONG)
    assert (trajectory.status, trajectory.reward) == (EpisodeStatus.SUCCEEDED, 0.0)
    assert trajectory.turns[1].observations == ("edited", "test_inc FAILED AssertionError\n1 failed")


def test_what_is_left_at_the_turn_limit_is_graded(play, words):
    limits = Limits(max_turns=2)
    trajectory, _ = play(words.RIGHT[:2], limits=limits)
    assert (trajectory.status, trajectory.reward) == (EpisodeStatus.MAX_TURNS, 1.0)
    trajectory, _ = play(words.RIGHT[:2], task=words.task(limits=limits))
    assert (trajectory.status, trajectory.reward) == (EpisodeStatus.MAX_TURNS, 1.0)


def test_the_hidden_evaluation_gets_the_time_its_limits_grant(play, words):
    _, here = play(words.RIGHT, limits=Limits(test_timeout_s=3.5))
    assert here.environment.timeout_s == 3.5
    _, here = play(words.RIGHT, task=words.task(limits=Limits(test_timeout_s=4.5)))
    assert here.environment.timeout_s == 4.5


def test_one_observation_leaves_room_for_the_rest_of_the_episode(play, words, renderer):
    """Ten thousand characters would fill any context of a thousand tokens; the agent goes on and is told."""
    shout = ("execute_bash", {"command": "yes 'return value' | head -c 10000"})
    trajectory, here = play([[shout], *words.RIGHT])
    assert (trajectory.status, trajectory.reward) == (EpisodeStatus.SUCCEEDED, 1.0)
    (observation,) = trajectory.turns[0].observations
    assert "characters left out]" in observation
    assert len(renderer.tokenizer.encode_content(observation)) < here.policy.context_length / 2


def test_a_file_that_was_removed_is_a_reward_of_zero(play, words):
    for command in ("rm repair.py", "rm repair.py; mkdir repair.py", "ln -sf /etc/passwd repair.py"):
        trajectory, _ = play([[("execute_bash", {"command": command})], [words.FINISH]])
        assert (trajectory.status, trajectory.reward) == (EpisodeStatus.SUCCEEDED, 0.0), command


@pytest.mark.parametrize(
    "failure", [SandboxLostError("the sandbox\ndied"), MachineError("no memory"), OSError("gone"), SwerveError("odd")]
)
def test_infrastructure_that_fails_is_never_a_reward(play, words, failure):
    trajectory, here = play([[words.VIEW], failure])
    assert (trajectory.status, trajectory.reward) == (EpisodeStatus.ERROR, None)
    assert trajectory.error == " ".join(str(failure).split())
    assert not trajectory.status.is_valid_sample
    assert len(trajectory.turns) == 1  # what had happened is kept
    assert trajectory.sampled.any()
    assert here.environment.num_graded == 0


def test_a_sandbox_killed_in_the_middle_is_never_a_reward(run, world, words):
    here = world(lambda session_id, number: [[words.VIEW], [words.RUN], [words.FINISH]], delay_s=0.2)
    started = []

    class Pool:
        async def start(self, image_name, prepare=None):
            started.append(await here.roles.pool.start(image_name, prepare))
            return started[-1]

    async def play():
        from dataclasses import replace

        episode = asyncio.create_task(
            run_episode(words.task(), 0, roles=replace(here.roles, pool=Pool()), settings=here.settings, seed=0)
        )
        while not started:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.25)
        await started[0].close()
        return await episode

    trajectory = run(play())
    assert (trajectory.status, trajectory.reward) == (EpisodeStatus.ERROR, None)
    assert trajectory.error


def test_a_grader_that_fails_is_never_a_reward(run, world, words):
    here = world(lambda session_id, number: words.RIGHT)
    for outcome, status, reward in (
        (EpisodeStatus.ERROR, EpisodeStatus.ERROR, None),
        (MachineError("no more processes"), EpisodeStatus.ERROR, None),
        (EpisodeStatus.GRADER_TIMEOUT, EpisodeStatus.GRADER_TIMEOUT, 0.0),
    ):
        here.environment.outcome = outcome
        trajectory = run(run_episode(words.task(), 0, roles=here.roles, settings=here.settings, seed=0))
        assert (trajectory.status, trajectory.reward) == (status, reward)
        assert bool(trajectory.error) == (status is EpisodeStatus.ERROR)


def test_the_time_of_an_episode(play, words):
    trajectory, here = play(words.RIGHT, limits=Limits(episode_timeout_s=0.3), delay_s=0.2)
    assert (trajectory.status, trajectory.reward) == (EpisodeStatus.AGENT_TIMEOUT, None)
    assert trajectory.error == "the episode's 0.3 s ran out"
    assert here.environment.num_graded == 0
    slow = [[("execute_bash", {"command": "sleep 30"})], [words.FINISH]]
    trajectory, _ = play(slow, limits=Limits(episode_timeout_s=0.5, command_timeout_s=30.0))
    assert trajectory.status is EpisodeStatus.AGENT_TIMEOUT


def test_a_mistake_in_the_program_is_raised(play, words):
    with pytest.raises(ZeroDivisionError):
        play([[words.VIEW], ZeroDivisionError("a bug")])


def test_the_agent_sees_neither_hidden_tests_nor_the_grade(play, words):
    look = ("execute_bash", {"command": "grep -rl test_hidden /testbed /tmp /run /opt /home 2>/dev/null; env"})
    trajectory, _ = play([[look], [words.FINISH]])
    assert "test_hidden" not in trajectory.turns[0].observations[0]
