"""Noisy demonstrations for pre-training, and what they are made of.

This package owns the corpus of untested functions, the demonstrations of repairing one, and the endless, repeatable
stream of token sequences that a policy imitates before it learns by itself.
"""

from swerve.environments.demonstrations.repairs import Demonstration, Noise, demonstrate
from swerve.environments.demonstrations.sources import Sources, load_sources
from swerve.environments.demonstrations.stream import DemonstrationStream, Mixture, WeightedSequence

__all__ = [
    "Demonstration",
    "DemonstrationStream",
    "Mixture",
    "Noise",
    "Sources",
    "WeightedSequence",
    "demonstrate",
    "load_sources",
]
