import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from swerve.evaluation import EvalReport, TaskOutcome, evaluate, outcomes_of
from swerve.rollout import EpisodeRoles, EpisodeSettings
from swerve.types import EpisodeStatus, MachineError, SwerveError, Task, Trajectory

OK = EpisodeStatus.SUCCEEDED


def outcome(*rewards, task_id="t"):
    statuses = tuple(OK if reward is not None else EpisodeStatus.ERROR for reward in rewards)
    return TaskOutcome(task_id=task_id, rewards=rewards, statuses=statuses)


def report(*outcomes, **changes):
    return EvalReport(outcomes=outcomes, attempts_per_instance=len(outcomes[0].rewards), **changes)


@pytest.mark.parametrize(("resolved", "reached"), [(173, False), (174, True), (251, True), (0, False)])
def test_the_target_of_the_benchmark(resolved, reached):
    outcomes = [outcome(0.0, 0.0, 1.0, 0.0)] * resolved + [outcome(0.0, 0.0, 0.0, 0.0)] * (251 - resolved)
    evaluated = report(*outcomes, target_accuracy=0.69)
    assert evaluated.target_reached is reached
    assert evaluated.accuracy == evaluated.pass_at(4) == pytest.approx(resolved / 251)


def test_an_accuracy_of_exactly_the_target_reaches_it():
    outcomes = [outcome(1.0, 0.0, 0.0, 0.0)] * 69 + [outcome(0.0, 0.0, 0.0, 0.0)] * 31
    assert report(*outcomes, target_accuracy=0.69).target_reached


def test_a_crash_stays_in_the_denominator_and_makes_it_incomplete():
    evaluated = report(outcome(1.0, 1.0, 0.0, None), target_accuracy=0.1)
    assert evaluated.pass_at(1) == evaluated.avg_at_k == evaluated.mean_reward == 0.5
    assert (evaluated.error_attempts, evaluated.missing_attempts, evaluated.completed_attempts) == (1, 0, 3)
    assert not evaluated.complete
    assert not evaluated.target_reached  # an incomplete evaluation is no accuracy
    assert not replace(report(outcome(1.0)), fatal_error="the engine died").complete


def test_the_summary_is_json_with_the_agreed_keys():
    missing = TaskOutcome(task_id="b", rewards=(0.0, 1.0, 1.0, None), statuses=(OK, OK, EpisodeStatus.MAX_TURNS, None))
    summary = report(
        outcome(1.0, 1.0, 1.0, 1.0), missing, target_accuracy=0.69, checkpoint_step=18, samples_count=4608
    ).summary()
    assert json.loads(json.dumps(summary)) == summary
    wanted = {
        "instances": 2, "attempts_per_instance": 4, "expected_attempts": 8, "completed_attempts": 7,
        "missing_attempts": 1, "error_attempts": 0, "resolved_attempts": 6, "avg_at_k": 0.75, "mean_reward": 0.75,
        "pass_at_k": {"1": 0.75, "4": 1.0}, "pass_hat_k": {"1": 0.75, "4": 0.5}, "complete": False,
        "status_counts": {"succeeded": 6, "max_turns": 1}, "fatal_error": None, "rcp_logged": False,
        "target_accuracy": 0.69, "target_reached": False, "checkpoint_step": 18, "checkpoint_timestamp_ms": None,
        "samples_count": 4608,
    }  # fmt: skip
    assert {key: summary[key] for key in wanted} == wanted


def make_task(task_id):
    return Task(
        id=task_id, family="f", split="validation", image="i", base_commit="", problem_statement="p", workspace={},
        visible_tests=(), hidden_tests=(), fail_to_pass=(), pass_to_pass=(), gold_patch="",
    )  # fmt: skip


def trajectory(task_id, index, reward: float | None = 1.0, status=OK):
    n = np.zeros(0, np.int32)
    return Trajectory(
        task_id=task_id, sample_index=index, tokens=n, sampled=n.astype(bool), behaviour_logprobs=n.astype(np.float32),
        weights_versions=n, status=status, reward=reward,
    )  # fmt: skip


def test_attempts_are_told_apart_by_their_number():
    tasks = [make_task("a"), make_task("b")]
    attempts = {"a": [trajectory("a", 2, 0.0), trajectory("a", 0)]}
    first, second = outcomes_of(tasks, attempts, 3)
    assert first.rewards == (1.0, None, 0.0)
    assert first.statuses == (OK, None, OK)
    assert second.rewards == (None, None, None)
    for wrong in (
        {"c": []},
        {"a": [trajectory("a", 3)]},
        {"a": [trajectory("a", 1), trajectory("a", 1)]},
        {"a": [trajectory("b", 1)]},
    ):
        with pytest.raises(SwerveError):
            outcomes_of(tasks, wrong, 3)
    timed_out = trajectory("a", 0, None, EpisodeStatus.AGENT_TIMEOUT)
    assert outcomes_of(tasks[:1], {"a": [timed_out]}, 1)[0].rewards == (None,)
    with pytest.raises(SwerveError, match="other than 4 attempts"):
        EvalReport(outcomes=(first,), attempts_per_instance=4)


class NoPolicy:
    """Every episode fails at its very start, so that nothing else is needed."""

    context_length = 8

    async def open(self, session_id, seed):
        raise MachineError("no engine")


@pytest.fixture
def roles():
    nothing: Any = None
    return EpisodeRoles(policy=NoPolicy(), pool=nothing, environment=nothing, grader=nothing, renderer=nothing)


def test_an_evaluation_in_which_everything_fails_is_a_report(roles):
    tasks = [make_task("a"), make_task("b")]
    seen = []
    evaluated = asyncio.run(
        evaluate(tasks, 2, roles=roles, settings=EpisodeSettings(), seed=0, retries=1, on_progress=seen.append)
    )
    assert (evaluated.expected_attempts, evaluated.error_attempts, evaluated.complete) == (4, 4, False)
    assert evaluated.summary()["status_counts"] == {"error": 4}
    assert len(seen) == 8
    assert [o.task_id for o in evaluated.outcomes] == ["a", "b"]


def test_an_evaluation_needs_distinct_tasks(roles):
    for tasks in ([], [make_task("a"), make_task("a")]):
        with pytest.raises(SwerveError):
            asyncio.run(evaluate(tasks, 1, roles=roles, settings=EpisodeSettings(), seed=0))
