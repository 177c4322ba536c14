"""An argument parser whose faults are one line with a remedy."""

import argparse
import difflib
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from swerve.types import SwerveError


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that raises `SwerveError` where the original prints its usage and exits.

    Options are never abbreviated, and an unknown one is answered with the nearest known one.
    """

    def __init__(self, **options: Any) -> None:
        """Names the program.

        Args:
            options: As `argparse.ArgumentParser` takes them; `prog` as typed, `description` opens the help.
        """
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def error(self, message: str) -> NoReturn:
        """Raises the fault as one line.

        Args:
            message: What is wrong.

        Raises:
            SwerveError: Always.
        """
        raise SwerveError(f"{self.prog}: {message}; see {self.prog} --help")

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Reads the words after the command's name.

        Args:
            words: The command line.

        Returns:
            Values by name.

        Raises:
            SwerveError: They cannot be read.
        """
        arguments, rest = self.parse_known_args(list(words))
        if rest:
            word = rest[0].partition("=")[0]
            known = list(_options(self))
            near = difflib.get_close_matches(word, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"see {self.prog} --help"
            hint = "another action takes it" if word in known else hint
            raise SwerveError(f"{self.prog}: unknown argument {word}; {hint}")
        return arguments


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from _options(inner)
