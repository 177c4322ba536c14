"""Advantages and losses of policy-gradient learning, as small pure functions.

The package owns every formula that turns rewards into advantages and log-probabilities into a loss: baselines and
group normalisation, importance weights and the gates that reject sequences, the surrogate losses, normalisers, KL
estimators and filters. Nothing here knows of models, batches on disk or devices. Advantages are numpy and run on the
host; everything that is differentiated or evaluated on log-probabilities is jax.numpy on arrays `[rows, time]`.
"""

from swerve.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    AdvantageEstimator,
    group_advantages,
    group_mean_advantages,
    group_std_advantages,
    leave_one_out_advantages,
    rloo_advantages,
)
from swerve.algorithms.correction import (
    importance_weights,
    sequence_gate,
    token_log_ratio,
    truncated_importance_weights,
)
from swerve.algorithms.filters import logprob_error, logprob_error_filter, overlong_filter
from swerve.algorithms.kl import KL_ESTIMATORS, kl_k1, kl_k2, kl_k3
from swerve.algorithms.normalisers import (
    NORMALISERS,
    constant_normaliser,
    count_without_mask,
    sequence_normaliser,
    token_normaliser,
)
from swerve.algorithms.policy_loss import (
    cispo_loss,
    clipped_loss,
    dual_clipped_loss,
    gspo_loss,
    on_policy_loss,
    unclipped_loss,
)
from swerve.algorithms.segments import per_token, segment_counts, segment_mean, segment_sum

__all__ = [
    "ADVANTAGE_ESTIMATORS",
    "KL_ESTIMATORS",
    "NORMALISERS",
    "AdvantageEstimator",
    "cispo_loss",
    "clipped_loss",
    "constant_normaliser",
    "count_without_mask",
    "dual_clipped_loss",
    "group_advantages",
    "group_mean_advantages",
    "group_std_advantages",
    "gspo_loss",
    "importance_weights",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "leave_one_out_advantages",
    "logprob_error",
    "logprob_error_filter",
    "on_policy_loss",
    "overlong_filter",
    "per_token",
    "rloo_advantages",
    "segment_counts",
    "segment_mean",
    "segment_sum",
    "sequence_gate",
    "sequence_normaliser",
    "token_log_ratio",
    "token_normaliser",
    "truncated_importance_weights",
    "unclipped_loss",
]
