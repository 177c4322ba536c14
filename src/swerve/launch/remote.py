"""Runs a job where its folder may not be: the files of the folder are carried along, and one of them is this script.

Where the folder is seen, as on a file system that the cluster shares, the job runs in it. Elsewhere the files are
unpacked below the job's working directory first, once, so that a job that starts again finds what it left there.
"""

import shlex

from swerve.launch.job import Job
from swerve.launch.site import Site

SCRIPT = "job.sh"
_TEXT = """\
#!/bin/bash
set -euo pipefail
carried=$(dirname "$0")
{prologue}folder={here}
if [ ! -e "$folder/job.json" ]; then
  folder={there}
  if [ ! -e "$folder" ]; then
    mkdir -p "$folder.part"
    cp -L "$carried"/* "$folder.part"
    mv "$folder.part" "$folder"
  fi
fi
cd {work}
exec {command} "$folder"
"""


def script(job: Job, site: Site) -> str:
    """Shell text that unpacks a job where need be, and runs it.

    Args:
        job: The job.
        site: Where it runs; the prologue of its environment comes first.
    """
    return _TEXT.format(
        prologue="".join(f"{line}\n" for line in site.environment.prologue),
        here=shlex.quote(str(job.folder)),
        there=shlex.quote(str(job.work / "jobs" / job.folder.parent.name / job.folder.name)),
        work=shlex.quote(str(job.work)),
        command=shlex.join(job.command[:-1]),
    )


def values(site: Site) -> dict[str, str]:
    """Variables of the site's environment that are no secret."""
    return dict(pair.split("=", 1) for pair in site.environment.values)
