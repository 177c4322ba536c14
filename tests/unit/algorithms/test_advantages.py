"""Hand-computed values of every advantage estimator."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swerve.algorithms import (
    ADVANTAGE_ESTIMATORS,
    group_advantages,
    group_mean_advantages,
    group_std_advantages,
    leave_one_out_advantages,
    rloo_advantages,
)


@pytest.mark.parametrize(
    ("successes", "success", "failure"),
    [(1, 1.0, -0.2582), (2, 3.615, -0.379), (8, 1.033, -1.033), (15, 0.2582, -1.0)],
)
def test_leave_one_out_of_sixteen(successes: int, success: float, failure: float) -> None:
    rewards = [1.0] * successes + [0.0] * (16 - successes)
    advantages = leave_one_out_advantages(rewards)
    np.testing.assert_allclose(advantages[:successes], success, atol=5e-4)
    np.testing.assert_allclose(advantages[successes:], failure, atol=5e-4)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_leave_one_out_of_equal_rewards_is_zero(reward: float) -> None:
    assert not leave_one_out_advantages([reward] * 16).any()


def test_a_lone_success_is_not_divided_by_epsilon() -> None:
    np.testing.assert_allclose(leave_one_out_advantages([1, 0, 0, 0]), [1, -0.577, -0.577, -0.577], atol=5e-4)


def test_equal_others_have_no_deviation_even_where_their_mean_is_rounded() -> None:
    advantages = leave_one_out_advantages([1.0, 0.1, 0.1, 0.1])
    assert advantages[0] == pytest.approx(0.9)


def test_the_formula_term_by_term() -> None:
    rewards = np.array([0.2, 1.0, 0.5, 0.9, 0.0])
    expected = []
    for i in range(5):
        others = np.delete(rewards, i)
        sigma = np.sqrt((np.mean(others**2) - others.mean() ** 2) * 4 / 3)
        expected.append((rewards[i] - others.mean()) / (sigma + 1e-6))
    np.testing.assert_allclose(leave_one_out_advantages(rewards), expected, rtol=1e-6)


def test_small_groups() -> None:
    np.testing.assert_array_equal(leave_one_out_advantages([1.0, 0.0]), [1.0, -1.0])
    for estimator in ADVANTAGE_ESTIMATORS.values():
        np.testing.assert_array_equal(estimator([1.0]), [0.0])
        assert estimator([]).shape == (0,)


def test_mean_and_deviation_use_the_whole_group() -> None:
    np.testing.assert_allclose(group_std_advantages([0, 1, 1, 1]), [-1.5, 0.5, 0.5, 0.5], atol=1e-5)
    assert not group_std_advantages([0.3, 0.3]).any()


def test_baselines_without_deviation() -> None:
    np.testing.assert_allclose(rloo_advantages([1, 0, 0, 0]), [1, -1 / 3, -1 / 3, -1 / 3], rtol=1e-6)
    np.testing.assert_allclose(group_mean_advantages([1, 0, 0, 0]), [0.75, -0.25, -0.25, -0.25], rtol=1e-6)


def test_an_attempt_without_a_verdict_enters_no_baseline() -> None:
    advantages = group_advantages([1.0, None, 0.0, 0.0, None, 0.0])
    np.testing.assert_allclose(advantages, [1, 0, -0.577, -0.577, 0, -0.577], atol=5e-4)
    assert advantages.dtype == np.float32


def test_a_group_without_verdicts_has_no_advantages() -> None:
    assert not group_advantages([None, None]).any()


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=3, max_size=32), st.integers(0, 31))
def test_estimators_do_not_depend_on_order(rewards: list[float], shift: int) -> None:
    for estimator in ADVANTAGE_ESTIMATORS.values():
        rolled = estimator(np.roll(rewards, shift))
        np.testing.assert_allclose(rolled, np.roll(estimator(rewards), shift), atol=1e-6)


@given(st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=16))
def test_advantages_are_finite_and_signed_like_the_rewards(rewards: list[float]) -> None:
    for estimator in ADVANTAGE_ESTIMATORS.values():
        advantages = estimator(rewards)
        assert np.isfinite(advantages).all()
        assert advantages[int(np.argmax(rewards))] >= -1e-6
