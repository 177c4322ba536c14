import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swerve.evaluation import pass_at_k, pass_hat_k, standard_error
from swerve.types import SwerveError


def test_one_success_in_four_is_a_pass():
    assert pass_at_k(4, 1, 4) == 1.0  # a bootstrap with replacement says 0.684
    assert pass_at_k(4, 0, 4) == 0.0
    assert pass_at_k(4, 1, 1) == 0.25
    assert pass_hat_k(4, 3, 4) == 0.0
    assert pass_hat_k(4, 4, 4) == 1.0


@pytest.mark.parametrize(("n", "k"), [(2, 5), (3, 4), (0, 1), (4, 0), (4, -1)])
def test_fewer_attempts_than_k_are_an_error(n, k):
    with pytest.raises(SwerveError, match="attempts per task"):
        pass_at_k(n, 0, k)
    with pytest.raises(SwerveError, match="attempts per task"):
        pass_hat_k(n, 0, k)


def test_impossible_counts_are_an_error():
    for resolved in (-1, 5):
        with pytest.raises(SwerveError):
            pass_at_k(4, resolved, 1)


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.data())
def test_the_estimators_are_means_over_all_draws(resolved, data):
    k = data.draw(st.integers(1, len(resolved)))
    draws = list(itertools.combinations(resolved, k))
    n, c = len(resolved), sum(resolved)
    assert pass_at_k(n, c, k) == pytest.approx(float(Fraction(sum(map(any, draws)), len(draws))), abs=1e-15)
    assert pass_hat_k(n, c, k) == pytest.approx(float(Fraction(sum(map(all, draws)), len(draws))), abs=1e-15)


@given(st.integers(1, 60), st.data())
def test_bounds(n, data):
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    assert 0.0 <= pass_hat_k(n, c, k) <= c / n + 1e-12 <= pass_at_k(n, c, k) + 2e-12 <= 1.0 + 2e-12
    assert pass_at_k(n, c, 1) == pytest.approx(c / n)


def test_standard_error():
    assert standard_error([]) == standard_error([0.5]) == 0.0
    assert standard_error([0.0, 1.0]) == pytest.approx(0.5)
