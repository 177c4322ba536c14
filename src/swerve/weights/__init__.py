"""Versions of the policy's weights: their identity, and their way from the trainer to whatever samples from them.

The package owns the content digest of a tree of parameters, the monotonic version number, the hand-over to an engine
behind a small protocol, and the probe that proves the engine answers with the new weights. It is the bridge between
trainer and engine, which do not know each other.
"""

from swerve.weights.digest import digest
from swerve.weights.publisher import RefitTarget, WeightsError, WeightsPublisher

__all__ = ["RefitTarget", "WeightsError", "WeightsPublisher", "digest"]
