"""Corrections for the gap between the distribution sampled from and the one trained: weights and gates.

All of them read forward values only: every function here stops gradients itself, so no correction contributes to one.
"""

from swerve.algorithms.correction.importance import importance_weights, token_log_ratio
from swerve.algorithms.correction.sequence_gate import sequence_gate
from swerve.algorithms.correction.truncated import truncated_importance_weights

__all__ = ["importance_weights", "sequence_gate", "token_log_ratio", "truncated_importance_weights"]
