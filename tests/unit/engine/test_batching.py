"""Plans of a round."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swerve.engine.batching import (
    batch_size_for,
    check_sizes,
    default_batch_sizes,
    group_by_key,
    plan_chunks,
    smaller_batch_size,
)
from swerve.types import SwerveError


def test_default_sizes_halve() -> None:
    assert default_batch_sizes(256) == (32, 64, 128, 256)
    assert default_batch_sizes(24) == (12, 24)
    assert default_batch_sizes(1) == (1,)


def test_sizes_around_a_number() -> None:
    sizes = (8, 16, 32)
    assert [batch_size_for(n, sizes) for n in (1, 8, 9, 17, 32)] == [8, 8, 16, 32, 32]
    assert [smaller_batch_size(n, sizes) for n in sizes] == [0, 8, 16]


@pytest.mark.parametrize(("sizes", "largest"), [((), None), ((0, 4), None), ((2, 4), 8)])
def test_wrong_sizes_are_refused(sizes: tuple[int, ...], largest: int | None) -> None:
    with pytest.raises(SwerveError, match="batch_sizes"):
        check_sizes(sizes, largest, "batch_sizes")


@given(st.integers(0, 700), st.sets(st.sampled_from([1, 4, 16, 32, 64, 128, 256]), min_size=1))
def test_chunks_cover_with_no_chunk_to_spare(num_tokens: int, lengths: set[int]) -> None:
    plan = plan_chunks(num_tokens, tuple(sorted(lengths)))
    assert sum(plan) >= num_tokens
    assert not plan or sum(plan) - min(plan) < num_tokens
    assert list(plan) == sorted(plan, reverse=True)


def test_chunks_weigh_padding_against_calls() -> None:
    assert plan_chunks(0, (16, 64)) == ()
    assert plan_chunks(50, (16, 64)) == (64,)
    assert plan_chunks(40, (16, 64)) == (16, 16, 16)
    assert plan_chunks(70, (16, 64)) == (64, 16)
    assert plan_chunks(140, (16, 64)) == (64, 64, 16)


def test_groups_keep_order() -> None:
    assert group_by_key("abcab", ["x", "y", "x", "y", "z"]) == [["a", "c"], ["b", "a"], ["b"]]
