"""Runs the compiler in a process of its own, and stops it as soon as enough is known.

    plan        traces all programs in one child; for each program one more child compiles
    quick       a compiling child is killed once its buffer assignment lies in the dump: code is not generated
    full        it runs to its end, which shows too whether every kernel compiles

A child writes into a temporary folder, is killed in every way out of here, and dies with this process. What a compile
gave is kept by the digest of what went into it, so that an unchanged program is not compiled again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from swerve.config import cache_directory
from swerve.planning.costs import Description
from swerve.planning.hlo import Emitted, parse_module, read_emitted
from swerve.planning.job import Job
from swerve.planning.memory import Memory, find_dump, read_memory
from swerve.planning.records import from_plain
from swerve.planning.topology import MIB, Topology, environment, parse_topology
from swerve.telemetry import write_json
from swerve.types import MachineError, SwerveError

Say = Callable[[str], None]
"""Shows a line of progress."""

FORMAT = 2
"""Of what is kept; entries of another one are made anew."""

_POLL_S = 0.2
_SAY_EVERY_S = 10.0
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """What the compiler says about one program.

    Attributes:
        memory: Its memory; None where XLA gave up before it knew.
        emitted: Its communication; None likewise.
        out_of_memory: XLA's message where the program does not fit; empty where it does.
        code_bytes: Size of its code; None where none was generated.
        seconds: Wall-clock seconds.
        cpu_seconds: Processor seconds.
        peak_rss_bytes: Largest memory of the compiling process.
        cached: Whether all this was known before.
    """

    memory: Memory | None
    emitted: Emitted | None
    out_of_memory: str
    code_bytes: int | None
    seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    cached: bool = False

    @property
    def used_bytes(self) -> int:
        """Memory that the program takes on a device, arguments included; 0 where it is not known."""
        if self.memory:
            return self.memory.total_bytes
        found = re.search(r"(?:Used |required [^(]*\()([\d.]+)([KMGT]?)", self.out_of_memory)
        return round(float(found[1]) * _UNITS[found[2]]) if found else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How to compile.

    Attributes:
        full: Generate code too.
        use_cache: Take and keep what is known by its digest.
        time_limit_s: Wall-clock seconds that one child may take; 0 sets no limit.
    """

    full: bool = False
    use_cache: bool = True
    time_limit_s: float = 3600.0


def check_compiler(topology: Topology) -> None:
    """Refuse a TPU topology where there is no compiler for it.

    Args:
        topology: What is planned for.

    Raises:
        SwerveError: libtpu is not installed.
    """
    if topology.is_tpu and importlib.util.find_spec("libtpu") is None:
        raise SwerveError(
            f"--topology {topology.name}: no compiler for TPUs here; pip install 'swerve[tpu]', or plan for cpu:N"
        )


