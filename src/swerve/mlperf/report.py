"""`swerve mlperf report`: what a set of logs says, by global batch size, as a page, pictures and JSON."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from swerve.mlperf.check import find_logs
from swerve.mlperf.figures import draw_figures
from swerve.mlperf.page import write_page
from swerve.mlperf.read_log import read_log
from swerve.mlperf.run_summary import PARTS, RunSummary, olympic_mean, summarize
from swerve.telemetry import write_atomic, write_json
from swerve.types import SwerveError


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Runs of one global batch size.

    Attributes:
        global_batch_size: As logged; `None` where it was not.
        runs: The runs, by path.
    """

    global_batch_size: int | None
    runs: tuple[RunSummary, ...]

    @property
    def num_converged(self) -> int:
        """Runs that reached the target."""
        return sum(run.outcome == "converged" for run in self.runs)

    @property
    def olympic_score_s(self) -> float | None:
        """Mean score without the best and the worst."""
        return olympic_mean([run.score_s for run in self.runs])

    def mean(self, values: Sequence[float | None]) -> float | None:
        """Mean of what there is."""
        known = [value for value in values if value is not None]
        return fmean(known) if known else None

    def to_json(self) -> dict[str, object]:
        """The summary of the group as JSON values."""
        steps = [step for run in self.runs for step in run.steps]
        gaps = [run.gap for run in self.runs]
        return {
            "global_batch_size": self.global_batch_size,
            "runs": len(self.runs),
            "converged": self.num_converged,
            "olympic_score_s": self.olympic_score_s,
            "mean_score_s": self.mean([run.score_s for run in self.runs]),
            "mean_train_to_target_s": self.mean([run.train_to_target_s for run in self.runs]),
            "mean_samples_to_target": self.mean([run.samples_to_target for run in self.runs]),
            "mean_accuracy": self.mean([found.accuracy for run in self.runs for found in run.evaluations[-1:]]),
            "mean_step_time_s": self.mean([step.step_time_s for step in steps]),
            **{f"mean_{part}_s": self.mean([step.parts_s.get(part) for step in steps]) for part in PARTS},
            "mean_gap_s": self.mean([gap.gap_s if gap else None for gap in gaps]),
            "mean_gap_share": self.mean([gap.share if gap else None for gap in gaps]),
        }


def collect_runs(paths: Sequence[Path]) -> list[RunSummary]:
    """Reads every log that the paths hold.

    Args:
        paths: Logs, and folders in which every file with the token is one.

    Returns:
        The runs, by path, each once.

    Raises:
        SwerveError: A path is missing, or there is no log at all.
    """
    logs = {
        log.path: log
        for path in paths
        for log in ([log for group in find_logs(path).values() for log in group] if path.is_dir() else [read_log(path)])
    }
    if not logs:
        raise SwerveError(f"{', '.join(map(str, paths))}: no log in it: name files or folders with :::MLLOG lines")
    return [summarize(logs[path]) for path in sorted(logs)]


def group_runs(runs: Sequence[RunSummary]) -> list[Group]:
    """Runs by global batch size, the smallest first, those without one last."""
    sizes = sorted({run.global_batch_size for run in runs}, key=lambda size: (size is None, size or 0))
    return [
        Group(global_batch_size=size, runs=tuple(run for run in runs if run.global_batch_size == size))
        for size in sizes
    ]


def run_names(runs: Sequence[RunSummary]) -> dict[Path, str]:
    """Names short enough for a picture: paths without what all share."""
    parents = [str(run.path.resolve().parent) for run in runs]
    shared = Path(os.path.commonpath(parents))
    return {run.path: str(run.path.resolve().relative_to(shared)) for run in runs}


def make_report(paths: Sequence[Path], out: Path) -> dict[str, Any]:
    """Writes `report.html`, its pictures and `report.json`.

    Args:
        paths: Logs and folders of logs.
        out: Folder to write to.

    Returns:
        What `report.json` holds.

    Raises:
        SwerveError: There is no log.
        MachineError: matplotlib is missing, or nothing can be written.
    """
    runs = collect_runs(paths)
    groups, names = group_runs(runs), run_names(runs)
    pictures = draw_figures([group.runs for group in groups], names)
    document: dict[str, Any] = {
        "groups": [group.to_json() for group in groups],
        "runs": [{"name": names[run.path], **run.to_json()} for run in runs],
    }
    for name, data in pictures.items():
        write_atomic(out / f"{name}.png", data)
    write_json(out / "report.json", document)
    write_atomic(out / "report.html", write_page(groups, names, pictures))
    return document
