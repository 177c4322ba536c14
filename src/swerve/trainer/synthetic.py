"""Trajectories of the shape of a real run, drawn from a seed: for benches, comparisons and rehearsals without rollouts.

Each begins with a prompt, then turns that were sampled alternate with observations that were not, and the last turn
was sampled. Lengths follow a gamma distribution, cut at the context.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from swerve.trainer.batch import make_group
from swerve.types import EpisodeStatus, Group, Trajectory, Turn

_SPREAD = 4.0  # shape of the gamma distribution: lengths spread by half their mean


@dataclass(frozen=True, kw_only=True, slots=True)
class SyntheticShape:
    """How long sequences are.

    The defaults are the shares of a real run of the benchmark: 5.7k tokens trained on, of 25k in all, in a context of
    65,536.

    Attributes:
        context_length: Tokens of a sequence at most.
        total_share: Mean length, as a share of the context.
        sampled_share: Mean number of sampled tokens, as a share of the context.
        num_turns: Turns of a sequence, fewer where it is too short.
    """

    context_length: int
    total_share: float = 0.39
    sampled_share: float = 0.087
    num_turns: int = 8


def synthetic_lengths(shape: SyntheticShape, count: int, seed: int) -> np.ndarray:
    """Draw lengths.

    Args:
        shape: How long.
        count: How many.
        seed: Draws alike give lengths alike.

    Returns:
        int64 `[count]`, each from 4 to the context length.
    """
    rng = np.random.default_rng([seed, 1])
    mean = shape.total_share * shape.context_length
    return np.clip(rng.gamma(_SPREAD, mean / _SPREAD, count).round(), 4, shape.context_length).astype(np.int64)


def synthetic_groups(
    shape: SyntheticShape, num_groups: int, group_size: int, *, vocab_size: int, seed: int, version: int = 0
) -> list[Group]:
    """Draw groups of graded trajectories.

    Args:
        shape: How long sequences are.
        num_groups: Tasks.
        group_size: Attempts at each, at least 3; in every group some succeed and some fail.
        vocab_size: Tokens and behaviour log-probabilities are those of a policy that is close to uniform.
        seed: Draws alike give groups alike.
        version: Weights that sampled them.

    Returns:
        The groups, with leave-one-out advantages.
    """
    lengths = synthetic_lengths(shape, num_groups * group_size, seed).reshape(num_groups, group_size)
    rng = np.random.default_rng([seed, 2])
    groups = []
    for number, of_group in enumerate(lengths):
        rewards = rng.permutation(np.arange(group_size) < rng.integers(1, group_size))
        attempts = [
            _trajectory(
                f"synthetic-{seed}-{number}", index, int(length), float(reward), shape, vocab_size, version, rng
            )
            for index, (length, reward) in enumerate(zip(of_group, rewards, strict=True))
        ]
        groups.append(make_group(attempts))
    return groups


def with_random_advantages(groups: Sequence[Group], seed: int) -> list[Group]:
    """The groups with normal advantages instead of earned ones, none of them 0: so no sequence hides an error.

    Args:
        groups: Of any size.
        seed: Draws alike give advantages alike.
    """
    rng = np.random.default_rng([seed, 3])
    return [replace(group, advantages=rng.normal(size=len(group.trajectories)).astype(np.float32)) for group in groups]


def _trajectory(
    task: str,
    index: int,
    length: int,
    reward: float,
    shape: SyntheticShape,
    vocab_size: int,
    version: int,
    rng: np.random.Generator,
) -> Trajectory:
    sampled = _turns(length, shape, rng)
    logprobs = rng.normal(-math.log(vocab_size), 0.1, length)
    num_turns = int((np.diff(sampled.astype(np.int8)) == 1).sum())
    return Trajectory(
        task_id=task,
        sample_index=index,
        tokens=rng.integers(0, vocab_size, length).astype(np.int32),
        sampled=sampled,
        behaviour_logprobs=np.where(sampled, logprobs, 0.0).astype(np.float32),
        weights_versions=np.where(sampled, version, -1).astype(np.int32),
        status=EpisodeStatus.SUCCEEDED,
        reward=reward,
        turns=(Turn(text="", tool_names=("execute_bash",), num_malformed_calls=0, observations=()),) * num_turns,
    )


def _turns(length: int, shape: SyntheticShape, rng: np.random.Generator) -> np.ndarray:
    """Mask of a sequence's sampled tokens, bool `[length]`: false at first, true at last."""
    num_turns = min(shape.num_turns, length // 2)
    mean = shape.sampled_share / shape.total_share * length
    num_sampled = int(np.clip(round(mean), num_turns, length - num_turns))
    mask = np.zeros(length, np.bool_)
    given, drawn = _parts(length - num_sampled, num_turns, rng), _parts(num_sampled, num_turns, rng)
    ends = np.cumsum(given + drawn)
    for end, size in zip(ends, drawn, strict=True):
        mask[end - size : end] = True
    return mask


def _parts(total: int, count: int, rng: np.random.Generator) -> np.ndarray:
    """Positive integers, `count` of them, that add up to `total`."""
    return 1 + rng.multinomial(total - count, rng.dirichlet(np.full(count, 2.0)))
