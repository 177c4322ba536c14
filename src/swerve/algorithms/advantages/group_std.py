"""GRPO's advantage: the reward standardised within its group.

As in the paper (Shao et al. 2024, arXiv:2402.03300, eq. 3), with the sample standard deviation (n - 1), as published
trainers use; the paper does not say which. A group whose rewards are all equal has advantage 0, not 0/epsilon.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swerve.types import Float32Array

EPSILON = 1e-6
"""Added to the standard deviation before dividing."""


def group_std_advantages(rewards: ArrayLike) -> Float32Array:
    """Return `(r_i - mean) / (std + 1e-6)` over the whole group.

    Args:
        rewards: `[n]`, one per attempt.

    Returns:
        Advantages, float32 `[n]`.
    """
    r: NDArray[np.float64] = np.asarray(rewards, np.float64)
    if r.size < 2 or r.min() == r.max():
        return np.zeros(r.size, np.float32)
    return ((r - r.mean()) / (r.std(ddof=1) + EPSILON)).astype(np.float32)
