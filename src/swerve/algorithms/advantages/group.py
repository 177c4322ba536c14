"""Apply an estimator to a group in which some attempts have no reward.

An attempt without a verdict (infrastructure failed, time ran out) is absent: it enters no baseline and has advantage 0.
An attempt that a filter of the loss rejects has a verdict, and stays in the baseline of its group.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
from numpy.typing import ArrayLike

from swerve.algorithms.advantages.group_mean import group_mean_advantages
from swerve.algorithms.advantages.group_std import group_std_advantages
from swerve.algorithms.advantages.leave_one_out import leave_one_out_advantages
from swerve.algorithms.advantages.rloo import rloo_advantages
from swerve.types import Float32Array

AdvantageEstimator = Callable[[ArrayLike], Float32Array]
"""Rewards `[n]` of one group to advantages float32 `[n]`."""

ADVANTAGE_ESTIMATORS: Mapping[str, AdvantageEstimator] = MappingProxyType(
    {
        "leave_one_out": leave_one_out_advantages,
        "group_std": group_std_advantages,
        "rloo": rloo_advantages,
        "group_mean": group_mean_advantages,
    }
)
"""Every estimator by the name recipes call it."""


def group_advantages(
    rewards: Sequence[float | None], estimator: AdvantageEstimator = leave_one_out_advantages
) -> Float32Array:
    """Return the advantages of one group.

    Args:
        rewards: One per attempt at the same task; `None` for an attempt without a verdict.
        estimator: Called with the rewards that exist.

    Returns:
        Advantages, float32 `[n]`, 0 where there is no reward.
    """
    present = np.array([reward is not None for reward in rewards], bool)
    advantages = np.zeros(len(rewards), np.float32)
    advantages[present] = estimator(np.array([reward for reward in rewards if reward is not None], np.float64))
    return advantages
