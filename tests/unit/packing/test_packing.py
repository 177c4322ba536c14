"""The packer: every token once, fixed shapes, no choice left to chance."""

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swerve.packing import fewest_rows, pack, plan_rows
from swerve.types import EpisodeStatus, SwerveError, Trajectory


def trajectory(length: int, index: int = 0, **changes: object) -> Trajectory:
    tokens = np.arange(1, length + 1, dtype=np.int32) + 100 * index
    sampled = np.arange(length) % 3 == 2
    base = Trajectory(
        task_id=f"task-{index}",
        sample_index=index,
        tokens=tokens,
        sampled=sampled,
        behaviour_logprobs=np.where(sampled, -0.5, 0.0).astype(np.float32),
        weights_versions=np.where(sampled, 0, -1).astype(np.int32),
        status=EpisodeStatus.SUCCEEDED,
        reward=1.0,
    )
    return dataclasses.replace(base, **changes)  # pyright: ignore[reportArgumentType]


def packed(lengths: list[int], row_length: int, rows: int, **options: object):
    trajectories = [trajectory(length, index) for index, length in enumerate(lengths)]
    advantages = np.arange(1, len(lengths) + 1, dtype=np.float32)
    return trajectories, pack(trajectories, advantages, row_length, rows, **options)  # pyright: ignore[reportArgumentType]


def test_first_fit_decreasing_by_hand() -> None:
    plan = plan_rows([3, 5, 4, 2, 7], 8)
    layout = [[(p.sequence, p.start) for p in row] for row in plan.rows]
    assert layout == [[(4, 0)], [(1, 0), (0, 5)], [(2, 0), (3, 4)]]


def test_padding_belongs_to_no_sequence() -> None:
    _, batch = packed([5, 3], 12, 1)
    micro = batch.micro_batches[0]
    assert micro.segment_ids.tolist() == [[1] * 5 + [2] * 3 + [0] * 4]
    assert micro.sequence_ids.tolist() == [[0] * 5 + [1] * 3 + [-1] * 4]
    assert micro.positions.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 0, 0, 0, 0]]
    assert micro.loss_mask.tolist() == [[0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0]]
    for name in ("tokens", "loss_mask", "advantages", "behaviour_logprobs"):
        assert not getattr(micro, name)[0, 8:].any()
    assert batch.stats.padding_share == pytest.approx(1 / 3)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=30), st.integers(40, 64), st.integers(1, 4))
def test_every_token_is_packed_once(lengths: list[int], row_length: int, rows: int) -> None:
    trajectories, batch = packed(lengths, row_length, rows)
    found = {index: 0 for index in range(len(lengths))}
    for micro in batch.micro_batches:
        assert micro.tokens.shape == (rows, row_length)
        for index, one in enumerate(trajectories):
            where = micro.sequence_ids == index
            if not where.any():
                continue
            found[index] += 1
            np.testing.assert_array_equal(micro.tokens[where], one.tokens)
            np.testing.assert_array_equal(micro.positions[where], np.arange(len(one.tokens)))
            np.testing.assert_array_equal(micro.loss_mask[where], one.sampled)
            np.testing.assert_array_equal(micro.behaviour_logprobs[where], one.behaviour_logprobs)
            assert (micro.advantages[where] == index + 1).all()
            assert len(set(micro.segment_ids[where])) == 1
        assert ((micro.segment_ids == 0) == (micro.sequence_ids == -1)).all()
    assert set(found.values()) == {1}
    assert batch.stats.num_real_tokens == sum(lengths)
    assert batch.stats.num_slots == len(batch.micro_batches) * rows * row_length
    # Neither way leaves two rows that would fit into one.
    fills = sorted(sum(p.length for p in row) for row in batch.plan.rows)
    assert len(fills) < 2 or fills[0] + fills[1] > row_length


def test_equal_lengths_are_packed_equally() -> None:
    lengths = list(np.random.default_rng(0).integers(1, 100, 200))
    assert plan_rows(lengths, 128) == plan_rows(lengths, 128)


def test_a_filtered_sequence_keeps_its_place_and_loses_its_mask() -> None:
    _, batch = packed([5, 6], 16, 1, keep=np.array([True, False]))
    micro = batch.micro_batches[0]
    assert micro.loss_mask[micro.sequence_ids == 1].sum() == 0
    assert micro.loss_mask[micro.sequence_ids == 0].sum() == 1
    assert (micro.tokens[micro.sequence_ids == 1] != 0).all()


def test_an_empty_batch_has_no_micro_batches() -> None:
    batch = pack([], np.zeros(0, np.float32), 8, 2)
    assert len(batch.micro_batches) == 0
    assert batch.stats.padding_share == 0


