"""Hands jobs to Slurm: a batch script each, by `sbatch`, so that each queues, is requeued and is cancelled by itself.

A script runs the job and nothing else. Slurm tells it two minutes before its time is up; the job then makes room
where it can go on, and is queued again. Preemption and `scontrol requeue` start the same script again, and the job
goes on from what its folder says.
"""

import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence

from swerve.launch.container import inside, reference
from swerve.launch.job import Job, Launch
from swerve.launch.launcher import last_line
from swerve.launch.run_and_time import GO_ON_LATER
from swerve.launch.site import Site
from swerve.types import MachineError, SwerveError

_WARNING_S = 120
_ALWAYS = ("HOME", "LANG", "LOGNAME", "PATH", "SHELL", "USER")
"""Variables that every job gets from whoever launches, beside those of Slurm and those that the site names."""

_SCRIPT = """\
#!/bin/bash
{directives}
# Inherits {inherited}, and no other variable.
set -eo pipefail
{setup}set -u
{command} &
job=$!
trap 'kill -USR1 "$job" 2>/dev/null || true' USR1  # soon the time is up
trap 'kill -TERM "$job" 2>/dev/null || true' TERM
status=0
while wait "$job" && status=0 || status=$?; kill -0 "$job" 2>/dev/null; do :; done
if [ "$status" -eq {later} ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


class SlurmLauncher:
    """Implements `swerve.launch.Launcher`."""

    def check(self, launch: Launch) -> None:
        """Refuse what one process cannot do, and a machine without Slurm."""
        nodes = launch.site.slurm.nodes
        if nodes > 1:
            raise SwerveError(
                f"{launch.site_file}: slurm.nodes = {nodes}: training runs in one process on one machine: set it to 1 "
                "(--dry-run shows the script for more)"
            )
        missing = [name for name in launch.site.environment.inherit if name not in os.environ]
        if missing:
            raise SwerveError(f"{launch.site_file}: environment.inherit: {missing[0]} is not set here: export it first")
        _require("sbatch")

    def files(self, launch: Launch) -> dict[str, str]:
        """The batch script of each job."""
        return {f"{job.number}/job.sh": _script(job, launch.site) for job in launch.jobs}

    def submit(self, launch: Launch) -> Iterator[tuple[str, str]]:
        """Submit every job."""
        for job in launch.jobs:
            said = _slurm("sbatch", "--parsable", str(job.folder / "job.sh"), names=launch.site.environment.inherit)
            yield job.name, said.strip().partition(";")[0]

    def states(self, launch: Launch, ids: Mapping[str, str]) -> dict[str, str]:
        """What the queue says; it forgets jobs some minutes after their end."""
        _require("squeue")
        words = ("squeue", "--noheader", "--states=all", "--format=%i %T %r", f"--jobs={','.join(ids.values())}")
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode and "Invalid job id" not in done.stderr:
            raise MachineError(f"squeue: {last_line(done.stderr)}")
        rows = [line.split(maxsplit=2) for line in done.stdout.splitlines()]
        known = {row[0]: row[1] if row[2:] in ([], ["None"]) else f"{row[1]} ({row[2]})" for row in rows}
        return {name: known.get(identifier, "") for name, identifier in ids.items()}

    def cancel(self, launch: Launch, ids: Mapping[str, str]) -> None:
        """Cancel every job that has not ended."""
        _slurm("scancel", *ids.values())


def _script(job: Job, site: Site) -> str:
    command = inside(site.container, job)
    if site.slurm.nodes > 1:
        command = ("srun", "--ntasks-per-node=1", "--kill-on-bad-exit=1", *command)
    image, digest = reference(site.container)
    setup = list(site.environment.prologue)
    for name, _, value in (pair.partition("=") for pair in site.environment.values):
        setup.append(f"export {name}={shlex.quote(value)}")
    if digest:
        setup.append(f"sha256sum --check --quiet <<< {shlex.quote(f'{digest}  {image}')}")
    return _SCRIPT.format(
        inherited=", ".join((*_ALWAYS, *site.environment.inherit)),
        directives="\n".join(f"#SBATCH {line}" for line in _directives(job, site)),
        setup="".join(f"{line}\n" for line in setup),
        command=shlex.join(command),
        later=GO_ON_LATER,
    )


def _directives(job: Job, site: Site) -> Iterator[str]:
    slurm = site.slurm
    yield f"--job-name={job.name}"
    yield f'--output="{job.folder}/slurm.out"'
    yield "--open-mode=append"
    yield "--requeue"
    yield f"--signal=B:USR1@{_WARNING_S}"
    yield f'--chdir="{job.work}"'
    yield f"--nodes={slurm.nodes}"
    yield "--ntasks-per-node=1"
    for option, value in (
        ("partition", slurm.partition),
        ("account", slurm.account),
        ("qos", slurm.qos),
        ("time", slurm.time),
        ("cpus-per-task", slurm.cpus_per_task),
        ("mem", f"{slurm.memory_mib}M" if slurm.memory_mib else ""),
        ("gres", slurm.gres),
        ("constraint", slurm.constraint),
        ("reservation", slurm.reservation),
    ):
        if value:
            yield f"--{option}={value}"
    if slurm.exclusive:
        yield "--exclusive"


def _slurm(*words: str, names: Sequence[str] = ()) -> str:
    """What a command of Slurm's prints; jobs inherit its environment."""
    _require(words[0])
    kept = {name: value for name, value in os.environ.items() if name in {*_ALWAYS, *names} or name[:6] == "SLURM_"}
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=kept)
    if done.returncode:
        raise MachineError(f"{words[0]}: {last_line(done.stderr)}")
    return done.stdout


def _require(name: str) -> None:
    if shutil.which(name) is None:
        raise MachineError(f"{name} is not here: log in to the cluster, or install Slurm's client (slurm-client)")
