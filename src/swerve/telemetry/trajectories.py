"""The file of a run's trajectories: one JSON line per episode, with the step it belongs to."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from swerve.telemetry.files import JsonLines, keep_json_lines, read_json_lines
from swerve.telemetry.trajectory_records import trajectory_from_json, trajectory_to_json
from swerve.types import SwerveError, Trajectory


class TrajectoryLog:
    """Writer of a run's trajectories, in the order given."""

    def __init__(self, path: Path, *, durable: bool = False, resume_step: int | None = None) -> None:
        """Opens the file.

        Args:
            path: JSON-lines file.
            durable: Force every line to the disk.
            resume_step: Steps done by the state a run goes on from; trajectories of later steps are dropped.
        """
        if resume_step is not None:
            keep_json_lines(path, lambda record: record["step"] <= resume_step)
        self._file = JsonLines(path, durable=durable)

    def append(self, step: int, purpose: str, trajectories: Iterable[Trajectory]) -> None:
        """Adds trajectories.

        Args:
            step: The optimizer step they train, or the number of steps done where they evaluate.
            purpose: `train` or `evaluation`.
            trajectories: In order.
        """
        for trajectory in trajectories:
            self._file.append({"step": step, "purpose": purpose, **trajectory_to_json(trajectory)})

    def close(self) -> None:
        """Closes the file; idempotent."""
        self._file.close()


def read_trajectories(
    path: Path, purposes: Sequence[str] = ("train", "evaluation")
) -> Iterator[tuple[int, Trajectory]]:
    """Reads trajectories back, one at a time.

    Args:
        path: File of a `TrajectoryLog`.
        purposes: Which to read.

    Yields:
        Step and trajectory.

    Raises:
        SwerveError: A line is no trajectory; names file, line and key.
    """
    for number, record in enumerate(read_json_lines(path), start=1):
        try:
            step, purpose = record.pop("step"), record.pop("purpose")
            if purpose in purposes:
                yield step, trajectory_from_json(record)
        except KeyError as missing:
            raise SwerveError(f"{path}:{number}: key {missing.args[0]}: is missing") from None
        except SwerveError as error:
            raise SwerveError(f"{path}:{number}: {error}") from None
