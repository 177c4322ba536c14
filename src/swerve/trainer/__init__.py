"""From graded trajectories to updated weights: batches, the loss, the optimizer and the numbers of a step.

The package owns the GRPO step: grouping and packing a step's trajectories, one forward and backward pass per
micro-batch, unnormalised sums on the device, one division, clip and Adam update, and a record that says what each
number of the step means. It does not know where trajectories come from, where weights go, or when to save.
"""

from swerve.trainer.batch import TrainingBatch, make_batch, make_group
from swerve.trainer.gap import SamplerTrainerGap, check_gap
from swerve.trainer.grpo import (
    GrpoTrainer,
    NonFiniteGradientError,
    PlacedMicroBatch,
    Put,
    StagingRefusedError,
    UpdateDeferredError,
)
from swerve.trainer.optimizer import Adam, AdamState, UpdateNumbers, learning_rate_at
from swerve.trainer.programs import Program, execution_of, longest_rows, mesh_shape, plan_programs
from swerve.trainer.state import TrainerState
from swerve.trainer.stats import BatchStats, StepStats
from swerve.trainer.synthetic import SyntheticShape, synthetic_groups, synthetic_lengths, with_random_advantages

__all__ = [
    "Adam",
    "AdamState",
    "BatchStats",
    "GrpoTrainer",
    "NonFiniteGradientError",
    "PlacedMicroBatch",
    "Program",
    "Put",
    "SamplerTrainerGap",
    "StagingRefusedError",
    "StepStats",
    "SyntheticShape",
    "TrainerState",
    "TrainingBatch",
    "UpdateDeferredError",
    "UpdateNumbers",
    "check_gap",
    "execution_of",
    "learning_rate_at",
    "longest_rows",
    "make_batch",
    "make_group",
    "mesh_shape",
    "plan_programs",
    "synthetic_groups",
    "synthetic_lengths",
    "with_random_advantages",
]
