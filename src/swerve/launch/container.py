"""The words that run a job inside the site's container, or beside it where there is none."""

from pathlib import Path

from swerve.launch.job import Job
from swerve.launch.site import Container


def inside(container: Container, job: Job) -> tuple[str, ...]:
    """Words that run a job.

    Args:
        container: Of the site.
        job: The job; its folder, working directory and runs are seen at the same paths.
    """
    if container.runtime == "none":
        return job.command
    own = dict.fromkeys((str(job.work), str(job.folder.parent), job.recipe.run.directory))
    binds = [word for bind in (*own, *container.binds) for word in ("--bind", bind)]
    return ("apptainer", "exec", "--pwd", str(job.work), *binds, reference(container)[0], *job.command)


def reference(container: Container) -> tuple[str, str]:
    """How a runtime names the image, and the SHA-256 of it where it is a file: empty where a registry keeps to it."""
    name, _, pinned = container.image.partition("@sha256:")
    return (name, pinned) if Path(name).is_absolute() else (container.image, "")
