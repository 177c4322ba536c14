"""What the files of a model hold, from their headers alone."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from swerve.checkpoint import StoredTensor
from swerve.models.hf.reader import ModelFiles
from swerve.models.parameters import num_active_parameters
from swerve.types import SwerveError


def describe(files: ModelFiles) -> dict[str, Any]:
    """What a model's files hold.

    Args:
        files: From `open_model`.

    Returns:
        JSON values: `layout`, `experts`, `prefix`, `files`, `bytes` (of the files), `tensors`, `parameters`,
        `active_parameters`, `dtypes`, `largest_tensor`, `skipped`, `config`, and `fault`: why the model cannot be
        loaded, empty if it can.
    """
    try:
        files.check()
        fault = ""
    except SwerveError as error:
        fault = str(error)
    largest = max(files.stored.items(), key=lambda item: item[1].num_bytes, default=None)
    return {
        "path": files.directory.path,
        "layout": files.form,
        "experts": files.experts,
        "prefix": files.prefix,
        "files": len(files.sizes),
        "bytes": sum(files.sizes.values()),
        "tensors": len(files.stored),
        "parameters": sum(math.prod(tensor.shape) for tensor in files.stored.values()),
        "active_parameters": num_active_parameters(files.config),
        "dtypes": count_dtypes(files.stored.values()),
        "largest_tensor": None if largest is None else {"name": largest[0], "bytes": largest[1].num_bytes},
        "skipped": {
            "tensors": len(files.skipped),
            "bytes": sum(tensor.num_bytes for tensor in files.skipped.values()),
            "example": min(files.skipped, default=""),
        },
        "config": asdict(files.config),
        "fault": fault,
    }


def count_dtypes(tensors: Iterable[StoredTensor]) -> dict[str, dict[str, int]]:
    """Number and bytes of the tensors of each type, most bytes first."""
    counted: dict[str, dict[str, int]] = {}
    for tensor in tensors:
        own = counted.setdefault(tensor.dtype, {"tensors": 0, "bytes": 0})
        own["tensors"] += 1
        own["bytes"] += tensor.num_bytes
    return dict(sorted(counted.items(), key=lambda item: -item[1]["bytes"]))
