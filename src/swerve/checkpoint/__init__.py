"""State on disk: exact resume, and weights for others.

The package owns the layout of a checkpoint directory, its atomic writing, the manifest that proves it whole, the
reasons to refuse one that is torn or foreign, what is kept and what is deleted, and the record of how far a run has
read its data; and the reading of tensors by byte ranges and their writing as a stream, here or behind a URL. It stores
arrays and JSON and does not know what they mean.
"""

from swerve.checkpoint.background import BackgroundWriter
from swerve.checkpoint.data_position import DataPosition
from swerve.checkpoint.files import CheckpointError, TornCheckpointError, read_manifest
from swerve.checkpoint.storage import Directory, Location, open_directory, write_file
from swerve.checkpoint.store import (
    Checkpoint,
    CheckpointStore,
    ForeignCheckpointError,
    list_checkpoints,
    open_checkpoint,
    verify_files,
)
from swerve.checkpoint.tensor_files import (
    Array,
    Buffer,
    NewTensor,
    Span,
    StoredTensor,
    read_box,
    read_header,
    write_tensors,
)

__all__ = [
    "Array",
    "BackgroundWriter",
    "Buffer",
    "Checkpoint",
    "CheckpointError",
    "CheckpointStore",
    "DataPosition",
    "Directory",
    "ForeignCheckpointError",
    "Location",
    "NewTensor",
    "Span",
    "StoredTensor",
    "TornCheckpointError",
    "list_checkpoints",
    "open_checkpoint",
    "open_directory",
    "read_box",
    "read_header",
    "read_manifest",
    "verify_files",
    "write_file",
    "write_tensors",
]
