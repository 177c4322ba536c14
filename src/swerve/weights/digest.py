"""One number for a set of weights: equal exactly where every bit is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from swerve.parallel import flatten_names


def digest(params: Mapping[str, Any]) -> str:
    """Return the SHA-256 over names, shapes, types and bytes of all parameters, sorted by name.

    Args:
        params: Nested mapping of host or device arrays.

    Returns:
        Hexadecimal digest; the order of the mappings and where the arrays live do not matter.
    """
    content = hashlib.sha256()
    named = flatten_names(params)
    for name in sorted(named):
        array = np.asarray(named[name], order="C")
        header = f"{name}\n{array.dtype.name}\n{','.join(map(str, array.shape))}\n"
        content.update(header.encode())
        content.update(array.reshape(-1).view(np.uint8).data)
    return content.hexdigest()
