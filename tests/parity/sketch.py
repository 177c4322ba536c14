"""A small fingerprint of a gradient."""

from typing import Any

import numpy as np

_ENTRIES = 48


def sketch(gradient: Any) -> np.ndarray:
    """Norm, sum against a wave, and up to `_ENTRIES` entries at even distances: enough to tell two gradients apart."""
    flat = np.asarray(gradient, np.float64).ravel()
    entries = flat[:: max(1, flat.size // _ENTRIES)][:_ENTRIES]
    return np.concatenate([[np.linalg.norm(flat), flat @ np.cos(np.arange(flat.size))], entries]).astype(np.float32)


def sketch_difference(found: np.ndarray, expected: np.ndarray, floor: float) -> float:
    """The largest difference: of the first two relative to the norm, of entries relative to the largest of them.

    A norm below `floor` is that of rounding, and counts as `floor`.
    """
    apart = np.abs(found - expected)
    scale = max(expected[0], floor), max(np.abs(expected[2:]).max(), floor)
    return float(max(apart[:2].max() / scale[0], apart[2:].max() / scale[1]))
