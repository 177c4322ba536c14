"""Surrogate losses per token: one per file, before masking, weighting and normalisation."""

from swerve.algorithms.policy_loss.cispo import cispo_loss
from swerve.algorithms.policy_loss.clipped import clipped_loss
from swerve.algorithms.policy_loss.dual_clipped import dual_clipped_loss
from swerve.algorithms.policy_loss.gspo import gspo_loss
from swerve.algorithms.policy_loss.on_policy import on_policy_loss
from swerve.algorithms.policy_loss.unclipped import unclipped_loss

__all__ = [
    "cispo_loss",
    "clipped_loss",
    "dual_clipped_loss",
    "gspo_loss",
    "on_policy_loss",
    "unclipped_loss",
]
