"""One folder per run, which holds everything the run leaves behind.

recipe.toml         every setting, as resolved
provenance.json     source, packages, machine, command; recipe and inputs by digest
metrics.jsonl       one line per step
trajectories.jsonl  every episode
tensorboard/        the metrics again
checkpoints/        state to resume from
mlperf.log          log of a scored run
eval_checkpoints.jsonl  its checkpoints
profile/            what the devices did in some steps, where that was asked for
summary.json        the outcome; present only once the run is complete
"""

import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from swerve.config import Difference, Recipe, RunRecipe, diff, flatten, parse_recipe, render
from swerve.telemetry.files import force_to_disk, lock_folder, machine_faults, write_atomic, write_json
from swerve.types import SwerveError

RESUMABLE_CHANGES = (
    "run.name",
    "run.directory",
    "training.num_steps",
    "training.time_limit_s",
    "engine.urls",
    "engine.command",
    "engine.refit",
    "engine.weights_directory",
    "engine.request_timeout_s",
    "engine.load_timeout_s",
    "telemetry.",
    "checkpoint.",
)
"""Settings, or beginnings of them, that may change when a run is resumed: none of them touches what is computed."""

EVAL_CHECKPOINTS = "eval_checkpoints.jsonl"
"""Name of the list of a scored run's checkpoints."""


class RunDirectory:
    """A run's folder, held by this process alone until it is closed."""

    def __init__(self, path: Path, lock: int) -> None:
        """Use `create` or `resume`."""
        self.path = path
        self._lock = lock

    @property
    def recipe(self) -> Path:
        """The resolved recipe."""
        return self.path / "recipe.toml"

    @property
    def metrics(self) -> Path:
        """The metrics."""
        return self.path / "metrics.jsonl"

    @property
    def trajectories(self) -> Path:
        """The episodes."""
        return self.path / "trajectories.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Folder of the TensorBoard event files."""
        return self.path / "tensorboard"

    @property
    def mlperf_log(self) -> Path:
        """MLPerf log of a scored run."""
        return self.path / "mlperf.log"

    @property
    def eval_checkpoints(self) -> Path:
        """List of a scored run's checkpoints."""
        return self.path / EVAL_CHECKPOINTS

    @property
    def profile(self) -> Path:
        """Folder of a profile of some steps."""
        return self.path / "profile"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def summary(self) -> Path:
        """The outcome."""
        return self.path / "summary.json"

    @classmethod
    def create(cls, path: Path, recipe: RunRecipe, provenance: Mapping[str, object]) -> "RunDirectory":
        """Makes a run's folder, whole or not at all.

        Args:
            path: The folder; it does not exist, or is empty.
            recipe: Resolved recipe.
            provenance: From `collect_provenance`.

        Returns:
            The folder, held.

        Raises:
            SwerveError: The folder exists and is not empty.
            MachineError: It cannot be written.
        """
        with machine_faults(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            _refuse_used(path)
            temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
        try:
            temporary.chmod(0o755)
            write_atomic(temporary / "recipe.toml", render(recipe))
            write_json(temporary / "provenance.json", provenance)
            with machine_faults(path):
                (temporary / "checkpoints").mkdir()
                lock = lock_folder(temporary)
                try:
                    temporary.rename(path)
                except OSError:
                    os.close(lock)
                    _refuse_used(path)
                    raise
                force_to_disk(path.parent)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        return cls(path, lock)

    @classmethod
    def resume(cls, path: Path, recipe: RunRecipe, provenance: Mapping[str, object]) -> "RunDirectory":
        """Takes up a run's folder again.

        Args:
            path: The folder of a run that stopped.
            recipe: Resolved recipe; differs from the run's only in `RESUMABLE_CHANGES`.
            provenance: Of this process; kept beside that of the first start.

        Returns:
            The folder, held.

        Raises:
            SwerveError: It is no run's folder, another process runs in it, or the recipe is another one.
            MachineError: It cannot be written.
        """
        before = recipe_of(path)
        _refuse_changed(path, before, recipe)
        with machine_faults(path):
            lock = lock_folder(path)
        write_atomic(path / "recipe.toml", render(recipe))
        number = 1 + len(list(path.glob("provenance.resume*.json")))
        write_json(path / f"provenance.resume{number}.json", provenance)
        return cls(path, lock)

    def close(self) -> None:
        """Lets go of the folder; idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def recipe_of(path: Path) -> Recipe:
    """The resolved recipe of a run.

    Args:
        path: The run's folder.

    Returns:
        Its recipe.

    Raises:
        SwerveError: It is no run's folder.
    """
    file = path / "recipe.toml"
    if not file.is_file():
        raise SwerveError(f"{path}: not the directory of a run: it holds no recipe.toml")
    return parse_recipe(file.read_text(encoding="utf-8"), str(file))


def choose_path(recipe: RunRecipe, recipe_path: Path, now: float | None = None) -> Path:
    """Where a recipe's next run goes.

    Args:
        recipe: Resolved recipe.
        recipe_path: Its file, after which an unnamed run is named.
        now: Seconds since the epoch; the present where `None`.

    Returns:
        `directory/name`, or `directory/stem-date-time` where the recipe names no run.
    """
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(now))
    return Path(recipe.run.directory) / (recipe.run.name or f"{recipe_path.stem}-{stamp}")


def latest_path(recipe: RunRecipe, recipe_path: Path) -> Path:
    """Where a recipe's last run is, to be resumed.

    Args:
        recipe: Resolved recipe.
        recipe_path: Its file.

    Returns:
        The folder that `choose_path` chose last.

    Raises:
        SwerveError: There is none.
    """
    parent = Path(recipe.run.directory)
    if recipe.run.name:
        candidates = [parent / recipe.run.name]
    else:
        candidates = sorted(parent.glob(f"{recipe_path.stem}-[0-9]*-[0-9]*"))
    found = [path for path in candidates if (path / "recipe.toml").is_file()]
    if not found:
        raise SwerveError(f"{parent}: holds no run of {recipe_path} to resume: start one without --resume")
    return found[-1]


def identity_digest(recipe: RunRecipe) -> str:
    """SHA-256 over the settings that decide what a run computes: all but those that may change when it is resumed."""
    decisive = {key: value for key, value in flatten(recipe).items() if not _may_change_key(key)}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()


def _refuse_used(path: Path) -> None:
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise SwerveError(f"{path}: exists already: resume that run with --resume, or choose another --run.name")


def _refuse_changed(path: Path, before: Recipe, now: Recipe) -> None:
    changed = [line for line in diff(before, now) if not _may_change(line)]
    if changed:
        listed = "; ".join(map(str, changed))
        raise SwerveError(f"{path}: the run's recipe differs in {listed}: resume it unchanged, or start a new run")


def _may_change(difference: Difference) -> bool:
    return _may_change_key(difference.key)


def _may_change_key(key: str) -> bool:
    return any(key.startswith(allowed) if allowed.endswith(".") else key == allowed for allowed in RESUMABLE_CHANGES)
