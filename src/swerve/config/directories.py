"""Places on the user's disk."""

import os
from pathlib import Path


def cache_directory() -> Path:
    """What can be made again lies here: `SWERVE_CACHE_DIR`, else `XDG_CACHE_HOME/swerve`, else `~/.cache/swerve`."""
    if own := os.environ.get("SWERVE_CACHE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "swerve"
