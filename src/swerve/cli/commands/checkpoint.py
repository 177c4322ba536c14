"""Look into checkpoints: list them, prove them whole, tell two apart, convert or fetch them.

`digest` prints the SHA-256 over names, shapes, types and bytes of all parameters, equal exactly where every bit is; of
a run it takes the last checkpoint. `list` names a run's checkpoints and whether each is whole. `export` writes the
weights of one as Hugging Face files. `inspect` says what files hold without reading their tensors. `convert` writes a
model's files in another layout, every bit kept. `download` fetches a model at a pinned revision, verified. Models may
lie behind a URL: s3://, gs://, hf://, https://.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swerve.cli.byte_progress import byte_progress, size_text
from swerve.cli.downloading import add_download_arguments, run_download
from swerve.types import SwerveError

if TYPE_CHECKING:
    from swerve.checkpoint import Checkpoint

_GB = 1e9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the actions."""
    actions = parser.add_subparsers(
        required=True, dest="action", metavar="{digest,list,export,inspect,convert,download}"
    )
    anything = "a run directory, a checkpoint, or a model's files"

    digest = actions.add_parser("digest", help="print the SHA-256 of all parameters")
    digest.add_argument("path", metavar="PATH", help=anything)

    listing = actions.add_parser("list", help="name a run's checkpoints, and whether each is whole")
    listing.add_argument("path", type=Path, metavar="PATH", help="a run directory, or its folder of checkpoints")

    export = actions.add_parser("export", help="write a run's weights as Hugging Face files")
    export.add_argument("path", type=Path, metavar="PATH", help="a run directory, or a checkpoint of one")
    export.add_argument("--out", type=Path, metavar="DIR", help="where the files go")

    look = actions.add_parser("inspect", help="say what files hold, from their headers")
    look.add_argument("path", metavar="PATH", help=anything)

    convert = actions.add_parser("convert", help="write a model's files in another layout")
    convert.add_argument("source", metavar="SRC", help="directory or URL of a model")
    convert.add_argument("target", metavar="DST", help="directory or URL; empty, or what an interrupted try left")
    convert.add_argument(
        "--to",
        choices=["hf", "scanned", "unscanned"],
        default="hf",
        help="transformers' layout (default), or ours with layers stacked or apart",
    )
    convert.add_argument("--experts", choices=["fused", "each"], help="hf: a layer's experts as one tensor, or each")
    convert.add_argument("--prefix", metavar="TEXT", help="hf: what stands before the names, such as model.")
    convert.add_argument("--max-shard-gb", type=float, default=5.0, metavar="N", help="most data of a file (5)")

    add_download_arguments(actions, "models")

    for action in (digest, listing, export, look, convert):
        action.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Does one of them."""
    actions = {
        "digest": _digest,
        "list": _list,
        "export": _export,
        "inspect": _inspect,
        "convert": _convert,
        "download": lambda arguments: run_download(arguments, "models"),
    }
    return actions[arguments.action](arguments)


def _is_model(path: str) -> bool:
    return "://" in path or (Path(path) / "config.json").is_file()


def _digest(arguments: argparse.Namespace) -> int:
    from swerve.weights import digest

    path: str = arguments.path
    if _is_model(path):
        from swerve.models import load_hf

        found = {"path": path, "params": digest(load_hf(path)[1])}
    else:
        checkpoint = read_checkpoint(Path(path))
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
    from swerve.cli.composition import copy_tokenizer
    from swerve.config import TrainRecipe, policy_directory
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


def _inspect(arguments: argparse.Namespace) -> int:
    found = _model_facts(arguments.path) if _is_model(arguments.path) else _run_facts(Path(arguments.path))
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_lines(found)))
    return 2 if found["fault"] else 0


def _model_facts(path: str) -> dict[str, Any]:
    from swerve.models import hf

    return hf.describe(hf.open_model(path))


def _run_facts(path: Path) -> dict[str, Any]:
    """What the checkpoint of a run holds, from its manifest and headers."""
    from swerve.checkpoint import list_checkpoints, open_directory, read_header, read_manifest
    from swerve.models import hf

    if not (path / "manifest.json").is_file():
        checkpoints = list_checkpoints(checkpoints_of(path))
        if not checkpoints:
            raise _no_checkpoint(path)
        path = checkpoints[-1]
    manifest = read_manifest(path)
    directory = open_directory(path)
    files = [name for name in manifest["files"] if name.endswith(".safetensors")]
    tensors = [tensor for name in files for tensor in read_header(directory, name).values()]
    return {
        "path": str(path),
        "layout": "run",
        "step": manifest.get("step"),
        "files": len(manifest["files"]),
        "bytes": sum(directory.sizes().values()),
        "tensors": len(tensors),
        "dtypes": hf.count_dtypes(tensors),
        "fault": "",
    }


def _lines(found: dict[str, Any]) -> Iterator[str]:
    """What a checkpoint holds, one fact a line."""
    dtypes = ", ".join(
        f"{kind} {own['tensors']:,} ({size_text(own['bytes'])})" for kind, own in found["dtypes"].items()
    )
    yield f"{found['path']}"
    match found["layout"]:
        case "run":
            yield f"  layout      state of a run after step {found['step']}"
        case "hf":
            yield f"  layout      hf, experts {found['experts']}, names {found['prefix']}*"
        case layout:
            yield f"  layout      {layout}"
    yield f"  files       {found['files']:,}, {size_text(found['bytes'])}"
    yield f"  tensors     {found['tensors']:,}: {dtypes}"
    if found["layout"] != "run":
        largest, skipped, config = found["largest_tensor"], found["skipped"], found["config"]
        if largest:
            yield f"  largest     {largest['name']}, {size_text(largest['bytes'])}"
        yield f"  parameters  {found['parameters']:,}, of which a token passes {found['active_parameters']:,}"
        yield (
            f"  model       {config['num_hidden_layers']} layers of width {config['hidden_size']}, "
            f"{config['num_experts']} experts, {config['vocab_size']:,} tokens"
        )
        if skipped["tensors"]:
            yield f"  skipped     {skipped['tensors']:,}, {size_text(skipped['bytes'])}, such as {skipped['example']}"
    if found["fault"]:
        yield f"  fault       {found['fault']}"


def _convert(arguments: argparse.Namespace) -> int:
    from swerve.models import hf

    if arguments.to != "hf" and (arguments.experts or arguments.prefix is not None):
        raise SwerveError("swerve checkpoint convert: --experts and --prefix are of --to hf: leave them out")
    if not arguments.max_shard_gb * _GB >= 1:
        raise SwerveError(f"--max-shard-gb {arguments.max_shard_gb}: must be above 0")
    source = hf.open_model(arguments.source)
    if source.skipped:
        print(hf.skipped_line(source), file=sys.stderr)
    with byte_progress() as progress:
        made = hf.convert(
            source,
            arguments.target,
            to=arguments.to,
            experts=arguments.experts,
            prefix=arguments.prefix,
            max_shard_bytes=round(arguments.max_shard_gb * _GB),
            progress=progress,
        )
    if arguments.json:
        facts = {"files": made.files, "kept": made.kept, "tensors": made.tensors, "bytes": made.num_bytes}
        print(json.dumps({"source": arguments.source, "path": arguments.target, "layout": arguments.to, **facts}))
    else:
        kept = f" ({made.kept} of them from an earlier try)" if made.kept else ""
        files = f"{made.files:,} file{'s' if made.files > 1 else ''}{kept}"
        print(f"{arguments.target}: {arguments.to}, {made.tensors:,} tensors in {files}, {size_text(made.num_bytes)}")
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
