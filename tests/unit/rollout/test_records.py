import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from swerve.rollout import (
    read_trajectories,
    rollout_metrics,
    tool_call_warning,
    trajectory_from_json,
    trajectory_to_json,
    trajectory_to_line,
    write_trajectories,
)
from swerve.types import EpisodeStatus, MachineError, SwerveError, Trajectory, Turn

TURNS = st.lists(
    st.builds(
        Turn,
        text=st.text(max_size=20),
        tool_names=st.lists(st.sampled_from(["think", "finish"]), max_size=2).map(tuple),
        num_malformed_calls=st.integers(0, 3),
        observations=st.lists(st.text(max_size=9), max_size=2).map(tuple),
        num_repeated_failures=st.integers(0, 2),
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
    line = trajectory_to_line(trajectory)
    assert line.count("\n") == 1
    identical(trajectory_from_json(json.loads(line)), trajectory)


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
    path.write_text(trajectory_to_line(example()) + json.dumps(record) + "\n")
    with pytest.raises(SwerveError, match=rf"t\.jsonl:2: key {key}: .*{complaint}"):
        list(read_trajectories(path))


def test_files_grow_and_are_read_back(tmp_path):
    path = tmp_path / "t.jsonl"
    write_trajectories(path, [example(), example(sample_index=1)])
    write_trajectories(path, [example(sample_index=2)])
    assert [t.sample_index for t in read_trajectories(path)] == [0, 1, 2]
    with path.open("a") as file:
        file.write('{"torn": ')
    with pytest.raises(SwerveError, match=r"t\.jsonl:4: is no JSON"):
        list(read_trajectories(path))
    with pytest.raises(SwerveError, match="cannot read"):
        list(read_trajectories(tmp_path / "none.jsonl"))
    with pytest.raises(MachineError, match="cannot write"):
        write_trajectories(tmp_path / "no" / "t.jsonl", [example()])


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
