"""A bash that outlives its commands: directory, variables and functions carry over from one to the next."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time

_COMMANDS, _STATUSES = 3, 4
"""Descriptors, in the shell, on which commands come in and their exit codes go out; commands do not inherit them."""

_LOOP = (
    f"while IFS= read -r -d '' -u {_COMMANDS} __command; do "
    f'eval "$__command" </dev/null {_COMMANDS}<&- {_STATUSES}>&-; '
    f"printf '%s\\0' \"$?\" >&{_STATUSES}; done"
)


class Shell:
    """One such process.

    Attributes:
        pid: Its process id.
        output_fd: Where output and errors of its commands are read.
        status_fd: Where the exit code of each command is read, once it has ended.
        has_ended: It closed its end of `status_fd`.
    """

    def __init__(self, program: str) -> None:
        """Start it in the current directory.

        Args:
            program: Path of bash.
        """
        pipes = [os.pipe2(os.O_CLOEXEC) for _ in range(3)]
        (command_read, self._command_fd), (self.status_fd, status_write), (self.output_fd, output_write) = pipes
        inherited = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (command_read, status_write)]
        try:
            self.pid = os.posix_spawn(
                program,
                [program, "--noprofile", "--norc", "-c", _LOOP, "bash"],
                os.environ,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, output_write, 1),
                    (os.POSIX_SPAWN_DUP2, output_write, 2),
                    (os.POSIX_SPAWN_DUP2, inherited[0], _COMMANDS),
                    (os.POSIX_SPAWN_DUP2, inherited[1], _STATUSES),
                ],
                setsid=True,
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
        except BaseException:
            self.close()
            os.close(self.output_fd)
            raise
        finally:
            for descriptor in (*inherited, command_read, status_write, output_write):
                os.close(descriptor)
        os.set_blocking(self._command_fd, False)
        os.set_blocking(self.status_fd, False)
        self._status = b""
        self.has_ended = False

    def send(self, command: str) -> None:
        """Have it run a command. What cannot be written within seconds is dropped, and the shell ends."""
        data = command.encode("utf-8", "surrogatepass").replace(b"\0", b"") + b"\0"
        deadline = time.monotonic() + 5.0
        while data and time.monotonic() < deadline:
            try:
                data = data[os.write(self._command_fd, data) :]
            except BlockingIOError:
                time.sleep(0.001)
            except BrokenPipeError:
                return
        if data:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def status(self) -> int | None:
        """Exit code of the command that has just ended, or `None` if none has."""
        with contextlib.suppress(BlockingIOError):
            data = os.read(self.status_fd, 64)
            self.has_ended = not data
            self._status += data
        code, end, self._status = self._status.partition(b"\0")
        if not end:
            self._status = code
            return None
        return int(code) if code.isdigit() else 1

    def close(self) -> None:
        """Close the descriptors other than that of the output."""
        os.close(self._command_fd)
        os.close(self.status_fd)
