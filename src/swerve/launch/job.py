"""A launch and its jobs, frozen in a folder, so that a job that starts again anywhere finds what it was.

jobs/NAME/launch.json        launcher, site, jobs
site.toml          the site file, as it was
provenance.json    source, packages, machine, command
ids.json           what the launcher calls the jobs
1/job.json         one replica: seed, command, digests
RECIPE.toml      its recipe, as resolved
job.sh           what was handed over; the name is the launcher's
state.json       how far it has come
attempts.jsonl   a line each time it started
2/...
"""

import datetime
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from swerve.config import TrainRecipe, digest, parse_recipe, render
from swerve.launch.site import Site, read_site
from swerve.telemetry import collect_provenance, force_to_disk, machine_faults, write_atomic, write_json
from swerve.types import SwerveError

LAUNCH, JOB, SITE, IDS = "launch.json", "job.json", "site.toml", "ids.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One replica: one run, trained and, where it is scored, evaluated and checked.

    Attributes:
        name: NAME-NUMBER.
        number: From 1.
        recipe: Resolved; its seed, name and directory are this replica's.
        recipe_name: Name of the recipe's file.
        folder: Of the job, absolute.
        work: Directory it works in, absolute.
        python: Interpreter that has Swerve where the job runs.
        evaluation_workers: Checkpoints evaluated at once, in a scored run.
    """

    name: str
    number: int
    recipe: TrainRecipe
    recipe_name: str
    folder: Path
    work: Path
    python: str
    evaluation_workers: int

    @property
    def seed(self) -> int:
        """Of the run."""
        return self.recipe.run.seed

    @property
    def scored(self) -> bool:
        """Whether it is a scored run."""
        return self.recipe.mlperf.enabled

    @property
    def recipe_file(self) -> Path:
        """The frozen recipe."""
        return self.folder / self.recipe_name

    @property
    def run(self) -> Path:
        """Directory of the run as it is first started."""
        return Path(self.recipe.run.directory) / self.recipe.run.name

    @property
    def command(self) -> tuple[str, ...]:
        """Words that run the job, wherever it ends up."""
        return (self.python, "-m", "swerve.cli", "launch", "run", str(self.folder))

    def commands(self) -> dict[str, tuple[str, ...]]:
        """What running it undisturbed comes to, by phase."""
        words, run = (self.python, "-m", "swerve.cli"), self.run
        found: dict[str, tuple[str, ...]] = {"train": (*words, "train", str(self.recipe_file))}
        if self.scored:
            manifest = ("--manifest", str(run / "eval_checkpoints.jsonl"))
            workers = ("--workers", str(self.evaluation_workers))
            found["evaluate"] = (*words, "eval", str(run / "recipe.toml"), *manifest, *workers)
            found["check"] = (*words, "mlperf", "check", str(run / "mlperf.log"), "--json")
        return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """Jobs that differ in nothing but seed and name.

    Attributes:
        name: Of all of them.
        launcher: Name of the launcher.
        folder: Holds the jobs' folders, absolute.
        jobs: By number.
        site: Where they run.
        site_file: File it was read from; empty where there is none.
        site_digest: SHA-256 of that file; empty where there is none.
        site_overrides: What the command line set in its place, as text by key.
    """

    name: str
    launcher: str
    folder: Path
    jobs: tuple[Job, ...]
    site: Site
    site_file: str
    site_digest: str
    site_overrides: Mapping[str, str]


def freeze(launch: Launch, files: Mapping[str, str]) -> None:
    """Write a launch's folder, whole or not at all.

    Args:
        launch: What is to be launched.
        files: What the launcher hands over, by path within the folder.

    Raises:
        SwerveError: The folder is there already.
        MachineError: It cannot be written.
    """
    folder = launch.folder
    if folder.exists():
        raise SwerveError(f"{folder}: exists already: choose another --name")
    with machine_faults(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        temporary.chmod(0o755)
        if launch.site_file:
            write_atomic(temporary / SITE, Path(launch.site_file).read_bytes())
        write_json(temporary / "provenance.json", collect_provenance())
        write_json(temporary / LAUNCH, _launch_json(launch))
        for job in launch.jobs:
            for name, text in job_files(job).items():
                write_atomic(temporary / str(job.number) / name, text)
        for name, text in files.items():
            write_atomic(temporary / name, text)
        with machine_faults(folder):
            temporary.rename(folder)
            force_to_disk(folder.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def job_files(job: Job) -> dict[str, str]:
    """What a job's folder holds before it starts, by name: what says the job, whole."""
    return {JOB: json.dumps(_job_json(job), indent=2) + "\n", job.recipe_name: render(job.recipe)}


def read_launch(folder: Path) -> Launch:
    """A launch as it was frozen.

    Args:
        folder: Of the launch.

    Raises:
        SwerveError: It is no launch's folder, or a file of it was changed.
    """
    record = _read_json(folder / LAUNCH, "launch")
    site_file = folder / SITE
    return Launch(
        name=record["name"],
        launcher=record["launcher"],
        folder=folder.resolve(),
        jobs=tuple(read_job(folder / str(number)) for number in range(1, record["replicas"] + 1)),
        site=read_site(site_file if site_file.exists() else None, record["site_overrides"]),
        site_file=record["site_file"],
        site_digest=record["site_digest"],
        site_overrides=record["site_overrides"],
    )


def read_job(folder: Path) -> Job:
    """A job as it was frozen.

    Args:
        folder: Of the job.

    Raises:
        SwerveError: It is no job's folder, or its recipe was changed.
    """
    record = _read_json(folder / JOB, "job")
    path = folder / record["recipe_name"]
    recipe = parse_recipe(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(recipe, TrainRecipe) or digest(recipe) != record["recipe_digest"]:
        raise SwerveError(f"{path}: was changed after it was launched: restore it, or launch anew")
    return Job(
        name=record["name"],
        number=record["number"],
        recipe=recipe,
        recipe_name=record["recipe_name"],
        folder=folder.resolve(),
        work=Path(record["work"]),
        python=record["python"],
        evaluation_workers=record["evaluation_workers"],
    )


def record_id(launch: Launch, job: str, identifier: str) -> None:
    """Keep what the launcher calls a job."""
    write_json(launch.folder / IDS, {**read_ids(launch), job: identifier})


def read_ids(launch: Launch) -> dict[str, str]:
    """What the launcher calls the jobs that it was given, by name."""
    path = launch.folder / IDS
    return cast("dict[str, str]", json.loads(path.read_text(encoding="utf-8"))) if path.exists() else {}


def _launch_json(launch: Launch) -> dict[str, object]:
    return {
        "name": launch.name,
        "launcher": launch.launcher,
        "replicas": len(launch.jobs),
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "site_file": launch.site_file,
        "site_digest": launch.site_digest,
        "site_overrides": dict(launch.site_overrides),
    }


def _job_json(job: Job) -> dict[str, object]:
    return {
        "name": job.name,
        "number": job.number,
        "seed": job.seed,
        "recipe_name": job.recipe_name,
        "recipe_digest": digest(job.recipe),
        "work": str(job.work),
        "python": job.python,
        "evaluation_workers": job.evaluation_workers,
        "command": list(job.command),
    }


def _read_json(path: Path, what: str) -> dict[str, Any]:
    try:
        return cast("dict[str, Any]", json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        raise SwerveError(f"{path.parent}: not the folder of a {what}: it holds no {path.name}") from None
    except ValueError:
        raise SwerveError(f"{path}: torn: restore it, or launch anew") from None
