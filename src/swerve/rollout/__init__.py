"""Rollout: episodes become trajectories.

This package owns the episode (session, sandbox, agent, grading) and what its failures mean, the collection of many
episodes in a fixed order with seeds derived from names, and the exact form in which trajectories are stored. It knows
policies, sandboxes and graders by their protocols only.
"""

from swerve.rollout.collection import Progress, ProgressCallback, collect, derive_seed
from swerve.rollout.episode import EpisodeRoles, EpisodeSettings, run_episode
from swerve.rollout.records import (
    read_trajectories,
    trajectory_from_json,
    trajectory_to_json,
    trajectory_to_line,
    write_trajectories,
)
from swerve.rollout.statistics import rollout_metrics, tool_call_warning

__all__ = [
    "EpisodeRoles",
    "EpisodeSettings",
    "Progress",
    "ProgressCallback",
    "collect",
    "derive_seed",
    "read_trajectories",
    "rollout_metrics",
    "run_episode",
    "tool_call_warning",
    "trajectory_from_json",
    "trajectory_to_json",
    "trajectory_to_line",
    "write_trajectories",
]
