"""What can go wrong with an engine, whichever it is."""

from __future__ import annotations

from swerve.types import MachineError, SwerveError


class EngineError(MachineError):
    """An engine, or a server behind it, failed; whoever waits for an answer learns why."""


class RefitError(SwerveError):
    """New weights were refused; the engine keeps the old ones."""
