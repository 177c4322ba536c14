"""`swerve checkpoint download` and `swerve tasks download`: files at a pinned revision, whole and verified."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from swerve.cli.byte_progress import byte_progress, size_text
from swerve.types import SwerveError

if TYPE_CHECKING:
    from swerve.downloads import Outcome, Source

_HUB = "https://huggingface.co"
_WHAT = {"models": "model", "datasets": "dataset"}
_WORKERS, _RETRIES = 4, 8


def add_download_arguments(actions: argparse._SubParsersAction[argparse.ArgumentParser], kind: str) -> None:
    """Declares `download`.

    Args:
        actions: Of the command.
        kind: `models` or `datasets`.
    """
    what = _WHAT[kind]
    action = actions.add_parser(
        "download",
        help=f"fetch a {what} at a pinned revision, every file verified",
        description=f"Fetch a {what}'s files; the same command goes on where it was stopped. HF_TOKEN of the "
        "environment is sent to --endpoint, and nowhere else.",
    )
    action.add_argument("repository", nargs="?", metavar="ORG/NAME", help=f"the {what} on the Hub")
    action.add_argument(
        "--revision",
        metavar="COMMIT",
        help="full hash of a commit; or a branch or tag, which is resolved to one, printed and recorded. "
        "Of a manifest: its SHA-256",
    )
    action.add_argument("--out", type=Path, required=True, metavar="DIR", help="where the files go")
    action.add_argument(
        "--include", action="append", metavar="GLOB", help="fetch the paths that match, * matching / too; repeatable"
    )
    action.add_argument("--endpoint", metavar="URL", help=f"the Hub, or a mirror of it ({_HUB})")
    action.add_argument(
        "--manifest",
        metavar="FILE",
        help="instead of ORG/NAME: path or URL of a list of sizes and digests, or of lines of sha256sum or md5sum",
    )
    action.add_argument("--workers", type=int, metavar="INT", help=f"files fetched at once ({_WORKERS})")
    action.add_argument("--retries", type=int, metavar="INT", help=f"fruitless tries in a row ({_RETRIES})")
    action.add_argument(
        "--verify", action="store_true", help="hold what is in DIR against its download.json, and ask no server"
    )
    action.add_argument("--json", action="store_true", help="print JSON")


def run_download(arguments: argparse.Namespace, kind: str) -> int:
    """Fetches, or verifies; 2 if a file is not what it was."""
    if arguments.verify:
        return _verify(arguments)
    from swerve.downloads import Web, download

    source = _source(arguments, kind)
    workers = _positive("--workers", arguments.workers, _WORKERS)
    web = Web(
        token="" if arguments.manifest else os.environ.get("HF_TOKEN", ""),
        token_for=arguments.endpoint or _HUB,
        retries=_positive("--retries", arguments.retries, _RETRIES),
        say=lambda line: print(line, file=sys.stderr, flush=True),
    )
    with byte_progress() as progress:
        outcome = download(
            source, arguments.out, web=web, include=arguments.include or (), workers=workers, progress=progress
        )
    if kind == "datasets":
        _write_identities(arguments.out, outcome)
    _report(arguments, outcome, [])
    return 0


def _verify(arguments: argparse.Namespace) -> int:
    from swerve.downloads import verify

    for name in ("repository", "revision", "include", "endpoint", "manifest", "workers", "retries"):
        if getattr(arguments, name) is not None:
            told = "ORG/NAME" if name == "repository" else f"--{name}"
            raise SwerveError(f"--verify goes by download.json alone: leave {told} out")
    with byte_progress() as progress:
        outcome, faults = verify(arguments.out, progress)
    _report(arguments, outcome, faults)
    return 2 if faults else 0


def _source(arguments: argparse.Namespace, kind: str) -> Source:
    from swerve.downloads import HubSource, ManifestSource

    if (arguments.repository is None) == (arguments.manifest is None):
        raise SwerveError("download: name either ORG/NAME or --manifest FILE")
    if arguments.manifest is not None:
        if arguments.endpoint is not None:
            raise SwerveError("--endpoint is of ORG/NAME: leave it out with --manifest")
        return ManifestSource(arguments.manifest, arguments.revision or "")
    if not arguments.revision:
        raise SwerveError(
            f"download {arguments.repository}: name a commit with --revision; main takes and records today's"
        )
    return HubSource(kind, arguments.repository, arguments.revision, arguments.endpoint or _HUB)


def _positive(name: str, value: int | None, default: int) -> int:
    if value is not None and value < 1:
        raise SwerveError(f"{name} {value}: must be at least 1")
    return default if value is None else value


def _write_identities(folder: Path, outcome: Outcome) -> None:
    """Beside every file of lines its rows, bytes and SHA-256, as for the files that `tasks import` writes."""
    from swerve.environments.identity import identity_path, write_identity

    for file in outcome.files:
        path = folder / file.path
        if path.suffix == ".jsonl" and not identity_path(path).exists():
            write_identity(path)


def _report(arguments: argparse.Namespace, outcome: Outcome, faults: list[str]) -> None:
    num_bytes = sum(file.size for file in outcome.files)
    if arguments.json:
        facts = {
            "path": str(arguments.out),
            "source": outcome.source,
            "revision": outcome.revision,
            "files": len(outcome.files),
            "bytes": num_bytes,
            "fetched": outcome.fetched,
            "fetched_bytes": outcome.fetched_bytes,
            "faults": faults,
        }
        print(json.dumps(facts, indent=2))
        return
    for fault in faults:
        print(fault)
    told = f"{len(outcome.files)} files, {size_text(num_bytes)}, {outcome.source} at {outcome.revision}"
    work = (
        f"{len(faults)} at fault"
        if arguments.verify
        else f"{outcome.fetched} fetched ({size_text(outcome.fetched_bytes)})"
    )
    print(f"{arguments.out}: {told}: {work}")
