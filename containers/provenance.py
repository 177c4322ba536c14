"""Prints what goes into an image, as JSON; every run in the image records it: provenance.py SOURCE."""

import datetime
import json
import os
import platform
import sys
from pathlib import Path

import swerve
from swerve.telemetry.files import file_digest
from swerve.telemetry.provenance import installed_packages


def image_provenance(source: Path) -> dict[str, object]:
    """Where an image comes from.

    Args:
        source: The checkout that it is built from.

    Returns:
        JSON values: commit, base image by digest, digests of the locks that were used, versions of what they installed.
    """
    extras = os.environ.get("EXTRAS", "").split()
    locks = [source / "requirements.lock", *(source / f"containers/locks/{extra}.lock" for extra in extras)]
    # The variable by which reproducible builds are given the time; a build that sets it says so by this very time.
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    built = datetime.datetime.fromtimestamp(int(epoch), datetime.UTC) if epoch else datetime.datetime.now(datetime.UTC)
    return {
        "source_commit": os.environ["SOURCE_COMMIT"],
        "base_image": os.environ["BASE_IMAGE"],
        "built_at": built.isoformat(timespec="seconds"),
        "extras": extras,
        "locks": {lock.relative_to(source).as_posix(): file_digest(lock) for lock in locks},
        "swerve_version": swerve.__version__,
        "python": platform.python_version(),
        "packages": installed_packages(),
    }


if __name__ == "__main__":
    json.dump(image_provenance(Path(sys.argv[1])), sys.stdout, indent=2)
    print()
