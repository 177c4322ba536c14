import numpy as np
import pytest

from swerve.rollout import guard_notes, rollout_metrics, tool_call_warning
from swerve.types import EpisodeStatus, OutsideRequests, Trajectory, Turn


def example(**changes):
    fields = {
        "task_id": "t",
        "sample_index": 0,
        "tokens": np.arange(6, dtype=np.int32),
        "sampled": np.array([0, 0, 1, 1, 0, 1], np.bool_),
        "behaviour_logprobs": np.array([0, 0, -0.1, -0.2, 0, -0.3], np.float32),
        "weights_versions": np.array([-1, -1, 4, 4, -1, 5], np.int32),
        "status": EpisodeStatus.SUCCEEDED,
        "reward": 1.0,
    }
    return Trajectory(**{**fields, **changes})


def turn(names=(), malformed=0):
    return Turn(text="", tool_names=names, num_malformed_calls=malformed, observations=())


def test_a_collection_without_any_tool_call_warns():
    silent = [example(turns=(turn(), turn(malformed=2))), example(turns=(turn(),))]
    assert "none of 2 rollouts made a tool call (2 malformed" in (tool_call_warning(silent) or "")
    assert tool_call_warning([*silent, example(turns=(turn(("finish",)),))]) is None
    assert tool_call_warning([]) is None
    assert tool_call_warning([example(status=EpisodeStatus.ERROR, reward=None)]) is None  # it never came to a turn


def test_metrics_have_their_denominators():
    metrics = rollout_metrics(
        [
            example(turns=(turn(("think", "finish")), turn(malformed=1)), seconds={"generate": 2.0}),
            example(status=EpisodeStatus.MAX_TURNS, reward=0.0, turns=(turn(),) * 2),
            example(status=EpisodeStatus.ERROR, reward=None),
        ]
    )
    wanted = {
        "reward": 0.5, "num_trajectories": 3, "num_valid": 2, "num_turns": 2, "num_tokens": 6, "num_sampled_tokens": 3,
        "tool_call_rate": 0.25, "malformed_calls_per_turn": 0.25, "truncation_rate": 0.5, "status/error": 1,
        "status/succeeded": 1, "status/cancelled": 0, "seconds/generate": 2 / 3,
    }  # fmt: skip
    assert {name: metrics[name] for name in wanted} == pytest.approx(wanted)
    assert rollout_metrics([])["reward"] == 0.0
    assert not any(name.startswith("outside/") for name in metrics)


def test_guards_are_counted_and_said():
    quiet = Turn(text="hm", tool_names=(), num_malformed_calls=0, observations=(), no_call=True)
    again = Turn(text="", tool_names=("bash",), num_malformed_calls=1, observations=(), num_repeated_failures=2)
    asked = OutsideRequests(num_answered=3, num_dropped_answers=1, num_ignored_settings=4)
    trajectories = [example(turns=(quiet, again)), example(turns=(again, turn(("a",))), requests=asked)]
    metrics = rollout_metrics(trajectories)
    assert (metrics["no_call_rate"], metrics["repeated_failures_per_turn"]) == (0.25, 1.0)
    assert {name: value for name, value in metrics.items() if name.startswith("outside/")} == {
        "outside/answered": 3, "outside/repeated": 0, "outside/dropped_answers": 1, "outside/ignored_settings": 4,
        "outside/refused": 0, "outside/rewritten": 0,
    }  # fmt: skip
    assert guard_notes(trajectories) == [
        "2 malformed calls", "1 turns without a call", "4 repetitions of a failed call",
        "4 ignored settings of requests", "1 answers that the agent dropped",
    ]  # fmt: skip
    assert guard_notes([example(turns=(turn(("finish",)),))]) == []


def test_conversations_without_tools_do_not_warn_of_missing_calls():
    outside = example(turns=(turn(), turn()), requests=OutsideRequests(num_answered=2))
    assert tool_call_warning([outside]) is None
    silent = Turn(text="hm", tool_names=(), num_malformed_calls=0, observations=(), no_call=True)
    told = example(turns=(silent,), requests=OutsideRequests(num_answered=1))
    assert "none of 1 rollouts" in (tool_call_warning([told, outside]) or "")
