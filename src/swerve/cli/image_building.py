"""`swerve sandbox build` makes SIF files of Docker archives and directories; `swerve sandbox images` verifies them."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from swerve.sandboxes.images import Outcome


def add_arguments(actions: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declares the two actions."""
    build = actions.add_parser("build", help="make SIF files of Docker archives or directories")
    build.add_argument(
        "sources",
        nargs="+",
        type=Path,
        metavar="SOURCE",
        help="an archive of `docker save`, a directory that is a root file system, or a manifest (.json) of such",
    )
    build.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the SIF files go")
    build.add_argument(
        "--name", action="append", default=[], help="name of an image, once for each source (default: its file's name)"
    )
    images = actions.add_parser("images", help="verify the SIF files of a directory by their digests")
    images.add_argument("directory", type=Path, metavar="DIR", help="what --out of `swerve sandbox build` was")
    for action in (build, images):
        action.add_argument("--json", action="store_true", help="print JSON")


def run_build(arguments: argparse.Namespace) -> int:
    """Builds what is missing; 1 if an image failed."""
    from swerve.sandboxes.images import build_images, sources_of

    sources = sources_of(arguments.sources, arguments.name)
    outcomes = build_images(sources, arguments.out, lambda line: print(line, file=sys.stderr, flush=True))
    return _report(outcomes, ("built", "skipped"), arguments.json)


def run_images(arguments: argparse.Namespace) -> int:
    """Verifies what was built; 1 if a file is not what it was."""
    from swerve.sandboxes.images import verify_images

    return _report(verify_images(arguments.directory), ("ok",), arguments.json)


def _report(outcomes: list[Outcome], good: tuple[str, ...], as_json: bool) -> int:
    bad = [outcome for outcome in outcomes if outcome.status not in good]
    counts = {status: sum(outcome.status == status for outcome in outcomes) for status in good}
    if as_json:
        images = [dataclasses.asdict(outcome) for outcome in outcomes]
        print(json.dumps({**counts, "at_fault": len(bad), "images": images}, indent=2))
    else:
        for outcome in bad:
            print(f"{outcome.name}: {outcome.status}: {outcome.detail}")
        told = ", ".join(f"{number} {status}" for status, number in counts.items())
        print(f"{len(outcomes)} images: {told}, {len(bad)} at fault")
    return int(bool(bad))
