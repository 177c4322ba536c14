"""Places on the user's disk, and what ships with the package."""

import os
from pathlib import Path

TINY_POLICY = Path(__file__).parents[1] / "policies" / "tiny"
"""Hugging Face files of the policy that ships with Swerve."""


def policy_directory(checkpoint: str) -> Path:
    """The directory that `policy.checkpoint` names."""
    return TINY_POLICY if checkpoint == "tiny" else Path(checkpoint)


def cache_directory() -> Path:
    """What can be made again lies here: `SWERVE_CACHE_DIR`, else `XDG_CACHE_HOME/swerve`, else `~/.cache/swerve`."""
    if own := os.environ.get("SWERVE_CACHE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "swerve"
