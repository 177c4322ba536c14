"""`swerve`: finds the command, runs it, and turns every fault into one line and an exit code.

Exit codes: 0 done; 1 the machine is at fault, or Swerve is; 2 the input is at fault; 130 and 143 after Ctrl-C and
SIGTERM, once everything that runs has been put away. Nothing but the standard library is imported before a command is
known, so that help answers at once.
"""

import contextlib
import difflib
import os
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import NoReturn

import swerve
from swerve.cli.registry import commands

_COMPUTING = frozenset({"train", "pretrain", "eval", "serve", "rollout", "bench", "ab"})
"""Commands whose process allocates as CPU programs do."""
_INTERRUPTED = 128 + signal.SIGINT
_TERMINATED = 128 + signal.SIGTERM


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line.

    Args:
        argv: Words after `swerve`; those of this process where `None`.

    Returns:
        The exit code.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if argv is None and words and words[0] in _COMPUTING and not {"-h", "--help"} & set(words):
        from swerve.telemetry import restart_with_huge_pages

        restart_with_huge_pages()
    try:
        with _termination_unwinds():
            return _dispatch(words)
    except KeyboardInterrupt:
        _complain("interrupted", "--debug" in words)
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has seen enough; stop the interpreter from complaining when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        from swerve.types import SwerveError

        if isinstance(error, SwerveError):
            _complain(str(error), "--debug" in words)
            return error.exit_code
        _complain(f"internal error: {_where(error)} (--debug shows the traceback)", "--debug" in words)
        return 1


def _dispatch(words: list[str]) -> int:
    name = words[0] if words else "--help"
    if name in ("-h", "--help", "help"):
        print(_help())
        return 0
    if name == "--version":
        print(swerve.__version__)
        return 0
    from swerve.cli.parser import Parser
    from swerve.types import SwerveError

    known = commands()
    if name not in known:
        near = difflib.get_close_matches(name, known, n=1)
        raise SwerveError(
            f"swerve: unknown command {name}; " + (f"did you mean {near[0]}?" if near else "see swerve --help")
        )
    command = known[name]
    module = command.load()
    parser = Parser(prog=f"swerve {name}", description=command.description)
    module.add_arguments(parser)
    return module.run(parser.parse(words[1:])) or 0


def _help() -> str:
    known = commands()
    width = max(map(len, known))
    lines = [f"  {name:<{width}}  {command.summary}" for name, command in known.items()]
    return "\n".join(
        [
            (swerve.__doc__ or "").strip(),
            "",
            "usage: swerve COMMAND ...",
            "",
            *lines,
            "",
            "swerve COMMAND --help says more; swerve --version prints the version.",
        ]
    )


def _complain(text: str, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    for line in text.splitlines():
        print(line if line.startswith("swerve") else f"swerve: {line}", file=sys.stderr)


def _where(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if f"{os.sep}swerve{os.sep}" in frame.filename] or frames
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text} in {own[-1].name}, {os.path.basename(own[-1].filename)}:{own[-1].lineno}"  # noqa: PTH119


@contextlib.contextmanager
def _termination_unwinds() -> Iterator[None]:
    """Makes SIGTERM leave through every `finally`, as Ctrl-C does; another one does not cut that short."""

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        signal.signal(signal.SIGTERM, lambda *_: None)  # those who end a job often ask each of its processes twice
        raise SystemExit(_TERMINATED)

    try:
        before = signal.signal(signal.SIGTERM, leave)
    except ValueError:  # not the main thread: whoever owns it decides
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
