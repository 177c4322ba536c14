"""Rollout: episodes become trajectories.

This package owns the episode (session, sandbox, agent, grading) and what its failures mean, the collection of many
episodes in a fixed order with seeds derived from names. It knows policies, sandboxes and graders by their protocols
only.
"""

from swerve.rollout.collection import Progress, ProgressCallback, collect, derive_seed
from swerve.rollout.episode import EpisodeRoles, EpisodeSettings, run_episode
from swerve.rollout.oracle import OraclePolicy, gold_calls
from swerve.rollout.statistics import guard_notes, rollout_metrics, tool_call_warning

__all__ = [
    "EpisodeRoles",
    "EpisodeSettings",
    "OraclePolicy",
    "Progress",
    "ProgressCallback",
    "collect",
    "derive_seed",
    "gold_calls",
    "guard_notes",
    "rollout_metrics",
    "run_episode",
    "tool_call_warning",
]