def run_job(job: Job, options: Options, say: Say) -> dict[str, tuple[Description, Compiled]]:
    """Trace and compile every program of a job.

    Args:
        job: What is planned; its budget is that of a device.
        options: How to compile.
        say: Shows progress.

    Returns:
        By program.

    Raises:
        SwerveError: The job cannot be planned, or a program does not compile.
        MachineError: The compiler died, or took too long.
    """
    check_compiler(parse_topology(job.topology))
    with tempfile.TemporaryDirectory(prefix="swerve-plan-") as name:
        directory = Path(name)
        describing = _Child(job, "describe", directory / "describe", options, say)
        describing.run()
        described = {
            program: from_plain(Description, value) for program, value in describing.result("described").items()
        }
        state = state_bytes(described.values())
        done = {}
        for program, description in described.items():
            absent = sum(size for kind, size in state.items() if kind not in description.argument_bytes)
            budget = job.budget_mib - -(-absent // MIB)
            if budget < 1:
                raise SwerveError(f"--budget-mib {job.budget_mib}: parameters, gradients and optimizer alone need more")
            own = replace(job, budget_mib=budget)
            done[program] = (description, _compile(own, program, description, directory, options, say))
        return done


def state_bytes(descriptions: Iterable[Description]) -> dict[str, int]:
    """Bytes per device of what stays on it from program to program, by kind.

    Args:
        descriptions: Of all programs.

    Returns:
        Kinds other than `batch`.
    """
    state: dict[str, int] = {}
    for description in descriptions:
        for kind, size in description.argument_bytes.items():
            if kind != "batch":
                state[kind] = max(state.get(kind, 0), size)
    return state


def _compile(job: Job, program: str, description: Description, directory: Path, options: Options, say: Say) -> Compiled:
    limit = job.budget_mib if parse_topology(job.topology).is_tpu else None  # the CPU's compiler knows none
    words = (FORMAT, description.digest, job.topology, limit, dict(job.mesh), options.full)
    key = hashlib.sha256(json.dumps(words).encode()).hexdigest()
    kept = cache_directory() / "plan" / f"{key}.json"
    if options.use_cache and kept.exists():
        say(f"{program}: known from an earlier plan")
        return replace(from_plain(Compiled, json.loads(kept.read_text(encoding="utf-8"))), cached=True)
    child = _Child(job, program, directory / program, options, say)
    child.run()
    say(f"{program}: reading what the compiler wrote")
    compiled = _read(child, job, options.full)
    if options.use_cache:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_json(kept, asdict(compiled))
    return compiled


def _read(child: _Child, job: Job, full: bool) -> Compiled:
    outcome = child.result("outcome") if (child.directory / "outcome.json").exists() else {}
    memory = emitted = None
    if dump := find_dump(child.directory / "dump"):
        module = parse_module(dump.hlo.read_text(encoding="utf-8"))
        memory, emitted = read_memory(dump, module), read_emitted(module, job.mesh)
    elif "out_of_memory" not in outcome:
        raise MachineError(f"{child.stage}: XLA left no report of its buffers in {child.directory / 'dump'}")
    return Compiled(
        memory=memory,
        emitted=emitted,
        out_of_memory=outcome.get("out_of_memory", ""),
        code_bytes=outcome.get("code_bytes") if full else None,
        seconds=round(child.seconds, 1),
        cpu_seconds=round(child.cpu_seconds, 1),
        peak_rss_bytes=child.peak_rss_bytes,
    )


class _Child:
    """A process that works on one stage of a job, watched until enough is known.

    Args:
        job: What is planned.
        stage: `describe`, or a program.
        directory: Where it works; made here.
        options: How far it goes.
        say: Shows progress.
    """

    def __init__(self, job: Job, stage: str, directory: Path, options: Options, say: Say) -> None:
        self.stage = stage
        self.directory = directory
        self.seconds = self.cpu_seconds = 0.0
        self.peak_rss_bytes = 0
        self._options = options
        self._say = say
        self._environment = environment(parse_topology(job.topology), directory)
        (directory / "dump").mkdir(parents=True)
        write_json(directory / "job.json", asdict(job))

    def run(self) -> None:
        """Starts it, waits until enough is known, and ends it."""
        command = [sys.executable, "-m", "swerve.planning.child", str(self.directory / "job.json"), self.stage]
        with (self.directory / "log").open("wb") as log:
            process = subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            self._watch(process)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode > 0 or (process.returncode < 0 and not self._enough()):
            self._explain(process.returncode)
        if (self.directory / "refused.json").exists():
            raise SwerveError(f"{self.stage}: {self.result('refused')['error']}")

    def result(self, name: str) -> dict[str, Any]:
        """What it wrote."""
        return json.loads((self.directory / f"{name}.json").read_text(encoding="utf-8"))

    def _watch(self, process: subprocess.Popen[bytes]) -> None:
        began = said = time.monotonic()
        phase = ""
        while process.poll() is None:
            self.seconds = time.monotonic() - began
            self._measure(process.pid)
            if self._enough():
                return
            if 0 < self._options.time_limit_s < self.seconds:
                raise MachineError(
                    f"{self.stage}: not done after {self.seconds:.0f} s; raise --time-limit-s, or wait for less to run"
                )
            if phase != (phase := self._phase()) or time.monotonic() - said > _SAY_EVERY_S:
                said = time.monotonic()
                self._say(f"{self.stage}: {phase}, {self.seconds:.0f} s, {self.peak_rss_bytes / 2**30:.1f} GiB")
            time.sleep(_POLL_S)

    def _phase(self) -> str:
        if self.stage == "describe":
            return "tracing all programs"
        if find_dump(self.directory / "dump"):
            return "generating code"
        return "optimising and assigning buffers" if any((self.directory / "dump").iterdir()) else "tracing"

    def _enough(self) -> bool:
        """Whether the buffer assignment is there, whole, and nothing more is wanted."""
        if self.stage == "describe" or self._options.full or not (dump := find_dump(self.directory / "dump")):
            return False
        # XLA writes the report last, and in one go.
        return time.time() - dump.report.stat().st_mtime > 2 * _POLL_S

    def _measure(self, pid: int) -> None:
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            self.peak_rss_bytes = max(self.peak_rss_bytes, process.memory_info().rss)
            times = process.cpu_times()
            self.cpu_seconds = times.user + times.system

    def _explain(self, code: int) -> None:
        log = (self.directory / "log").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = log[-1][:300] if log else "it said nothing"
        what = f"was killed by signal {-code}" if code < 0 else "failed"
        hint = "; free some memory" if code == -signal.SIGKILL else ""
        raise MachineError(f"{self.stage}: the compiling process {what}: {last}{hint}")
