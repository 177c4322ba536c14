"""Owns the `repository` family: whole packages of which one place, or a whole release's fixes, is to be mended."""

from swerve.environments.repository.environment import RepositoryEnvironment

__all__ = ["RepositoryEnvironment"]
