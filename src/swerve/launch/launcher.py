"""What a launcher does; `swerve.cli.commands.launch` lists those there are."""

from collections.abc import Iterator, Mapping
from typing import Protocol

from swerve.launch.job import Launch


class Launcher(Protocol):
    """Hands jobs to whatever runs them."""

    def check(self, launch: Launch) -> None:
        """Refuse what could be shown but not be run.

        Args:
            launch: What is to be submitted.

        Raises:
            SwerveError: The site or a job asks for what this launcher cannot do.
            MachineError: What it needs is not here.
        """
        ...

    def files(self, launch: Launch) -> dict[str, str]:
        """What is handed over, as text.

        Args:
            launch: Any launch.

        Returns:
            Content by path within the launch's folder, for example `1/job.sh`; the same for the same launch.
        """
        ...

    def submit(self, launch: Launch) -> Iterator[tuple[str, str]]:
        """Hand over a launch whose folder is written.

        Args:
            launch: Checked and frozen.

        Yields:
            Name of a job, and what the launcher calls it, as soon as it is handed over.

        Raises:
            MachineError: A job was not taken.
        """
        ...

    def states(self, launch: Launch, ids: Mapping[str, str]) -> dict[str, str]:
        """What the launcher says of jobs.

        Args:
            launch: As it was frozen.
            ids: What it calls them, by name.

        Returns:
            Its own word by name; empty where it knows nothing of a job any more.
        """
        ...

    def cancel(self, launch: Launch, ids: Mapping[str, str]) -> None:
        """End jobs, waiting or running; those that have ended stay as they are.

        Args:
            launch: As it was frozen.
            ids: What it calls them, by name.
        """
        ...


def last_line(text: str) -> str:
    """What a program said last, for an error that has room for one line."""
    return (text.strip().splitlines() or ["failed, and said nothing"])[-1]
