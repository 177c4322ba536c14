"""Dr.GRPO's advantage (Liu et al. 2025, arXiv:2503.20783): the reward less the mean of its group.

As in the paper: no division by the standard deviation, which would weigh tasks that are nearly always or nearly never
solved above the others. The other half of Dr.GRPO, a constant instead of the length as denominator, is
`constant_normaliser`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swerve.types import Float32Array


def group_mean_advantages(rewards: ArrayLike) -> Float32Array:
    """Return `r_i - mean` over the whole group.

    Args:
        rewards: `[n]`, one per attempt.

    Returns:
        Advantages, float32 `[n]`.
    """
    r: NDArray[np.float64] = np.asarray(rewards, np.float64)
    if r.size == 0:
        return np.zeros(0, np.float32)
    return (r - r.mean()).astype(np.float32)
