"""Runs a program and leaves nothing of it behind: `python -I -S supervisor.py FOLDER PROGRAM [ARGUMENT ...]`.

Standard library only. It becomes the parent of every process below whose own parent has ended. When the program ends,
or when standard input is closed because whoever started this one wants it or has died, everything below is killed.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys

_NOT_FOUND = 127


def main(folder: str, argv: list[str]) -> int:
    """Run the program to its end, or to that of standard input.

    Args:
        folder: Where the package `guest` lies.
        argv: The program and its arguments.

    Returns:
        The exit code: the program's, 128 + n where signal n ended it, 137 where it was killed.
    """
    sys.path.insert(0, folder)
    from guest.system import adopt_orphans, end_descendants  # type: ignore[import-not-found]

    adopt_orphans()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # unlike SIG_IGN, the program does not inherit it
    try:
        program = subprocess.Popen(argv, stdin=subprocess.DEVNULL)
    except OSError as error:
        sys.stderr.write(f"{argv[0]}: {error.strerror}\n")
        return _NOT_FOUND
    try:
        ended = os.pidfd_open(program.pid)
        ready, _, _ = select.select([ended, 0], [], [])
        if ended not in ready:
            return 128 + signal.SIGKILL
        code = program.wait()
        return code if code >= 0 else 128 - code
    finally:
        end_descendants()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
