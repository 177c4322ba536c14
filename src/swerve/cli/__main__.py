"""`python -m swerve.cli` is `swerve`."""

import sys

from swerve.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
