"""Advantages of a group of attempts at one task: one estimator per file, numpy on the host.

Every estimator maps the rewards of a group, `[n]`, to its advantages, `[n]`; `group_advantages` applies one of them
to a group in which some attempts have no reward.
"""

from swerve.algorithms.advantages.group import ADVANTAGE_ESTIMATORS, AdvantageEstimator, group_advantages
from swerve.algorithms.advantages.group_mean import group_mean_advantages
from swerve.algorithms.advantages.group_std import group_std_advantages
from swerve.algorithms.advantages.leave_one_out import leave_one_out_advantages
from swerve.algorithms.advantages.rloo import rloo_advantages

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "AdvantageEstimator",
    "group_advantages",
    "group_mean_advantages",
    "group_std_advantages",
    "leave_one_out_advantages",
    "rloo_advantages",
]
