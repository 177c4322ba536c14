"""The guest of a container, or of a plain process, that is one sandbox: it talks over its standard streams.

The first frame says what the sandbox is: `limits`, `workdir`, `harness`, `harness_args`, `python_paths`, `environment`,
`inherit` (whether the image's own variables count), `trees` (archives by the directory they are unpacked into), and
perhaps `directories` and `links` to make, and what to `discard` in the end. Trees in `remove` are there for the harness
to load, and are deleted before anything else runs.
"""

# ruff: noqa: PTH103, PTH108, PTH112, PTH120, PTH211

from __future__ import annotations

import base64
import gc
import io
import json
import os
import shutil
import struct
import tarfile
import tempfile
import traceback
from typing import Any, NoReturn

from .sandbox import Sandbox, one_line, send_frame
from .system import (
    adopt_orphans,
    drop_privileges,
    end_descendants,
    join_new_keyring,
    set_limits,
    silence_standard_streams,
)
from .zygote import load_harness

_RUNTIME_PREFIXES = ("APPTAINER", "SINGULARITY", "DOCKER", "PODMAN")
_RUNTIME_NAMES = frozenset({"PS1", "PROMPT_COMMAND", "container", "HOSTNAME", "LD_LIBRARY_PATH"})


class Stream:
    """Standard input and output as one connection, out of the reach of whatever else writes to them."""

    def __init__(self) -> None:
        self._read_fd, self._write_fd = (os.dup(descriptor) for descriptor in (0, 1))

    def fileno(self) -> int:
        """Descriptor to poll for input."""
        return self._read_fd

    def recv(self, size: int) -> bytes:
        """Read what there is, waiting for the first byte; nothing means that the host is gone."""
        return os.read(self._read_fd, size)

    def sendall(self, data: bytes) -> None:
        """Write everything."""
        view = memoryview(data)
        while view:
            view = view[os.write(self._write_fd, view) :]

    def frame(self) -> dict[str, Any]:
        """Read the first frame."""
        (length,) = struct.unpack(">I", self._exactly(4))
        return json.loads(self._exactly(length))

    def _exactly(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            chunk = self.recv(min(size - len(data), 1 << 20))
            if not chunk:
                os._exit(0)
            data += chunk
        return bytes(data)


def main() -> NoReturn:
    """Become the sandbox."""
    stream = Stream()
    try:
        join_new_keyring()
        config = stream.frame()
        silence_standard_streams()
        _run(stream, config)
        os._exit(0)
    except BaseException as error:
        message = {"kind": "machine", "message": one_line(error), "detail": traceback.format_exc(limit=-8)[-4000:]}
        send_frame(stream, {"id": -1, "error": message})
    finally:
        os._exit(1)


def _run(stream: Stream, config: dict[str, Any]) -> None:
    adopt_orphans()
    os.umask(0o022)
    _unpack(config["trees"])
    for path in config.get("directories", ()):
        os.makedirs(path, exist_ok=True)
    for path, target in config.get("links", {}).items():
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    environment = config["environment"]
    inherited = {key: value for key, value in os.environ.items() if config["inherit"] and not _is_of_the_runtime(key)}
    os.environ.clear()
    # An image knows best where its programs are.
    os.environ.update(inherited | environment | {"PATH": inherited.get("PATH", environment["PATH"])})
    workdir = config["workdir"]
    os.makedirs(workdir, exist_ok=True)
    try:
        harness = load_harness(config)
    except BaseException as error:
        send_frame(stream, {"id": -1, "error": {"kind": "harness", "message": one_line(error)}})
        os._exit(1)
    for path in config["remove"]:
        shutil.rmtree(path) if os.path.isdir(path) else os.unlink(path)
    os.chdir(workdir)
    set_limits(config["limits"])
    drop_privileges()
    gc.freeze()
    service_dir = tempfile.mkdtemp(prefix=".swerve-", dir=config["service_parent"])
    try:
        Sandbox(stream, config["limits"], harness, workdir, service_dir).run()
    finally:
        if os.getpid() != 1:
            end_descendants()
        for path in config.get("discard", ()):
            shutil.rmtree(path, ignore_errors=True)


def _is_of_the_runtime(name: str) -> bool:
    return name in _RUNTIME_NAMES or name.startswith(_RUNTIME_PREFIXES)


def _unpack(trees: dict[str, str]) -> None:
    for target, data in trees.items():
        os.makedirs(target, exist_ok=True)
        with tarfile.open(fileobj=io.BytesIO(base64.b64decode(data))) as archive:
            archive.extractall(target, filter="fully_trusted")
