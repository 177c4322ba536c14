"""Owns the `functions` family: short functions of real packages, broken in one place, with the packages' own tests."""

from swerve.environments.functions.environment import FunctionsEnvironment

__all__ = ["FunctionsEnvironment"]
