"""How far a job has come: one small file that the job itself writes, whatever runs it."""

import datetime
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from swerve.telemetry import write_json

Phase = Literal["waiting", "training", "evaluating", "checking", "finished", "failed", "interrupted"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobState:
    """What a job last said of itself.

    Attributes:
        phase: `interrupted` goes on when the job is started again, `finished` and `failed` have ended.
        attempt: Times it was started.
        run: Directory of its run; empty before the first start.
        cause: Why it failed or was interrupted.
        outcome: Of a finished scored run, `success` or `aborted`, as its log says.
        findings: Of `swerve mlperf check` on the log; -1 where it was not checked.
        updated_at: When it said so, UTC.
    """

    phase: Phase = "waiting"
    attempt: int = 0
    run: str = ""
    cause: str = ""
    outcome: str = ""
    findings: int = -1
    updated_at: str = ""


def read_state(folder: Path) -> JobState:
    """The state of the job in a folder."""
    path = folder / "state.json"
    return (
        JobState(**cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8"))))
        if path.exists()
        else JobState()
    )


def write_state(folder: Path, state: JobState, **changes: Any) -> JobState:
    """Keep a changed state.

    Args:
        folder: Of the job.
        state: Before.
        changes: Fields by name.

    Returns:
        The state as kept.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    state = replace(state, **changes, updated_at=now)
    write_json(folder / "state.json", asdict(state))
    return state
