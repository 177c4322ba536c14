"""Watching a run: this package owns metrics on one step axis, phases and rates, the run directory, and the displays.

Whatever a run leaves on the disk is whole or absent, a full disk is one clear line, and no secret is written.
"""

from swerve.telemetry.files import (
    JsonLines,
    LineFile,
    atomic_file,
    file_digest,
    force_to_disk,
    hold_folder,
    keep_json_lines,
    machine_faults,
    read_json_lines,
    write_atomic,
    write_json,
)
from swerve.telemetry.metrics import Metrics, Scalar, Sink, TensorBoardSink, read_metrics
from swerve.telemetry.phases import PhaseTimer
from swerve.telemetry.progress import Progress, open_progress
from swerve.telemetry.provenance import collect_provenance, folder_facts
from swerve.telemetry.resources import PeakMemory, die_with_parent, has_huge_pages, restart_with_huge_pages
from swerve.telemetry.run_directory import (
    EVAL_CHECKPOINTS,
    RunDirectory,
    choose_path,
    identity_digest,
    latest_path,
    recipe_of,
)
from swerve.telemetry.throughput import ThroughputMeter
from swerve.telemetry.trajectories import TrajectoryLog, read_trajectories
from swerve.telemetry.trajectory_records import trajectory_from_json, trajectory_to_json

__all__ = [
    "EVAL_CHECKPOINTS",
    "JsonLines",
    "LineFile",
    "Metrics",
    "PeakMemory",
    "PhaseTimer",
    "Progress",
    "RunDirectory",
    "Scalar",
    "Sink",
    "TensorBoardSink",
    "ThroughputMeter",
    "TrajectoryLog",
    "atomic_file",
    "choose_path",
    "collect_provenance",
    "die_with_parent",
    "file_digest",
    "folder_facts",
    "force_to_disk",
    "has_huge_pages",
    "hold_folder",
    "identity_digest",
    "keep_json_lines",
    "latest_path",
    "machine_faults",
    "open_progress",
    "read_json_lines",
    "read_metrics",
    "read_trajectories",
    "recipe_of",
    "restart_with_huge_pages",
    "trajectory_from_json",
    "trajectory_to_json",
    "write_atomic",
    "write_json",
]
