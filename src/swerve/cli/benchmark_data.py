"""`swerve tasks import` makes task files of a dataset's rows; `verify --identity` holds a file against its record."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swerve.sandboxes import SandboxImage, SandboxPool


def add_import_arguments(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares `import`."""
    action = actions.add_parser("import", help="make task files of R2E-Gym's rows and lists of ids")
    action.add_argument("rows", nargs="+", type=Path, metavar="ROWS", help="files of rows: .jsonl or .parquet")
    for split in ("train", "validation"):
        action.add_argument(
            f"--{split}-ids", type=Path, required=True, metavar="FILE", help=f"ids of the {split} tasks, in their order"
        )
    action.add_argument("--out", type=Path, default=Path(), metavar="DIR", help="where the task files go (here)")
    action.add_argument("--json", action="store_true", help="print JSON")


def run_import(arguments: argparse.Namespace) -> int:
    """Writes both task files with their identities."""
    from swerve.environments.r2egym.convert import convert

    lists = {"train": arguments.train_ids, "validation": arguments.validation_ids}
    written = convert(arguments.rows, lists, arguments.out)
    if arguments.json:
        files = [{"path": str(file.path), **dataclasses.asdict(file.identity)} for file in written]
        print(json.dumps(files, indent=2))
    else:
        for file in written:
            print(f"{file.path}: {file.identity.rows} tasks, {file.identity.bytes} bytes, {file.identity.sha256}")
    return 0


def check_identity(path: Path, identity: Path | None) -> dict[str, int | str]:
    """Holds a data file against its identity.

    Args:
        path: The file.
        identity: Where its identity is kept; beside it if `None`.

    Returns:
        What the file is: `rows`, `bytes` and `sha256`.

    Raises:
        SwerveError: It differs; names the figure and both values.
    """
    from swerve.environments.identity import verify_identity

    return dataclasses.asdict(verify_identity(path, identity))


def verification_pool(images: Iterable[SandboxImage], directory: str) -> SandboxPool:
    """Sandboxes to grade tasks in.

    Args:
        images: Of the tasks.
        directory: Where SIF files of whole repositories are, which take more room than others; empty for none.

    Raises:
        MachineError: This machine cannot provide them.
    """
    from swerve.sandboxes import SandboxLimits, SandboxPool, make_backend

    if not directory:
        return SandboxPool(images)
    limits = SandboxLimits(memory_bytes=4 << 30, disk_bytes=1 << 30, file_bytes=1 << 30, num_processes=256)
    return SandboxPool(images, limits, backend=make_backend("bubblewrap", directory))
