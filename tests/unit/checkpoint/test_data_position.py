"""The order of tasks: endless, repeatable, resumable at any place."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swerve.checkpoint import DataPosition
from swerve.types import SwerveError


def test_three_tasks_last_for_ten_steps() -> None:
    position, seen = DataPosition(num_tasks=3), []
    for _ in range(10):
        taken, position = position.take(2)
        seen += taken
    assert seen == [0, 1, 2] * 6 + [0, 1]
    assert position.epoch == 6


def test_a_boundary_between_rounds_resumes_with_work_to_do() -> None:
    _, position = DataPosition(num_tasks=4).take(4)
    assert position.epoch == 1
    assert position.take(2)[0] == (0, 1)


@given(st.integers(1, 12), st.lists(st.integers(0, 9), max_size=8), st.sampled_from([None, 0, 7]), st.integers(0, 7))
def test_a_resumed_run_takes_the_next_tasks(
    num_tasks: int, counts: list[int], seed: int | None, stop_after: int
) -> None:
    straight, position = [], DataPosition(num_tasks=num_tasks, shuffle_seed=seed)
    for count in counts:
        taken, position = position.take(count)
        straight += taken
    resumed, position = [], DataPosition(num_tasks=num_tasks, shuffle_seed=seed)
    for step, count in enumerate(counts):
        if step == stop_after:
            position = DataPosition.from_json(json.loads(json.dumps(position.to_json())))
        taken, position = position.take(count)
        resumed += taken
    assert resumed == straight
    for start in range(0, len(straight) - num_tasks + 1, num_tasks):
        assert sorted(straight[start : start + num_tasks]) == list(range(num_tasks))


def test_rounds_are_shuffled_differently() -> None:
    first, position = DataPosition(num_tasks=20, shuffle_seed=3).take(20)
    second, _ = position.take(20)
    assert first != second
    assert first == DataPosition(num_tasks=20, shuffle_seed=3).take(20)[0]
    assert first != DataPosition(num_tasks=20, shuffle_seed=4).take(20)[0]


def test_what_is_no_position_is_refused() -> None:
    with pytest.raises(SwerveError, match="holds no task"):
        DataPosition(num_tasks=0)
    with pytest.raises(SwerveError, match="shuffle_seed"):
        DataPosition.from_json({"num_tasks": 1, "num_taken": 0})
