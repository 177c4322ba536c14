"""Owns the `mini` family: small generated functions by family of bug, their tests, and the harness that runs them."""

from swerve.environments.mini.bugs import FAMILIES
from swerve.environments.mini.environment import MiniEnvironment
from swerve.environments.mini.generator import MiniFunction, generate, mint_mini

__all__ = ["FAMILIES", "MiniEnvironment", "MiniFunction", "generate", "mint_mini"]
