"""Gives root away before bubblewrap or Apptainer starts. Standard library only; runs as a process of its own.

A root launcher must not hand root's identity to a sandbox: `--uid` alone would leave it able to read root's files. In a
mount namespace of its own this program binds every source below an in-memory directory (so that sources in private
folders such as /root stay reachable), becomes an unprivileged user for good, and turns into the command.
"""

# Descriptors and system calls throughout; pathlib would only cost its import.
# ruff: noqa: PTH102, PTH103, PTH112, PTH120, PTH123

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any, NoReturn

_CLONE_NEWNS = 0x00020000
_MS_NOSUID, _MS_BIND, _MS_REC, _MS_PRIVATE = 2, 4096, 16384, 1 << 18

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _mount(source: str, target: str, kind: str | None, flags: int, options: str | None = None) -> None:
    encoded = [None if value is None else value.encode() for value in (source, target, kind)]
    result = _libc.mount(*encoded, ctypes.c_ulong(flags), None if options is None else options.encode())
    _check(result, f"mount {target}")


def stage(sources: dict[str, str], directory: str, files: dict[str, str], owner: int) -> None:
    """Bind every source at its place below `directory`, in a new mount namespace.

    Args:
        sources: Relative path below `directory` to absolute source path.
        directory: An existing directory; an in-memory file system covers it, in this namespace only.
        files: Absolute path of an existing file to the text that stands in its place, in this namespace only.
        owner: User and group of the folder `home` that is made there.
    """
    _check(_libc.unshare(_CLONE_NEWNS), "unshare")
    _mount("none", "/", None, _MS_REC | _MS_PRIVATE)
    descriptors = {name: os.open(source, os.O_PATH) for name, source in sources.items()}
    _mount("stage", directory, "tmpfs", _MS_NOSUID, "size=16m,mode=0755")
    for name, descriptor in descriptors.items():
        target = f"{directory}/{name}"
        source = f"/proc/self/fd/{descriptor}"
        if os.path.isdir(source):
            os.makedirs(target)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_WRONLY | os.O_CREAT, 0o644))
        _mount(source, target, None, _MS_BIND | _MS_REC)
        os.close(descriptor)
    os.mkdir(f"{directory}/home", 0o700)
    os.chown(f"{directory}/home", owner, owner)
    for index, (path, text) in enumerate(files.items()):
        with open(f"{directory}/file{index}", "w", encoding="utf-8") as file:
            file.write(text)
        _mount(f"{directory}/file{index}", path, None, _MS_BIND)


def main() -> NoReturn:
    """Run as `python launcher.py JSON`."""
    plan: dict[str, Any] = json.loads(sys.argv[1])
    os.umask(0o022)
    try:
        stage(plan["sources"], plan["directory"], plan.get("files", {}), plan["uid"])
        os.setgroups([])
        os.setresgid(plan["gid"], plan["gid"], plan["gid"])
        os.setresuid(plan["uid"], plan["uid"], plan["uid"])
        os.execve(plan["command"][0], plan["command"], plan.get("environment", {"LC_ALL": "C"}))
    except OSError as error:
        sys.stderr.write(f"launcher: {error}\n")
    os._exit(1)


if __name__ == "__main__":
    main()
