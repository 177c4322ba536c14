"""Groups and batches: who is in, and what the numbers mean. No model."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from swerve.config.schema import Algorithm
from swerve.trainer import TrainingBatch, make_batch, make_group
from swerve.trainer.objective import Scored, micro_batch_objective
from swerve.types import EpisodeStatus, Group, SwerveError, Trajectory, Turn

from .samples import CONTEXT, make_groups, make_trajectory


def batch_of(groups: list[Group], version: int = 0, **algorithm: object) -> TrainingBatch:
    return make_batch(
        groups,
        algorithm=Algorithm(**algorithm),  # pyright: ignore[reportArgumentType]
        context_length=CONTEXT,
        row_length=CONTEXT,
        rows_per_micro_batch=2,
        weights_version=version,
    )


def test_an_attempt_without_a_verdict_is_in_no_baseline_and_no_row() -> None:
    failed = make_trajectory("t0", 9, 12, status=EpisodeStatus.ERROR, reward_is_none=True)
    attempts = [make_trajectory("t0", i, 12, reward=float(i == 0)) for i in range(4)]
    group = make_group([attempts[0], failed, *attempts[1:]])
    np.testing.assert_allclose(group.advantages, [1, 0, -0.577, -0.577, -0.577], atol=1e-3)
    batch = batch_of([group])
    assert (batch.stats.num_sequences, batch.stats.num_invalid, batch.stats.reward_mean) == (4, 1, 0.25)
    packed = {int(i) for m in batch.packed.micro_batches for i in np.unique(m.sequence_ids)} - {-1}
    assert packed == {0, 1, 2, 3}


def test_groups_are_of_one_task_and_status_and_reward_agree() -> None:
    with pytest.raises(SwerveError, match="not at 2: a, b"):
        make_group([make_trajectory("a", 0, 8), make_trajectory("b", 1, 8)])
    with pytest.raises(SwerveError, match="not at 0"):
        make_group([])
    with pytest.raises(SwerveError, match="status ERROR and reward 1"):
        make_group([make_trajectory("a", 1, 8, status=EpisodeStatus.ERROR)])
    with pytest.raises(SwerveError, match="status SUCCEEDED and reward None"):
        make_group([make_trajectory("a", 1, 8, reward_is_none=True)])


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        ("rloo", [1, -1 / 3, -1 / 3, -1 / 3]),
        ("group_mean", [0.75, -0.25, -0.25, -0.25]),
        ("group_std", [1.5] + [-0.5] * 3),
    ],
)
def test_the_recipes_estimators_are_known(advantage: str, expected: list[float]) -> None:
    group = make_group([make_trajectory("t", i, 8, reward=float(i == 0)) for i in range(4)], advantage)
    np.testing.assert_allclose(group.advantages, expected, atol=1e-5)


def test_staleness_is_counted_from_the_oldest_token() -> None:
    def aged(index: int, first: int, last: int) -> object:
        base = make_trajectory("t", index, 12)
        versions = np.where(base.sampled, last, -1).astype(np.int32)
        versions[np.flatnonzero(base.sampled)[0]] = first
        return dataclasses.replace(base, weights_versions=versions)

    group = make_group([aged(0, 5, 5), aged(1, 4, 5), aged(2, 4, 4)])  # pyright: ignore[reportArgumentType]
    stats = batch_of([group], version=5).stats
    assert stats.staleness_histogram == (1, 2)
    assert (stats.staleness_mean, stats.staleness_max) == (pytest.approx(2 / 3), 1)
    with pytest.raises(SwerveError, match="version 5 to 5, but version 4 is being trained"):
        batch_of([group], version=4)


def test_shares_of_tools_truncation_and_signal() -> None:
    def turn(names: tuple[str, ...], malformed: int = 0) -> Turn:
        return Turn(text="", tool_names=names, num_malformed_calls=malformed, observations=())

    attempts = [
        make_trajectory("t", 0, 10, turns=(turn(("a", "b")), turn((), 1))),
        make_trajectory("t", 1, 20, turns=(turn(()),)),
        make_trajectory("t", 2, 30, turns=(turn(("a",)),), status=EpisodeStatus.MAX_CONTEXT_LIMIT_REACHED),
        make_trajectory("t", 3, 20, turns=(), status=EpisodeStatus.MAX_TURNS),
    ]
    even = [make_trajectory("u", i, 10, reward=1.0, turns=()) for i in range(4)]
    stats = batch_of([make_group(attempts), make_group(even)]).stats
    assert stats.tool_call_share == 2 / 8
    assert stats.malformed_call_share == 1 / 4
    assert stats.truncation_share == stats.max_turns_share == 1 / 8
    assert stats.signal_share == 0.5
    assert stats.turns_mean == 4 / 8
    assert (stats.length_mean, stats.length_max) == (15.0, 30)


def test_the_overlong_filter_can_be_off() -> None:
    group = make_group([make_trajectory("t", i, CONTEXT) for i in range(3)])
    assert batch_of([group]).stats.kept_overlong_share == 0
    off = batch_of([group], overlong_filter=False)
    assert off.stats.kept_overlong_share == 1
    assert sum(m.loss_mask.sum() for m in off.packed.micro_batches) > 0


def test_ten_kept_beside_ninety_masked_are_divided_by_ten() -> None:
    """The longer attempt fills the context: its tokens leave numerator and denominator together."""

    def attempt(index: int, length: int) -> Trajectory:
        base = make_trajectory("t", index, length, behaviour_logprobs=np.full(length, -1.0, np.float32))
        sampled = np.arange(length) > 0
        return dataclasses.replace(base, sampled=sampled, weights_versions=np.where(sampled, 0, -1).astype(np.int32))

    group = Group(task_id="t", trajectories=(attempt(0, 11), attempt(1, 91)), advantages=np.array([2, 7], np.float32))
    batch = make_batch(
        [group], algorithm=Algorithm(), context_length=91, row_length=91, rows_per_micro_batch=2, weights_version=0
    )
    (micro,) = batch.packed.micro_batches
    same = jnp.asarray(micro.behaviour_logprobs)
    scored = Scored(
        same, same, None, same, jnp.asarray(micro.advantages), jnp.asarray(micro.loss_mask),
        jnp.asarray(micro.segment_ids),
    )  # fmt: skip
    numerator, sums = micro_batch_objective(Algorithm(), scored, 91)
    assert (float(sums.denominator), int(sums.num_tokens), int(sums.num_sequences)) == (10.0, 10, 1)
    assert float(numerator / sums.denominator) == -2.0


def test_a_length_counts_the_masked_stretches_between_turns() -> None:
    sampled = np.array([0, 0, 1, 1, 0, 0, 0, 1, 1, 0, 1, 0], bool)
    versions = np.where(sampled, 0, -1).astype(np.int32)
    attempts = [make_trajectory("t", index, 12, sampled=sampled, weights_versions=versions) for index in range(3)]
    batch = batch_of([make_group(attempts)])
    assert (batch.stats.length_mean, batch.stats.length_max, batch.stats.sampled_tokens_mean) == (12.0, 12, 5.0)
    placed = np.concatenate([micro.sequence_ids.ravel() for micro in batch.packed.micro_batches])
    mask = np.concatenate([micro.loss_mask.ravel() for micro in batch.packed.micro_batches])
    for index in range(3):
        np.testing.assert_array_equal(mask[placed == index], sampled)


def test_a_longer_sequence_gets_longer_rows_and_fewer_of_them() -> None:
    def shape(*lengths: int) -> tuple[int, ...]:
        group = make_group([make_trajectory("t", i, length) for i, length in enumerate(lengths)])
        batch = make_batch(
            [group], algorithm=Algorithm(), context_length=CONTEXT, row_length=8, rows_per_micro_batch=8, least_rows=2,
            weights_version=0,
        )  # fmt: skip
        return batch.packed.micro_batches[0].tokens.shape

    assert shape(8, 5, 4) == (8, 8)
    assert shape(9, 5, 4) == (4, 16)
    assert shape(17, 5, 4) == (2, 32)
    assert shape(32, 5, 4) == (2, 32)


def test_a_batch_without_a_valid_sample_is_refused() -> None:
    failed = make_trajectory("t0", 0, 12, status=EpisodeStatus.AGENT_TIMEOUT, reward_is_none=True)
    with pytest.raises(SwerveError, match="no valid sample"):
        batch_of([make_group([failed, failed])])


def test_an_advantage_that_is_not_finite_is_refused() -> None:
    group = dataclasses.replace(make_groups(1)[0], advantages=np.array([0, np.nan, 0, 0], np.float32))
    with pytest.raises(SwerveError, match="attempt 1 at task t0 has advantage nan"):
        batch_of([group])


def test_statistics_cover_the_batch() -> None:
    groups = make_groups(2)
    stats = batch_of(groups).stats
    advantages = np.concatenate([group.advantages for group in groups])
    assert stats.advantage_mean == pytest.approx(advantages.mean(), abs=1e-6)
    assert stats.advantage_std == pytest.approx(advantages.std(), rel=1e-5)
    assert (stats.advantage_min, stats.advantage_max) == (advantages.min(), advantages.max())
    assert stats.num_slots == stats.num_micro_batches * 2 * CONTEXT
    assert stats.padding_share == pytest.approx(1 - stats.num_real_tokens / stats.num_slots)
    assert stats.num_groups == 2
