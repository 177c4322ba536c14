"""Evaluation: how often a policy resolves tasks, exactly.

This package owns pass@k and its relatives, the accounting of attempts that crashed or are missing, and the report of an
evaluation. It plays episodes through `rollout` and decides nothing about training.
"""

from swerve.evaluation.evaluator import evaluate
from swerve.evaluation.pass_at_k import pass_at_k, pass_hat_k, standard_error
from swerve.evaluation.report import EvalReport, TaskOutcome, outcomes_of

__all__ = ["EvalReport", "TaskOutcome", "evaluate", "outcomes_of", "pass_at_k", "pass_hat_k", "standard_error"]
