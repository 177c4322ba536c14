"""A server that Swerve itself starts on this machine, and of which nothing is left however Swerve ends."""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

from swerve.agents.outside.program import SUPERVISOR
from swerve.engine.errors import EngineError
from swerve.engine.remote_http import HttpClient
from swerve.sandboxes.plan import GUEST_DIR
from swerve.types import SwerveError

_POLL_S = 0.2
_GRACE_S = 15.0
_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1"}
"""Serve what hand-overs of weights need."""


class ServerProcess:
    """Starts and ends the server of one URL.

    Args:
        command: Command line with the placeholders `{weights}`, `{host}` and `{port}`.
        client: Of the URL.
        log: File that takes all the server says.
        load_timeout_s: Seconds that it may take until it answers.
    """

    def __init__(self, command: str, client: HttpClient, log: Path, load_timeout_s: float) -> None:
        self._command = command
        self._client = client
        self._log = log
        self._load_timeout_s = load_timeout_s
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def runs(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def start(self, weights: Path) -> None:
        """Start the server on some files, and wait until it is healthy.

        Raises:
            SwerveError: Something else answers at its URL.
            EngineError: It cannot be started, ends, or takes too long.
        """
        self._refuse_taken()
        places = {"weights": str(weights), "host": self._client.host, "port": str(self._client.port)}
        argv = [word.format_map(places) for word in shlex.split(self._command)]
        with self._log.open("ab") as log:
            process = self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", str(SUPERVISOR), str(GUEST_DIR.parent), *argv],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, **_ENVIRONMENT},
                start_new_session=True,
            )
        deadline = time.monotonic() + self._load_timeout_s
        while not self._healthy():
            if process.poll() is not None:
                raise EngineError(f"{self._client.url}: the server ended: {self._last_line()} ({self._log})")
            if time.monotonic() > deadline:
                raise EngineError(
                    f"{self._client.url}: the server is not up after engine.load_timeout_s = {self._load_timeout_s:g}: "
                    f"{self._last_line()} ({self._log})"
                )
            time.sleep(_POLL_S)

    def stop(self) -> None:
        """End it, by force where it does not end by itself. Idempotent."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        assert process.stdin is not None
        process.stdin.close()  # the supervisor kills what is left
        process.wait()

    def _healthy(self) -> bool:
        try:
            self._client.call("GET", "/health", timeout_s=_GRACE_S)
        except EngineError:
            return False
        return True

    def _refuse_taken(self) -> None:
        with contextlib.suppress(OSError), socket.create_connection((self._client.host, self._client.port), _GRACE_S):
            raise SwerveError(f"{self._client.url}: something answers there already: end it, or remove engine.command")

    def _last_line(self) -> str:
        with self._log.open("rb") as file:
            lines = deque((line.decode("utf-8", "replace").strip() for line in file), maxlen=20)
        return next((line[-300:] for line in reversed(lines) if line), "it said nothing")
