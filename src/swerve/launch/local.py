"""Runs jobs here, one after the other, in the foreground."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from swerve.launch.container import inside, reference
from swerve.launch.job import Launch
from swerve.telemetry import file_digest
from swerve.types import MachineError, SwerveError

_ENDED = (-signal.SIGTERM, 128 + signal.SIGTERM)


class LocalLauncher:
    """Implements `swerve.launch.Launcher`; each job is a process, and the next one starts when it has ended."""

    def check(self, launch: Launch) -> None:
        """Refuse what takes a shell, and an image that is another than the site names."""
        if launch.site.environment.prologue:
            raise SwerveError(
                f"{launch.site_file}: environment.prologue: jobs here start without a shell: load what they need "
                "beforehand, and leave it out"
            )
        image, digest = reference(launch.site.container)
        if digest and file_digest(Path(image)) != digest:
            raise SwerveError(f"{launch.site_file}: container.image: {image} has another digest: restore that image")

    def files(self, launch: Launch) -> dict[str, str]:
        """Nothing is handed over: the jobs' own command lines say all."""
        return {}

    def submit(self, launch: Launch) -> Iterator[tuple[str, str]]:
        """Run every job; one that fails keeps none of the others from running."""
        values = dict(pair.split("=", 1) for pair in launch.site.environment.values)
        for job in launch.jobs:
            words = inside(launch.site.container, job)
            process = subprocess.Popen(
                words,
                cwd=job.work,
                env={**os.environ, **values},
                stdout=2,  # what a job says is no result of the command
                start_new_session=True,
            )
            try:
                yield job.name, str(process.pid)
                code = process.wait()
            finally:
                process.terminate()
                process.wait()
            if code in _ENDED:
                raise MachineError(f"{job.name} was ended: go on with swerve launch run {job.folder}")

    def states(self, launch: Launch, ids: Mapping[str, str]) -> dict[str, str]:
        """Which of the processes are there."""
        return {name: "running" if _process(name, pid) else "" for name, pid in ids.items()}

    def cancel(self, launch: Launch, ids: Mapping[str, str]) -> None:
        """End what runs; those after it are not started."""
        found = [process for name, pid in ids.items() if (process := _process(name, pid))]
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(found, timeout=90)
        if alive:
            raise MachineError(f"process {alive[0].pid} does not end: end it by hand")


def _process(name: str, pid: str) -> psutil.Process | None:
    """The process of a job, unless another one has its number by now."""
    number = name.rpartition("-")[2]
    with suppress(psutil.Error):
        process = psutil.Process(int(pid))
        words = process.cmdline()
        if words[-2:-1] == ["run"] and words[-1].endswith(f"/{number}"):
            return process
    return None
