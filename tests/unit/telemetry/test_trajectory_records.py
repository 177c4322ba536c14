import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swerve.telemetry import TrajectoryLog, read_trajectories, trajectory_from_json, trajectory_to_json
from swerve.types import EpisodeStatus, OutsideRequests, SwerveError, Trajectory, Turn

TURNS = st.lists(
    st.builds(
        Turn,
        text=st.text(max_size=20),
        tool_names=st.lists(st.sampled_from(["think", "finish"]), max_size=2).map(tuple),
        num_malformed_calls=st.integers(0, 3),
        observations=st.lists(st.text(max_size=9), max_size=2).map(tuple),
        num_repeated_failures=st.integers(0, 2),
        no_call=st.booleans(),
    ),
    max_size=3,
).map(tuple)


@st.composite
def trajectories(draw):
    n = draw(st.integers(0, 12))
    sampled = draw(hnp.arrays(np.bool_, n))
    logprobs = draw(hnp.arrays(np.uint32, n)).view(np.float32)  # any bits, NaN payloads included
    versions = draw(hnp.arrays(np.int32, n, elements=st.integers(0, 3)))
    routing = draw(st.none() | hnp.arrays(np.int16, (n, 2, 2)))
    return Trajectory(
        task_id=draw(st.text(max_size=5)),
        sample_index=draw(st.integers(0, 99)),
        tokens=draw(hnp.arrays(np.int32, n)),
        sampled=sampled,
        behaviour_logprobs=np.where(sampled, logprobs.view(np.uint32), 0).astype(np.uint32).view(np.float32),
        weights_versions=np.where(sampled, versions, -1).astype(np.int32),
        status=draw(st.sampled_from(EpisodeStatus)),
        reward=draw(st.sampled_from([None, 0.0, 1.0])),
        turns=draw(TURNS),
        routing=routing,
        error=draw(st.text(max_size=9)),
        test_statuses=draw(st.dictionaries(st.text(max_size=4), st.text(max_size=4), max_size=2)),
        seconds={"generate": draw(st.floats(0, 1e6))},
        seed=draw(st.integers(0, 2**31 - 1)),
        requests=draw(st.none() | st.builds(OutsideRequests, num_answered=st.integers(0, 9))),
    )


def identical(one, two):
    for name in Trajectory.__dataclass_fields__:
        left, right = getattr(one, name), getattr(two, name)
        if isinstance(left, np.ndarray):
            assert (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes()), name
        else:
            assert left == right, name


@settings(deadline=None)
@given(trajectories())
def test_a_trajectory_survives_to_the_last_bit(trajectory):
    identical(trajectory_from_json(json.loads(json.dumps(trajectory_to_json(trajectory)))), trajectory)


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


def test_the_form_is_compact():
    record = trajectory_to_json(example())
    assert record["sampled"] == [2, 2, 1, 1]
    assert record["weights_versions"] == [[4, 2], [5, 1]]
    assert record["status"] == "succeeded"


def test_what_contradicts_itself_is_not_written():
    for changes in (
        {"sampled": np.ones(5, np.bool_)},
        {"behaviour_logprobs": np.full(6, -1, np.float32)},
        {"weights_versions": np.zeros(6, np.int32)},
    ):
        with pytest.raises(ValueError, match="trajectory of t"):
            trajectory_to_json(example(**changes))


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("reward", ..., "is missing"),
        ("turns", ..., "is missing"),
        ("extra", 1, "is unknown"),
        ("sampled", [2, 2], "covers 4 tokens, there are 6"),
        ("sampled", [2, -2], ""),
        ("behaviour_logprobs", "AAAA", ""),
        ("behaviour_logprobs", "!", ""),
        ("weights_versions", [[4, 2]], ""),
        ("status", "fine", "fine"),
        ("tokens", [2**40], ""),
        ("turns", [{"text": ""}], "a turn has the keys"),
        ("routing", {"shape": [5, 1, 1], "data": ""}, "expected"),
        ("routing", {"shape": [6, 1, 1], "data": "AAAA"}, ""),
    ],
)
def test_a_broken_record_names_file_line_and_key(tmp_path, key, value, complaint):
    record = trajectory_to_json(example())
    if value is ...:
        del record[key]
    else:
        record[key] = value
    path = tmp_path / "t.jsonl"
    lines = [trajectory_to_json(example()), record]
    path.write_text("".join(json.dumps({"step": 1, "purpose": "train", **line}) + "\n" for line in lines))
    with pytest.raises(SwerveError, match=rf"t\.jsonl:2: key {key}: .*{complaint}"):
        list(read_trajectories(path))


def test_a_log_is_resumed_at_its_step(tmp_path):
    path = tmp_path / "t.jsonl"
    failed = example(status=EpisodeStatus.ERROR, reward=None, error="sandbox died")
    log = TrajectoryLog(path)
    log.append(0, "evaluation", [example()])
    log.append(1, "train", [example(), failed])
    log.append(2, "train", [example()])
    log.close()
    TrajectoryLog(path, resume_step=1).close()
    read = list(read_trajectories(path))
    assert [step for step, _ in read] == [0, 1, 1]
    identical(read[2][1], failed)
    assert [step for step, _ in read_trajectories(path, purposes=["train"])] == [1, 1]
