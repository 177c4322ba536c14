import numpy as np
import pytest

from swerve.rollout import rollout_metrics, tool_call_warning
from swerve.types import EpisodeStatus, Trajectory, Turn


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
