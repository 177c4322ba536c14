"""A trajectory written down and read again is the same, bit for bit."""

import dataclasses

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from swerve.telemetry import TrajectoryLog, read_trajectories
from swerve.telemetry.trajectories import parse_trajectory, trajectory_record
from swerve.types import EpisodeStatus, Trajectory, Turn


def make(sampled, logprobs, versions, **changes):
    mask = np.asarray(sampled, np.bool_)
    values = {
        "task_id": "t/1",
        "sample_index": 3,
        "tokens": np.arange(mask.size, dtype=np.int32),
        "sampled": mask,
        "behaviour_logprobs": np.where(mask, np.asarray(logprobs, np.float32), np.float32(0)),
        "weights_versions": np.where(mask, np.asarray(versions, np.int32), -1).astype(np.int32),
        "status": EpisodeStatus.SUCCEEDED,
        "reward": 1.0,
        "turns": (Turn(text="<tool_call>", tool_names=("finish",), num_malformed_calls=1, observations=("ok",)),),
        "test_statuses": {"test_a": "passed"},
        "seconds": {"generate": 0.5},
        "seed": 7,
    }
    return Trajectory(**{**values, **changes})


def same(left, right):
    for field in dataclasses.fields(Trajectory):
        one, two = getattr(left, field.name), getattr(right, field.name)
        if isinstance(one, np.ndarray):
            assert one.dtype == two.dtype, field.name
            np.testing.assert_array_equal(one, two)
        else:
            assert one == two, field.name


token = st.tuples(st.booleans(), st.floats(-50, 0, width=32), st.integers(0, 3))


@given(st.lists(token, max_size=30))
def test_any_trajectory_survives(tokens):
    sampled, logprobs, versions = zip(*tokens, strict=True) if tokens else ((), (), ())
    trajectory = make(sampled, logprobs, versions)
    same(parse_trajectory(trajectory_record(trajectory)), trajectory)


def test_a_log_is_resumed_at_its_step(tmp_path):
    path = tmp_path / "t.jsonl"
    good = make([True], [-0.5], [0])
    failed = make([False], [0.0], [-1], status=EpisodeStatus.ERROR, reward=None, error="sandbox died")
    log = TrajectoryLog(path)
    log.append(0, "evaluation", [good])
    log.append(1, "train", [good, failed])
    log.append(2, "train", [good])
    log.close()
    TrajectoryLog(path, resume_step=1).close()
    read = list(read_trajectories(path))
    assert [step for step, _ in read] == [0, 1, 1]
    same(read[2][1], failed)
    assert [step for step, _ in read_trajectories(path, purposes=["train"])] == [1, 1]
