"""Look into checkpoints: list them, prove them whole, tell two apart.

`digest` prints the SHA-256 over names, shapes, types and bytes of all parameters, equal exactly where every bit is; of
a run it takes the last checkpoint. `list` names a run's checkpoints and whether each is whole. `export` writes the
weights of one as Hugging Face files.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swerve.types import SwerveError

if TYPE_CHECKING:
    from swerve.checkpoint import Checkpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the actions."""
    parser.add_argument("action", choices=["digest", "list", "export"], help="what to do")
    parser.add_argument("path", type=Path, metavar="PATH", help="a run directory, a checkpoint, or Hugging Face files")
    parser.add_argument("--out", type=Path, metavar="DIR", help="export: where the files go")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Does one of them."""
    return {"digest": _digest, "list": _list, "export": _export}[arguments.action](arguments)


def _digest(arguments: argparse.Namespace) -> int:
    from swerve.weights import digest

    path: Path = arguments.path
    if (path / "config.json").is_file():
        from swerve.models import load_hf

        found = {"path": str(path), "params": digest(load_hf(path)[1])}
    else:
        checkpoint = read_checkpoint(path)
        found = {
            "path": str(checkpoint.path),
            "step": checkpoint.step,
            "params": digest(checkpoint.params),
            "optimizer": digest(checkpoint.optimizer),
        }
    print(json.dumps(found, indent=2) if arguments.json else f"{found['params']}  {found['path']}")
    return 0


def _list(arguments: argparse.Namespace) -> int:
    from swerve.checkpoint import CheckpointError, list_checkpoints, open_checkpoint

    rows: list[dict[str, Any]] = []
    found = list_checkpoints(checkpoints_of(arguments.path))
    if not found:
        raise _no_checkpoint(arguments.path)
    for path in found:
        try:
            open_checkpoint(path)
            rows.append({"path": str(path), "whole": True, "fault": ""})
        except CheckpointError as fault:
            rows.append({"path": str(path), "whole": False, "fault": str(fault)})
    if arguments.json:
        print(json.dumps(rows, indent=2))
    else:
        for row in rows:
            print(row["path"] + ("  whole" if row["whole"] else f"  torn: {row['fault']}"))
    return 0 if all(row["whole"] for row in rows) else 2


def _export(arguments: argparse.Namespace) -> int:
    if arguments.out is None:
        raise SwerveError("swerve checkpoint export: name the directory to write with --out DIR")
    from swerve.cli.composition import copy_tokenizer, policy_directory
    from swerve.config import TrainRecipe
    from swerve.models import save_hf
    from swerve.models.hf import read_config
    from swerve.telemetry import recipe_of

    checkpoint = read_checkpoint(arguments.path)
    run = checkpoint.path.resolve().parents[1]
    recipe = recipe_of(run)
    if not isinstance(recipe, TrainRecipe):
        raise SwerveError(f'{run}: a run of kind "{recipe.kind}": it has exported its policy itself, as hf-*')
    source = policy_directory(recipe.policy.checkpoint)
    save_hf(arguments.out, read_config(source), checkpoint.params)
    copy_tokenizer(source, arguments.out)
    print(f"{arguments.out}: weights of step {checkpoint.step}; use them with --policy.checkpoint {arguments.out}")
    return 0


def checkpoints_of(path: Path) -> Path:
    """The folder of checkpoints of a run directory, or the folder itself."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def read_checkpoint(path: Path) -> Checkpoint:
    """A checkpoint by its own directory, or the last one of a run.

    Raises:
        SwerveError: There is none, or it is torn.
    """
    from swerve.checkpoint import list_checkpoints, open_checkpoint

    if (path / "manifest.json").is_file():
        return open_checkpoint(path)
    found = list_checkpoints(checkpoints_of(path))
    if not found:
        raise _no_checkpoint(path)
    return open_checkpoint(found[-1])


def _no_checkpoint(path: Path) -> SwerveError:
    what = "holds no checkpoint" if path.exists() else "no such directory"
    return SwerveError(f"{path}: {what}: name a run directory, a checkpoint of one, or Hugging Face files")
