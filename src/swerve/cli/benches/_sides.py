"""Processes that a bench compares, and the environment that a foreign one runs in."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from swerve.config import cache_directory
from swerve.types import MachineError, SwerveError

PEER_PACKAGES = ("torch==2.13.0", "transformers==5.24.0")
TRL_PACKAGES = (*PEER_PACKAGES, "trl==1.16.0", "accelerate==1.15.0", "datasets==5.2.0")


class Side:
    """A process that answers each JSON line with one."""

    def __init__(self, name: str, process: subprocess.Popen[str], log: IO[str]) -> None:
        self.name = name
        self._process = process
        self._log = log

    def ask(self, call: str, **arguments: Any) -> dict[str, Any]:
        """The answer to one request.

        Raises:
            MachineError: The process died or could not do it.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"call": call, **arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise MachineError(f"bench: {self.name} died during {call}: {self._last_words()}")
        answer = json.loads(line)
        if "error" in answer:
            raise MachineError(f"bench: {self.name} cannot {call}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        self._process.wait()
        self._log.seek(0)
        lines = self._log.read().strip().splitlines()
        return lines[-1] if lines else f"exit code {self._process.returncode}; too little memory?"


@contextlib.contextmanager
def start_side(name: str, command: Sequence[str | Path], threads: int) -> Iterator[Side]:
    """Run a side on the first `threads` cores until the context ends."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    words = list(map(str, command))
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            os.sched_setaffinity(process.pid, cores)  # before it starts a thread
            yield Side(name, process, log)
        finally:
            process.kill()
            process.communicate()


def threads_of(wanted: int) -> int:
    """Threads of each side: as many as are wanted, all cores of this process for 0.

    Raises:
        SwerveError: There are not so many.
    """
    available = len(os.sched_getaffinity(0))
    threads = wanted or available
    if not 1 <= threads <= available:
        raise SwerveError(f"--threads {threads}: this process may use 1 to {available} cores")
    return threads


def require_agreement(
    title: str,
    whose: str,
    ours: Mapping[str, Any],
    theirs: Mapping[str, Any],
    tolerance: float,
    least_size: Mapping[str, float] | None = None,
) -> None:
    """Refuse to compare sides that do not compute the same.

    Args:
        title: Of the comparison.
        whose: The other side, in the genitive.
        ours: Numbers, or lists of them, by name.
        theirs: Likewise.
        tolerance: Largest difference, relative to the largest of theirs.
        least_size: What counts as the largest where all are smaller, by name.

    Raises:
        MachineError: A difference is larger.
    """
    for name, expected in theirs.items():
        wanted, found = (value if isinstance(value, list) else [value] for value in (expected, ours[name]))
        size = max(*map(abs, wanted), (least_size or {}).get(name, 0.0))
        error = max(abs(a - b) for a, b in zip(found, wanted, strict=True)) / size
        if not error <= tolerance:
            raise MachineError(
                f"bench: {title}: {name.replace('_', ' ')} differs from {whose} by {error:.1e} of its size, more than "
                f"{tolerance:g}: the two do not compute the same"
            )


def peer_python(given: str | None, packages: Sequence[str] = PEER_PACKAGES) -> Path:
    """The interpreter of the peer: as given, or of an environment made once and kept in the cache directory.

    Args:
        given: Path of an interpreter.
        packages: What it needs, pinned; importable under the names before the version.

    Raises:
        SwerveError: The given interpreter lacks a package.
        MachineError: The environment cannot be made.
    """
    if given:
        python = Path(given)
        names = ["numpy", *(package.partition("==")[0] for package in packages)]
        if _run([python, "-c", f"import {', '.join(names)}"]).returncode:
            raise SwerveError(f"--peer-python {given}: cannot import {', '.join(names[:-1])} and {names[-1]}")
        return python
    directory = cache_directory() / "peers" / "-".join(p.replace("==", "-") for p in packages)
    python = directory / "bin" / "python"
    if not (directory / "complete").exists():
        print(f"making an environment with {' and '.join(packages)} in {directory} ...", file=sys.stderr, flush=True)
        shutil.rmtree(directory, ignore_errors=True)
        for command in (
            [sys.executable, "-m", "venv", directory],
            [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "numpy", *packages],
        ):
            done = _run(command)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise MachineError(f"{directory}: the peer's environment cannot be made: {last}; or use --peer-python")
        (directory / "complete").touch()
    return python


def _run(command: Sequence[str | Path]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    except OSError as error:
        raise SwerveError(f"{command[0]}: cannot be run: {error.strerror}") from error
