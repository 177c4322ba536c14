"""Trajectories as JSON lines, complete and compact: what a reader, a replay or a later analysis needs."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from swerve.telemetry.files import JsonLines, keep_json_lines, read_json_lines
from swerve.types import EpisodeStatus, Trajectory, Turn


def trajectory_record(trajectory: Trajectory) -> dict[str, object]:
    """A trajectory as JSON values.

    Masks and versions are spans `[start, end, version]` of sampled tokens; log-probabilities are listed for sampled
    tokens only, in order. Routing is not kept.

    Args:
        trajectory: Any trajectory.

    Returns:
        JSON values from which `read_trajectories` builds an equal trajectory, but for routing.
    """
    return {
        "task_id": trajectory.task_id,
        "sample_index": trajectory.sample_index,
        "status": trajectory.status.value,
        "reward": trajectory.reward,
        "error": trajectory.error,
        "seed": trajectory.seed,
        "seconds": {name: round(value, 4) for name, value in trajectory.seconds.items()},
        "test_statuses": dict(trajectory.test_statuses),
        "turns": [
            {
                "text": turn.text,
                "tool_names": list(turn.tool_names),
                "num_malformed_calls": turn.num_malformed_calls,
                "observations": list(turn.observations),
            }
            for turn in trajectory.turns
        ],
        "tokens": trajectory.tokens.tolist(),
        "sampled_spans": list(_spans(trajectory)),
        "behaviour_logprobs": [
            float(f"{value:.9g}") for value in trajectory.behaviour_logprobs[trajectory.sampled].tolist()
        ],
    }


def _spans(trajectory: Trajectory) -> Iterator[list[int]]:
    keys = zip(trajectory.sampled.tolist(), trajectory.weights_versions.tolist(), strict=True)
    start = 0
    for (sampled, version), run in itertools.groupby(keys):
        end = start + sum(1 for _ in run)
        if sampled:
            yield [start, end, version]
        start = end


def parse_trajectory(record: Mapping[str, Any]) -> Trajectory:
    """The trajectory of a record made by `trajectory_record`."""
    tokens = np.asarray(record["tokens"], np.int32)
    sampled = np.zeros(tokens.shape, np.bool_)
    versions = np.full(tokens.shape, -1, np.int32)
    for start, end, version in record["sampled_spans"]:
        sampled[start:end] = True
        versions[start:end] = version
    logprobs = np.zeros(tokens.shape, np.float32)
    logprobs[sampled] = record["behaviour_logprobs"]
    return Trajectory(
        task_id=record["task_id"],
        sample_index=record["sample_index"],
        tokens=tokens,
        sampled=sampled,
        behaviour_logprobs=logprobs,
        weights_versions=versions,
        status=EpisodeStatus(record["status"]),
        reward=record["reward"],
        turns=tuple(
            Turn(
                text=turn["text"],
                tool_names=tuple(turn["tool_names"]),
                num_malformed_calls=turn["num_malformed_calls"],
                observations=tuple(turn["observations"]),
            )
            for turn in record["turns"]
        ),
        error=record["error"],
        test_statuses=record["test_statuses"],
        seconds=record["seconds"],
        seed=record["seed"],
    )


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
            self._file.append({"step": step, "purpose": purpose, **trajectory_record(trajectory)})

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
    """
    for record in read_json_lines(path):
        if record["purpose"] in purposes:
            yield record["step"], parse_trajectory(record)
