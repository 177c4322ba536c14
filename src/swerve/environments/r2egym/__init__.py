"""Owns the `r2egym` family: real repositories in images of their own, judged by tests that the image holds.

`rows` reads the dataset's rows, `convert` writes those of two lists of ids as task files, `reference` reads such files
as tasks, and `environment` with its `harness` plays and grades them.
"""

from swerve.environments.r2egym.environment import R2EGymEnvironment

__all__ = ["R2EGymEnvironment"]
