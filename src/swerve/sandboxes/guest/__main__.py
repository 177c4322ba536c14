"""Entry of the guest: `python -c PROGRAM zygote CONTROL_FD CONFIG_FD`, or `python -c PROGRAM solo`."""

# ruff: noqa: PTH123

from __future__ import annotations

import json
import socket
import sys
from typing import NoReturn

from .solo import main as solo
from .system import join_new_keyring
from .zygote import Zygote


def main(arguments: list[str]) -> NoReturn:
    """Become what the arguments say."""
    if arguments[0] == "solo":
        solo()
    control = socket.socket(fileno=int(arguments[1]))
    control.set_inheritable(False)
    with open(int(arguments[2]), "rb") as file:
        config = json.load(file)
    join_new_keyring()
    Zygote(control, config).run()


if __name__ == "__main__":
    main(sys.argv[1:])
