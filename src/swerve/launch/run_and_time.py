"""Runs one job from wherever it stands: train, then evaluate and check what is scored.

    swerve train JOB/RECIPE.toml --> swerve eval RUN/recipe.toml --manifest ... --> swerve mlperf check RUN/mlperf.log
    clears caches first, as root      of a scored run; its own log says when         of a scored run

Each is a process of its own with the command line that a user would type. A job that starts again goes on: an
evaluation always does; training does where the recipe keeps full checkpoints. A scored run keeps weights only, so it
starts anew in a directory of its own, RUN.2, and what there was stays where it is.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from swerve.launch.job import Job, read_job
from swerve.launch.state import JobState, Phase, read_state, write_state
from swerve.mlperf.read_log import read_log
from swerve.telemetry import (
    EVAL_CHECKPOINTS,
    JsonLines,
    collect_provenance,
    die_with_parent,
    hold_folder,
    write_atomic,
)
from swerve.types import MachineError

GO_ON_LATER = 75
"""Exit code of a job that was asked to make room (SIGUSR1) and goes on when it is started again."""
_GRACE_S = 60.0
"""Seconds that a process has to put away what it has started."""


class _RoomAsked(Exception):
    """The job was asked to make room for others."""


def run_job(folder: Path) -> int:
    """Run a job to its end, from wherever it stands.

    Args:
        folder: Of the job.

    Returns:
        0 where it is finished, 1 where it failed, `GO_ON_LATER` where it made room.

    Raises:
        SwerveError: It is no job, or it runs already.
    """
    job = read_job(folder)
    with hold_folder(folder), _RoomSignal() as room:
        state = read_state(folder)
        if state.phase == "finished":
            _say(f"{job.name}: finished already")
            return 0
        attempt = state.attempt + 1
        _record_attempt(job, attempt)
        state = write_state(folder, state, attempt=attempt, phase="waiting", cause="", run=state.run or str(job.run))
        try:
            _phases(job, state, room)
        except _RoomAsked:
            return _make_room(job)
        except MachineError as error:
            write_state(folder, read_state(folder), phase="failed", cause=str(error))
            _say(f"{job.name}: failed: {error}")
            return 1
        except BaseException as error:
            cause = "internal error" if isinstance(error, Exception) else "stopped by a signal"
            write_state(folder, read_state(folder), phase="interrupted", cause=cause)
            raise
    return 0


def _phases(job: Job, state: JobState, room: "_RoomSignal") -> None:
    words = [sys.executable, "-m", "swerve.cli"]
    run, training = _where(job, Path(state.run))
    if training is not None:
        state = _enter(job, state, "training", run=str(run))
        room.run([*words, "train", str(job.recipe_file), *training], job.work)
    findings, outcome = -1, ""
    if job.scored:
        state = _enter(job, state, "evaluating", run=str(run))
        manifest = ["--manifest", str(run / EVAL_CHECKPOINTS), "--workers", str(job.evaluation_workers)]
        room.run([*words, "eval", str(run / "recipe.toml"), *manifest], job.work)
        state = _enter(job, state, "checking")
        log = run / "mlperf.log"
        findings = _check(job, [*words, "mlperf", "check", str(log), "--json"], room)
        outcome = _outcome(log)
    write_state(job.folder, state, phase="finished", findings=findings, outcome=outcome)
    found = f", {outcome}, {findings} findings in {job.folder / 'check.json'}" if job.scored else ""
    _say(f"{job.name}: finished: {run}{found}")


def _where(job: Job, run: Path) -> tuple[Path, list[str] | None]:
    """The directory of the run, and what to add to `swerve train`; `None` where training is over."""
    if (run / "summary.json").exists():
        return run, None
    if not run.exists():
        return run, []
    if job.recipe.checkpoint.full:
        return run, ["--resume", "--run", str(run)]
    number = 2
    while (again := job.run.with_name(f"{job.run.name}.{number}")).exists():
        number += 1
    _say(f"{run}: holds weights only, from which training cannot go on: it starts anew in {again}")
    return again, ["--run.name", again.name]


def _enter(job: Job, state: JobState, phase: Phase, run: str = "") -> JobState:
    _say(f"{job.name}: {phase}, attempt {state.attempt}, seed {job.seed}")
    return write_state(job.folder, state, phase=phase, run=run or state.run)


def _check(job: Job, words: Sequence[str], room: "_RoomSignal") -> int:
    """The number of findings of the checkers, which are kept; a log with findings is a result all the same."""
    text = room.run(words, job.work, kept=True, codes=(0, 1))
    write_atomic(job.folder / "check.json", text)
    return len(json.loads(text)["findings"])


def _outcome(log: Path) -> str:
    stop = read_log(log).first("run_stop")
    return str(stop.metadata["status"]) if stop else ""


def _make_room(job: Job) -> int:
    """Leave, to go on later; training that could not go on has failed instead."""
    state = read_state(job.folder)
    if state.phase == "training" and not job.recipe.checkpoint.full:
        cause = "its time was up, and the training of a scored run cannot go on: ask for more time"
        write_state(job.folder, state, phase="failed", cause=cause)
        _say(f"{job.name}: failed: {cause}")
        return 1
    write_state(job.folder, state, phase="interrupted", cause="made room; goes on when it is started again")
    _say(f"{job.name}: makes room, and goes on when it is started again")
    return GO_ON_LATER


def _record_attempt(job: Job, attempt: int) -> None:
    with contextlib.closing(JsonLines(job.folder / "attempts.jsonl")) as file:
        provenance = collect_provenance()
        file.append({"attempt": attempt, **{key: provenance[key] for key in ("started_at", "source", "host")}})


class _RoomSignal:
    """Runs processes; SIGUSR1 ends the present one, for the job is to make room."""

    def __init__(self) -> None:
        self._asked = False
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "_RoomSignal":
        self._before = signal.signal(signal.SIGUSR1, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGUSR1, self._before)

    def _ask(self, *_: object) -> None:
        self._asked = True
        if self._process:
            self._process.terminate()

    def run(self, words: Sequence[str], work: Path, *, kept: bool = False, codes: Sequence[int] = (0,)) -> str:
        """Run a command to its end; whatever cuts this short ends it first.

        Args:
            words: The command.
            work: Directory to run it in.
            kept: Return its standard output instead of passing it on.
            codes: Exit codes that are no fault.

        Returns:
            Its standard output where `kept`, else nothing.

        Raises:
            MachineError: It exited with another code; the message is its last line.
        """
        if self._asked:
            raise _RoomAsked
        self._process = process = subprocess.Popen(
            words,
            cwd=work,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if kept else subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent if os.getpid() != 1 else None,
        )
        assert process.stdout
        tee = _Tee(process.stdout, passed_on=not kept)
        try:
            code = process.wait()
        finally:
            _end(process)
            self._process = None
            tee.join(timeout=5)
        if self._asked:
            raise _RoomAsked
        if code not in codes:
            how = f"exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
            raise MachineError(f"swerve {words[3]}: {how}: {tee.last.removeprefix('swerve: ') or 'it said nothing'}")
        return b"".join(tee.lines).decode()


class _Tee(threading.Thread):
    """Reads a process's output, passes it on or keeps it, and remembers the last line that says something."""

    def __init__(self, source: IO[bytes], *, passed_on: bool) -> None:
        super().__init__(daemon=True)
        self._source = source
        self._passed_on = passed_on
        self.lines: list[bytes] = []
        self.last = ""
        self.start()

    def run(self) -> None:
        """Reads to the end."""
        with self._source:
            for line in self._source:
                if self._passed_on:
                    sys.stdout.buffer.write(line)
                    sys.stdout.buffer.flush()
                else:
                    self.lines.append(line)
                self.last = line.decode(errors="replace").strip() or self.last


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process that still runs, by SIGTERM, on which it puts away what it has started."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _say(text: str) -> None:
    print(text, flush=True)
