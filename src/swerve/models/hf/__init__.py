"""Files of the family: `config.json` and safetensors, read, written and converted without holding them in memory.

Published checkpoints differ in prefixes (`model.`, `model.language_model.`, `language_model.model.`), in whether the
experts of a layer are one tensor or one per expert, and in how many files they are; all are read and written. Tensors
of other parts (`mtp.*`, `visual.*`) are skipped with a line. A tensor that is missing, unknown or of the wrong shape or
type is refused by name, before any data is read.
"""

from swerve.models.hf.reader import (
    FORMS,
    Form,
    ModelFiles,
    from_hf_tensors,
    load_hf,
    open_model,
    read_config,
    read_dtypes,
)
from swerve.models.hf.writer import MAX_SHARD_BYTES, save_hf, to_hf_tensors

__all__ = [
    "FORMS",
    "MAX_SHARD_BYTES",
    "Form",
    "ModelFiles",
    "from_hf_tensors",
    "load_hf",
    "open_model",
    "read_config",
    "read_dtypes",
    "save_hf",
    "to_hf_tensors",
]
