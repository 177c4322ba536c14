"""Tokens in, tokens out: the embedded JAX engine that samples from the policy inside this process.

The engine owns the slots that episodes occupy, the model state each keeps between turns, the deterministic rounds
in which all of them advance together, the compiled programs, and the refit that puts new weights behind a number. It
knows nothing of episodes, text or rewards, and the trainer and it never meet: weights arrive as a tree of arrays.
"""

from swerve.engine.counters import EngineCounters
from swerve.engine.embedded import EmbeddedEngine, EngineError, EngineSession, RefitError
from swerve.engine.programs import DecoderModel

__all__ = ["DecoderModel", "EmbeddedEngine", "EngineCounters", "EngineError", "EngineSession", "RefitError"]
