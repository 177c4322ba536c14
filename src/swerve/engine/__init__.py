"""Tokens in, tokens out: the embedded JAX engine that samples from the policy inside this process, and remote servers.

The embedded engine owns the slots that episodes occupy, the model state each keeps between turns, the deterministic
rounds in which all of them advance together, the compiled programs, and the refit that puts new weights behind a
number. The remote one asks servers of vLLM for the same, and gives them weights as files. Neither knows of episodes,
text or rewards, and the trainer and they never meet: weights arrive as a tree of arrays.
"""

from swerve.engine.counters import EngineCounters
from swerve.engine.embedded import EmbeddedEngine, EngineSession
from swerve.engine.errors import EngineError, RefitError
from swerve.engine.programs import DecoderModel
from swerve.engine.remote import VllmEngine

__all__ = [
    "DecoderModel",
    "EmbeddedEngine",
    "EngineCounters",
    "EngineError",
    "EngineSession",
    "RefitError",
    "VllmEngine",
]
