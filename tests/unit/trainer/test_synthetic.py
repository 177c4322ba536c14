"""Synthetic trajectories have the shape they are asked for, and are the same for the same seed."""

import numpy as np

from swerve.trainer import SyntheticShape, synthetic_groups, synthetic_lengths, with_random_advantages
from swerve.types import Trajectory

SHAPE = SyntheticShape(context_length=1024)


def trajectories(seed: int = 0) -> list[Trajectory]:
    groups = synthetic_groups(SHAPE, 6, 8, vocab_size=64, seed=seed)
    return [one for group in groups for one in group.trajectories]


def test_lengths_and_trained_shares_are_those_of_the_shape() -> None:
    lengths = synthetic_lengths(SyntheticShape(context_length=65_536), 1_152, seed=0)
    assert 22_000 < lengths.mean() < 29_000
    assert lengths.max() <= 65_536
    drawn = trajectories()
    sampled, total = sum(one.num_sampled_tokens for one in drawn), sum(one.tokens.size for one in drawn)
    assert abs(sampled / total - SHAPE.sampled_share / SHAPE.total_share) < 0.01


def test_turns_alternate_with_observations() -> None:
    for one in trajectories():
        starts = np.flatnonzero(np.diff(one.sampled.astype(int)) == 1)
        assert not one.sampled[0]
        assert one.sampled[-1]
        assert len(starts) == SHAPE.num_turns == len(one.turns)
        assert not one.behaviour_logprobs[~one.sampled].any()
        assert (one.weights_versions[one.sampled] == 0).all()


def test_every_group_has_successes_and_failures() -> None:
    for group in synthetic_groups(SHAPE, 20, 4, vocab_size=64, seed=3):
        assert group.advantages.min() < 0 < group.advantages.max()


def test_a_seed_is_all_there_is_to_it() -> None:
    same = [np.array_equal(a.tokens, b.tokens) for a, b in zip(trajectories(), trajectories(), strict=True)]
    other = [np.array_equal(a.tokens, b.tokens) for a, b in zip(trajectories(), trajectories(1), strict=True)]
    assert all(same)
    assert not any(other)
    groups = synthetic_groups(SHAPE, 2, 4, vocab_size=64, seed=0)
    first, second = (with_random_advantages(groups, seed=5) for _ in range(2))
    assert all(
        np.array_equal(a.advantages, b.advantages) and a.advantages.all() for a, b in zip(first, second, strict=True)
    )