def test_micro_batches_are_a_sequence() -> None:
    _, batch = packed([8, 8, 8], 8, 1)
    assert len(batch.micro_batches[1:]) == 2
    np.testing.assert_array_equal(batch.micro_batches[-1].tokens, batch.micro_batches[2].tokens)
    with pytest.raises(IndexError):
        batch.micro_batches[3]


def test_routing_travels_with_its_tokens() -> None:
    routing = np.arange(2 * 3 * 2, dtype=np.int16).reshape(2, 3, 2)
    batch = pack([trajectory(2, routing=routing)], np.zeros(1, np.float32), 4, 1)
    carried = batch.micro_batches[0].routing
    assert carried is not None
    np.testing.assert_array_equal(carried[0, :2], routing)
    assert (carried[0, 2:] == -1).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "9 tokens, rows hold 1 to 8"),
        ({"status": EpisodeStatus.ERROR, "reward": None}, "ended with ERROR"),
        ({"behaviour_logprobs": np.zeros(3, np.float32)}, "3 behaviour_logprobs"),
        ({"sampled": np.ones(9, bool)}, "first token as sampled"),
        ({"routing": np.zeros((5, 1, 1), np.int16)}, "routing of shape"),
    ],
)
def test_what_cannot_be_packed_is_named(changes: dict[str, object], words: str) -> None:
    row_length = 8 if not changes else 16
    with pytest.raises(SwerveError, match="trajectory 3 of task task-3") as caught:
        pack([trajectory(9, 3, **changes)], np.zeros(1, np.float32), row_length, 1)
    assert words in str(caught.value)


def test_lengths_that_do_not_fit_are_refused_by_the_planner() -> None:
    with pytest.raises(SwerveError, match="sequence 1 has 9 tokens"):
        plan_rows([4, 9], 8)
    with pytest.raises(SwerveError, match="sequence 0 has 0 tokens"):
        plan_rows([0, 4], 8)


def rows_by_trying_all(lengths: list[int], row_length: int) -> int:
    """Fewest rows, over every set of sequences: the least rows, and then the least of the last row, that hold it."""
    least: dict[int, tuple[int, int]] = {0: (1, 0)}
    for chosen in range(1, 1 << len(lengths)):
        found = []
        for index, length in enumerate(lengths):
            if chosen >> index & 1:
                rows, last = least[chosen & ~(1 << index)]
                found.append((rows, last + length) if last + length <= row_length else (rows + 1, length))
        least[chosen] = min(found)
    return least[(1 << len(lengths)) - 1][0]


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(60, 90))
def test_a_plan_lies_between_the_bound_and_the_best_of_few_sequences(lengths: list[int], row_length: int) -> None:
    best = rows_by_trying_all(lengths, row_length)
    planned = len(plan_rows(lengths, row_length).rows)
    assert -(-sum(lengths) // row_length) <= fewest_rows(lengths, row_length) <= best <= planned
    assert planned <= 11 / 9 * best + 1


def test_sequences_longer_than_half_a_row_share_none() -> None:
    assert fewest_rows([], 8) == 0
    assert fewest_rows([5, 5, 5], 8) == 3  # though 15 tokens would fit into two rows
    assert fewest_rows([5, 5, 3, 3, 4], 8) == 3


def test_rows_are_filled_where_first_fit_wastes_them() -> None:
    """First-fit decreasing gives 40 and 35 a row, 35, 30 and 30 another, and the last 30 a third."""
    lengths = [40, 35, 35, 30, 30, 30]
    assert fewest_rows(lengths, 100) == 2
    assert [sorted(lengths[p.sequence] for p in row) for row in plan_rows(lengths, 100).rows] == [
        [30, 30, 40],
        [30, 35, 35],
    ]


@pytest.mark.parametrize("count", [256, 512, 1024, 1152])
@pytest.mark.parametrize("spread", [0.3, 0.5, 0.8])
def test_a_step_is_packed_within_three_percent_of_the_best_and_fast(count: int, spread: float) -> None:
    rng = np.random.default_rng([count, round(10 * spread)])
    lengths = np.clip(rng.lognormal(10.1 - spread**2 / 2, spread, count), 500, 65536).astype(int).tolist()
    seconds = []
    for _ in range(3):  # the interpreter may choose to collect garbage in one of them
        start = time.process_time()
        plan = plan_rows(lengths, 65536)
        seconds.append(time.process_time() - start)
        assert len(plan.rows) <= 1.03 * fewest_rows(lengths, 65536)
    assert min(seconds) < 0.1
