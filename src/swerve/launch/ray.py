"""Hands jobs to a Ray cluster that runs already, through its Job API.

The files of a job's folder travel as its working directory. The cluster's dashboard shows a job's environment to
everyone, so that no secret goes into it; a node that has one in its own environment passes it on to jobs.
"""

from collections.abc import Iterator, Mapping
from typing import Any, cast

from swerve.launch.job import Launch
from swerve.launch.remote import SCRIPT, script, values
from swerve.launch.site import Ray
from swerve.types import MachineError, SwerveError

_ENDED = ("SUCCEEDED", "FAILED", "STOPPED")


class RayLauncher:
    """Implements `swerve.launch.Launcher`."""

    def check(self, launch: Launch) -> None:
        """Refuse a cluster that cannot be reached."""
        _check_site(launch)
        _client(launch.site.ray)

    def files(self, launch: Launch) -> dict[str, str]:
        """The entrypoint of each job."""
        _check_site(launch)
        return {f"{job.number}/{SCRIPT}": script(job, launch.site) for job in launch.jobs}

    def submit(self, launch: Launch) -> Iterator[tuple[str, str]]:
        """Submit every job, under its own name."""
        client, wanted = _client(launch.site.ray), launch.site.ray
        for job in launch.jobs:
            asked = {
                "entrypoint": f"bash {SCRIPT}",
                "submission_id": job.name,
                "runtime_env": {"working_dir": str(job.folder), "env_vars": values(launch.site)},
                "metadata": {"seed": str(job.seed)},
                "entrypoint_num_cpus": wanted.cpus or None,
                "entrypoint_num_gpus": wanted.gpus or None,
                "entrypoint_memory": wanted.memory_mib * 2**20 or None,
                "entrypoint_resources": wanted.amounts or None,
            }
            yield job.name, _asked(client.submit_job, **asked)

    def states(self, launch: Launch, ids: Mapping[str, str]) -> dict[str, str]:
        """What the cluster says."""
        jobs = {job.submission_id: job for job in _asked(_client(launch.site.ray).list_jobs)}
        return {name: _state(jobs[identifier]) if identifier in jobs else "" for name, identifier in ids.items()}

    def cancel(self, launch: Launch, ids: Mapping[str, str]) -> None:
        """Stop every job that has not ended."""
        client = _client(launch.site.ray)
        for name, state in self.states(launch, ids).items():
            if state and state.partition(" ")[0] not in _ENDED:
                _asked(client.stop_job, ids[name])


def _check_site(launch: Launch) -> None:
    site, file = launch.site, launch.site_file or "no site file"
    if not site.ray.address:
        raise SwerveError(f"{file}: ray.address is missing: give --address http://HEAD:8265")
    if site.container.runtime != "none":
        raise SwerveError(
            f'{file}: container.runtime = "{site.container.runtime}": jobs run as the nodes of the cluster do: "none"'
        )
    if site.environment.inherit:
        raise SwerveError(
            f"{file}: environment.inherit: the dashboard would show the value of {site.environment.inherit[0]} to "
            "everyone: set it on the nodes of the cluster, before Ray starts there"
        )


def _client(ray: Ray) -> Any:
    """The cluster's Job API.

    Raises:
        MachineError: Ray is not installed, or no cluster answers.
    """
    try:
        from ray.job_submission import JobSubmissionClient  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise MachineError("ray is missing: pip install 'swerve[ray]'") from None
    return _asked(JobSubmissionClient, ray.address)


def _asked(what: Any, *arguments: Any, **options: Any) -> Any:
    """Ask the cluster for something."""
    try:
        return what(*arguments, **options)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise MachineError(f"ray: {(str(error).strip().splitlines() or [type(error).__name__])[-1]}") from error


def _state(job: Any) -> str:
    """One word, and what the cluster says of a job that failed."""
    word = cast("str", job.status.value)
    return f"{word} ({job.message.splitlines()[0]})" if word == "FAILED" and job.message else word
