"""The reinforcement-learning loop: this package owns who works when.

It asks for rollouts, turns them into groups and micro-batches, drives the trainer, hands new weights to the engine,
bounds how old a trajectory may be when it is trained on, and accounts for every failed rollout. It computes nothing.
"""

from swerve.orchestrator.loop import EVALUATION_SEED, TrainingLoop, evaluation_settings, training_settings
from swerve.orchestrator.roles import LoopRoles, Profiler, RunRecord
from swerve.orchestrator.state import LoopState
from swerve.orchestrator.stepper import Stepper

__all__ = [
    "EVALUATION_SEED",
    "LoopRoles",
    "LoopState",
    "Profiler",
    "RunRecord",
    "Stepper",
    "TrainingLoop",
    "evaluation_settings",
    "training_settings",
]
