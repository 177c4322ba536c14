"""The checkpoints of one run.

<directory>/step_00000012/     params.safetensors  optimizer.safetensors  host.json  manifest.json
<directory>/weights_00000012/  whatever the writer of weights writes      manifest.json
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from swerve.checkpoint.files import (
    CheckpointError,
    TornCheckpointError,
    read_manifest,
    read_verified,
    remove_leftovers,
    write_directory,
)
from swerve.checkpoint.tensor_files import DTYPES
from swerve.parallel import flatten_names, unflatten_names

_FULL, _WEIGHTS = "step_", "weights_"
_PARAMS, _OPTIMIZER, _HOST, _QUEUE = "params.safetensors", "optimizer.safetensors", "host.json", "queue.jsonl"


class ForeignCheckpointError(CheckpointError):
    """A checkpoint is whole, but of another recipe, data set or model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A run's state between two steps.

    Attributes:
        step: Updates made.
        params: Nested dict of host arrays.
        optimizer: Nested dict of host arrays.
        host: JSON object: data position, random state, weights version, whatever the run needs to go on.
        queue: JSON objects: what was collected and not trained on yet.
        path: Where it lies.
    """

    step: int
    params: dict[str, Any]
    optimizer: dict[str, Any]
    host: dict[str, Any]
    queue: tuple[dict[str, Any], ...]
    path: Path


class CheckpointStore:
    """Writes, finds, checks and deletes the checkpoints of one run. One process writes at a time.

    Args:
        directory: Made at the first save.
        recipe_digest: Identity of the recipe; a checkpoint of another is refused.
        datasets: SHA-256 of each data set by name; a checkpoint of others is refused.
        keep_last: Most recent checkpoints of each kind that are kept; 0 keeps all.
        keep_best: Checkpoints of each kind with the highest metric that are kept besides.
    """

    def __init__(
        self,
        directory: Path,
        *,
        recipe_digest: str,
        datasets: Mapping[str, str],
        keep_last: int = 0,
        keep_best: int = 0,
    ) -> None:
        self._directory = directory
        self._identity = {"recipe": recipe_digest, "datasets": dict(sorted(datasets.items()))}
        self._keep_last = keep_last
        self._keep_best = keep_best

    @property
    def directory(self) -> Path:
        """Where the checkpoints lie."""
        return self._directory

    # --------------------------------------------------------------------------------------------------- writing

    def save(
        self,
        step: int,
        *,
        params: Mapping[str, Any],
        optimizer: Mapping[str, Any],
        host: Mapping[str, Any],
        queue: Iterable[Mapping[str, Any]] = (),
        metric: float | None = None,
    ) -> Path:
        """Write all that exact resume needs, at once or not at all; then delete what is not kept.

        Args:
            step: Updates made.
            params: Nested mapping of arrays.
            optimizer: Nested mapping of arrays.
            host: JSON object.
            queue: JSON objects: what was collected and not trained on yet.
            metric: By which the best are kept; higher is better.

        Returns:
            The checkpoint's directory.

        Raises:
            MachineError: The disk is full or cannot be written; no part of the checkpoint is left.
        """

        def write(directory: Path) -> None:
            (directory / _PARAMS).write_bytes(_encode(params))
            (directory / _OPTIMIZER).write_bytes(_encode(optimizer))
            (directory / _HOST).write_bytes(json.dumps(host, indent=1, sort_keys=True).encode())
            if lines := [json.dumps(record).encode() for record in queue]:
                (directory / _QUEUE).write_bytes(b"\n".join(lines))

        return self._write(_FULL, step, write, metric)

    def save_weights(self, step: int, write: Callable[[Path], None], *, metric: float | None = None) -> Path:
        """Write weights alone, in whatever form `write` gives them, at once or not at all.

        Args:
            step: Updates the weights have had.
            write: Writes into the directory it is given, for example with `models.save_hf`.
            metric: By which the best are kept; higher is better.

        Returns:
            The directory.

        Raises:
            MachineError: The disk is full or cannot be written; no part is left.
        """
        return self._write(_WEIGHTS, step, write, metric)

    def _write(self, kind: str, step: int, write: Callable[[Path], None], metric: float | None) -> Path:
        remove_leftovers(self._directory)
        target = self._path(kind, step)
        write_directory(target, write, {"step": step, "metric": metric, **self._identity})
        self._prune(kind, step)
        return target

    def _prune(self, kind: str, newest: int) -> None:
        if not self._keep_last:
            return
        steps = self._steps(kind)
        kept = {newest, *steps[-self._keep_last :]}
        metrics = {step: read_manifest(self._path(kind, step))["metric"] for step in steps}
        ranked = sorted((s for s in steps if metrics[s] is not None), key=lambda s: (-metrics[s], s))
        for step in set(steps) - kept - set(ranked[: self._keep_best]):
            shutil.rmtree(self._path(kind, step), ignore_errors=True)

    # --------------------------------------------------------------------------------------------------- reading

    def steps(self) -> list[int]:
        """Return the steps that have a full checkpoint, in order; whether each is whole is found on loading."""
        return self._steps(_FULL)

    def weights_steps(self) -> list[int]:
        """Return the steps that have a weights-only checkpoint, in order."""
        return self._steps(_WEIGHTS)

    def latest(self) -> int | None:
        """Return the last step that has a full checkpoint, or `None`."""
        return max(self.steps(), default=None)

    def load(
        self,
        step: int | None = None,
        *,
        like: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
        fall_back: bool = False,
    ) -> Checkpoint:
        """Read a full checkpoint.

        Args:
            step: Which one; the last by default.
            like: Parameters and optimizer state of the present model; names, shapes and types must be the same.
            fall_back: Where the checkpoint is torn, take the last one before it that is whole.

        Returns:
            The checkpoint, every byte verified.

        Raises:
            TornCheckpointError: A file is missing, short or altered.
            ForeignCheckpointError: It is of another recipe, data set or model.
            CheckpointError: There is none.
        """
        candidates = self.steps() if step is None else [s for s in self.steps() if s <= step]
        if not candidates or (step is not None and candidates[-1] != step):
            which = "no checkpoint" if step is None else f"no checkpoint of step {step}"
            have = ", ".join(map(str, self.steps())) or "none"
            raise CheckpointError(f"{self._directory}: {which} (there: {have}): start the run without resuming")
        for candidate in reversed(candidates):
            try:
                return self._load(candidate, like)
            except TornCheckpointError:
                if not fall_back or candidate == candidates[0]:
                    raise
        raise AssertionError("the loop returns or raises")

    def verify_weights(self, step: int) -> Path:
        """Check a weights-only checkpoint.

        Args:
            step: Which one.

        Returns:
            Its directory, every byte verified.

        Raises:
            TornCheckpointError: A file is missing, short or altered.
        """
        directory = self._path(_WEIGHTS, step)
        verify_files(directory)
        return directory

    def _load(self, step: int, like: tuple[Mapping[str, Any], Mapping[str, Any]] | None) -> Checkpoint:
        directory = self._path(_FULL, step)
        manifest = read_manifest(directory)
        self._check_identity(directory, manifest)
        if manifest.get("step") != step:
            raise TornCheckpointError(
                f"{directory}: the manifest says step {manifest.get('step')}: it was renamed; undo it"
            )
        checkpoint = _read(directory, manifest)
        for part, expected in zip((checkpoint.params, checkpoint.optimizer), like or (), strict=False):
            _check_like(directory, part, expected)
        return checkpoint

    def _check_identity(self, directory: Path, manifest: Mapping[str, Any]) -> None:
        if manifest.get("recipe") != self._identity["recipe"]:
            raise ForeignCheckpointError(
                f"{directory}: made by another recipe ({_short(manifest.get('recipe'))}, this one is "
                f"{_short(self._identity['recipe'])}): resume with the recipe kept in its run directory"
            )
        theirs, ours = manifest.get("datasets") or {}, self._identity["datasets"]
        for name in sorted(theirs.keys() | ours.keys()):
            if theirs.get(name) != ours.get(name):
                raise ForeignCheckpointError(
                    f"{directory}: trained on another data set {name} ({_short(theirs.get(name))}, this one is "
                    f"{_short(ours.get(name))}): restore the file, or start a new run from its weights"
                )

    # --------------------------------------------------------------------------------------------------- places

    def _path(self, kind: str, step: int) -> Path:
        return self._directory / f"{kind}{step:08d}"

    def _steps(self, kind: str) -> list[int]:
        names = (path.name.removeprefix(kind) for path in self._directory.glob(f"{kind}*") if path.is_dir())
        return sorted(int(name) for name in names if name.isdecimal())


def list_checkpoints(directory: Path) -> list[Path]:
    """The full checkpoints in a directory of checkpoints, in order of step."""
    found = {int(path.name.removeprefix(_FULL)): path for path in directory.glob(f"{_FULL}*") if _is_checkpoint(path)}
    return [path for _, path in sorted(found.items())]


def open_checkpoint(path: Path) -> Checkpoint:
    """Read a full checkpoint for a look at it, whatever run it is of.

    Args:
        path: Its own directory.

    Returns:
        The checkpoint, every byte verified.

    Raises:
        TornCheckpointError: A file is missing, short or altered.
    """
    return _read(path, read_manifest(path))


def verify_files(directory: Path) -> None:
    """Check every file of a checkpoint against its manifest.

    Raises:
        TornCheckpointError: A file is missing, short or altered.
    """
    manifest = read_manifest(directory)
    for name in manifest["files"]:
        read_verified(directory, name, manifest)


def _is_checkpoint(path: Path) -> bool:
    return path.is_dir() and path.name.removeprefix(_FULL).isdecimal()


def _read(directory: Path, manifest: Mapping[str, Any]) -> Checkpoint:
    if not isinstance(manifest.get("step"), int):
        raise TornCheckpointError(f"{directory}: the manifest names no step: resume from an earlier checkpoint")
    return Checkpoint(
        step=manifest["step"],
        params=_decode(read_verified(directory, _PARAMS, manifest)),
        optimizer=_decode(read_verified(directory, _OPTIMIZER, manifest)),
        host=json.loads(read_verified(directory, _HOST, manifest)),
        queue=tuple(json.loads(line) for line in _lines(directory, manifest)),
        path=directory,
    )


def _lines(directory: Path, manifest: Mapping[str, Any]) -> list[bytes]:
    return read_verified(directory, _QUEUE, manifest).split(b"\n") if _QUEUE in manifest["files"] else []


def _short(digest: str | None) -> str:
    return digest[:12] if digest else "none"


def _encode(tree: Mapping[str, Any]) -> bytes:
    return safetensors.numpy.save({name: np.asarray(array, order="C") for name, array in flatten_names(tree).items()})


def _decode(content: bytes) -> dict[str, Any]:
    named = {}
    for name, stored in safetensors.deserialize(content):
        array = np.frombuffer(stored["data"], DTYPES[stored["dtype"]])
        named[name] = array.reshape(stored["shape"])
    return unflatten_names(named)


def _check_like(directory: Path, found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    ours, theirs = flatten_names(expected), flatten_names(found)
    for name in sorted(ours.keys() | theirs.keys()):
        wanted, given = (f"{a[name].dtype}{list(a[name].shape)}" if name in a else "absent" for a in (ours, theirs))
        if wanted != given:
            raise ForeignCheckpointError(
                f"{directory}: of another model: {name} is {given}, this one's is {wanted}: resume with the policy "
                f"of its recipe"
            )
