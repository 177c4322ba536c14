"""Packing of variable-length trajectories into rows and of rows into micro-batches of one fixed shape.

The package owns the layout of a training batch: which sequence lies in which row, the host
arrays of each micro-batch, and the share of slots that is padding. It knows neither models nor losses, and every
choice is a function of the sequence lengths alone, so equal inputs are packed equally.
"""

from swerve.packing.batch import MicroBatches, PackedBatch, PackingStats, pack
from swerve.packing.plan import PackingPlan, Placement, fewest_rows, plan_rows

__all__ = [
    "MicroBatches",
    "PackedBatch",
    "PackingPlan",
    "PackingStats",
    "Placement",
    "fewest_rows",
    "pack",
    "plan_rows",
]
