"""State on disk: exact resume, and weights for others.

The package owns the layout of a checkpoint directory, its atomic writing, the manifest that proves it whole, the
reasons to refuse one that is torn or foreign, what is kept and what is deleted, and the record of how far a run has
read its data. It stores arrays and JSON and does not know what they mean.
"""

from swerve.checkpoint.data_position import DataPosition
from swerve.checkpoint.files import CheckpointError, TornCheckpointError
from swerve.checkpoint.store import (
    Checkpoint,
    CheckpointStore,
    ForeignCheckpointError,
    list_checkpoints,
    open_checkpoint,
)

__all__ = [
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "DataPosition",
    "ForeignCheckpointError",
    "TornCheckpointError",
    "list_checkpoints",
    "open_checkpoint",
]
