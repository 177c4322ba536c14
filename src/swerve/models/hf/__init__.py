"""Files of the family: `config.json` and safetensors, read, written and converted without holding them in memory.

Published checkpoints differ in prefixes (`model.`, `model.language_model.`, `language_model.model.`), in whether the
experts of a layer are one tensor or one per expert, and in how many files they are; all are read and written. Tensors
of other parts (`mtp.*`, `visual.*`) are skipped with a line. A tensor that is missing, unknown or of the wrong shape or
type is refused by name, before any data is read.
"""

from swerve.models.hf.convert import Conversion, convert
from swerve.models.hf.describe import count_dtypes, describe
from swerve.models.hf.layout import Experts
from swerve.models.hf.reader import (
    Form,
    ModelFiles,
    from_hf_tensors,
    load_hf,
    open_model,
    read_config,
    read_dtypes,
    skipped_line,
)
from swerve.models.hf.writer import MAX_SHARD_BYTES, save_hf, to_hf_tensors

__all__ = [
    "MAX_SHARD_BYTES",
    "Conversion",
    "Experts",
    "Form",
    "ModelFiles",
    "convert",
    "count_dtypes",
    "describe",
    "from_hf_tensors",
    "load_hf",
    "open_model",
    "read_config",
    "read_dtypes",
    "save_hf",
    "skipped_line",
    "to_hf_tensors",
]
