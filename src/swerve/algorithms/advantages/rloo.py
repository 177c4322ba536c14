"""REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, arXiv:2402.14740, eq. 8).

As in the paper. The advantage is the reward less the mean of the other rewards, in the units of the reward.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from swerve.types import Float32Array


def rloo_advantages(rewards: ArrayLike) -> Float32Array:
    """Return `r_i - mean of the other rewards`.

    Args:
        rewards: `[n]`, one per attempt. A group of one has no baseline and so no advantage.

    Returns:
        Advantages, float32 `[n]`.
    """
    r: NDArray[np.float64] = np.asarray(rewards, np.float64)
    if r.size < 2:
        return np.zeros(r.size, np.float32)
    return (r - (r.sum() - r) / (r.size - 1)).astype(np.float32)
