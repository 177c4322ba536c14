"""Process 1 of a container: a warm interpreter that forks sandboxes, kills them, and reports their ends."""

# Descriptors and system calls throughout; pathlib would only cost its import.

from __future__ import annotations

import contextlib
import fcntl
import gc
import importlib.util
import json
import os
import select
import shutil
import signal
import socket
import sys
import traceback
import types
from collections.abc import Iterator
from typing import Any, NoReturn

from .sandbox import Sandbox, one_line, send_frame
from .system import (
    LOWER_DIR,
    Wakeup,
    clone,
    ended_children,
    enter_namespaces,
    join_new_keyring,
    set_limits,
    silence_standard_streams,
)


def load_harness(config: dict[str, Any]) -> types.ModuleType | None:
    """Import the harness, if there is one, and have it preload."""
    sys.path[:0] = config["python_paths"]
    if config["harness"] is None:
        return None
    spec = importlib.util.spec_from_file_location("swerve_harness", config["harness"])
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["swerve_harness"] = module
    spec.loader.exec_module(module)
    if hasattr(module, "preload"):
        module.preload(config["harness_args"])
    return module


@contextlib.contextmanager
def _ended_by_hangup(control: socket.socket) -> Iterator[None]:
    """While the block runs, however long, end this process as soon as the host closes its end of the socket.

    The host says nothing before it has heard that the harness is loaded, so any news on the socket is its end.
    """
    signal.signal(signal.SIGIO, lambda *_: os._exit(0))
    fcntl.fcntl(control, fcntl.F_SETOWN, os.getpid())
    flags = fcntl.fcntl(control, fcntl.F_GETFL)
    fcntl.fcntl(control, fcntl.F_SETFL, flags | os.O_ASYNC)
    with contextlib.suppress(BlockingIOError):
        control.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        os._exit(0)
    yield
    fcntl.fcntl(control, fcntl.F_SETFL, flags)
    signal.signal(signal.SIGIO, signal.SIG_DFL)


class Zygote:
    """Process 1 of the container: forks a sandbox per request, kills them, and reports their ends."""

    def __init__(self, control: socket.socket, config: dict[str, Any]) -> None:
        self._control = control
        self._config = config
        self._harness: types.ModuleType | None = None
        self._sandboxes: dict[int, int] = {}
        self._owner = (os.getuid(), os.getgid())

    def run(self) -> NoReturn:
        """Preload the harness, then serve until the host closes the control socket."""
        try:
            with _ended_by_hangup(self._control):
                if self._config["has_workspace"]:
                    shutil.copytree("/run/source", LOWER_DIR, symlinks=True, dirs_exist_ok=True)
                self._harness = load_harness(self._config)
        except BaseException:
            self._send({"event": "failed_preload", "message": traceback.format_exc(limit=-8)[-8000:]})
            os._exit(1)
        gc.collect()
        gc.freeze()
        wakeup = Wakeup()
        self._send({"event": "ready"})
        poller = select.poll()
        poller.register(self._control, select.POLLIN)
        poller.register(wakeup.read_fd, select.POLLIN)
        while True:
            for descriptor, _ in poller.poll():
                if descriptor == wakeup.read_fd:
                    wakeup.clear()
                else:
                    self._serve(wakeup)
            self._reap()

    def _send(self, message: dict[str, Any]) -> None:
        try:
            self._control.sendall(json.dumps(message).encode())
        except OSError:
            os._exit(0)

    def _serve(self, wakeup: Wakeup) -> None:
        data, descriptors, _, _ = socket.recv_fds(self._control, 4096, 1)
        if not data:
            os._exit(0)
        message = json.loads(data)
        if message["op"] == "kill":
            for pid, number in self._sandboxes.items():
                if number == message["sandbox"]:
                    os.kill(pid, signal.SIGKILL)
            return
        os.set_inheritable(descriptors[0], False)
        try:
            pid = clone()
        except OSError as error:
            os.close(descriptors[0])
            self._send({"event": "failed_start", "sandbox": message["sandbox"], "message": str(error)})
            return
        if pid == 0:
            wakeup.close()
            self._control.close()
            _become_sandbox(socket.socket(fileno=descriptors[0]), self._config, self._harness, self._owner)
        os.close(descriptors[0])
        self._sandboxes[pid] = message["sandbox"]

    def _reap(self) -> None:
        for pid, status in ended_children():
            if pid in self._sandboxes:
                number = self._sandboxes.pop(pid)
                self._send({"event": "exited", "sandbox": number, "status": os.waitstatus_to_exitcode(status)})


def _become_sandbox(
    connection: socket.socket,
    config: dict[str, Any],
    harness: types.ModuleType | None,
    owner: tuple[int, int],
) -> NoReturn:
    try:
        limits = config["limits"]
        join_new_keyring()
        enter_namespaces(*owner, config)
        set_limits(limits)
        silence_standard_streams()
        Sandbox(connection, limits, harness).run()
        os._exit(0)
    except BaseException as error:
        detail = traceback.format_exc(limit=-8)[-4000:]
        with contextlib.suppress(OSError):
            message = {"kind": "machine", "message": one_line(error), "detail": detail}
            send_frame(connection, {"id": -1, "error": message})
    finally:
        os._exit(1)
