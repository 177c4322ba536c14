"""From a recipe, a few options and the site to the jobs of a launch, checked before anything is written or submitted.

One rule of precedence: the recipe and those it extends; the site file's paths and names; what follows from `--gbs` by
the benchmark's laws; the options and settings of the command line. Two options for one setting are refused.
"""

import re
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import swerve
from swerve.config import TrainRecipe, read_layered, settings_by_law, stated_values
from swerve.launch.job import Job, Launch
from swerve.launch.site import Site, site_digest
from swerve.types import SwerveError

OPTIONS = {
    "--lr": "optimizer.learning_rate",
    "--clip": "optimizer.max_grad_norm",
    "--val-start": "mlperf.first_evaluation_step",
    "--max-steps": "training.num_steps",
    "--target": "mlperf.target_accuracy",
}
"""Options that stand for one setting each."""

_OF_LAUNCH = {
    "run.seed": "the seeds of replicas count up from --seed-base",
    "run.name": "runs are named after --name and their replica",
    "mlperf.log": "each job keeps its log in the directory of its run",
}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_NUM_SEEDS = 2**31
_BENCHMARK = Path(swerve.__file__).resolve().parents[2] / "recipes" / "mlperf"


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What the command line asks for.

    Attributes:
        launcher: Name of the launcher.
        site: Where to launch.
        site_file: File it was read from, or `None`.
        site_overrides: What the command line set in its place, as text by key.
        recipe: Recipe's file; the site's, or else that of the benchmark, where `None`.
        gbs: Global batch size whose settings are wanted, or `None`.
        named: Values of `OPTIONS` given, as text.
        overrides: Settings given by key, as text.
        replicas: Jobs.
        seed_base: Seed of the first job; from the operating system where `None`.
        name: Of the launch; after recipe and time where empty.
    """

    launcher: str
    site: Site
    site_file: Path | None = None
    site_overrides: Mapping[str, str] = field(default_factory=dict[str, str])
    recipe: Path | None = None
    gbs: int | None = None
    named: Mapping[str, str] = field(default_factory=dict[str, str])
    overrides: Mapping[str, str] = field(default_factory=dict[str, str])
    replicas: int = 1
    seed_base: int | None = None
    name: str = ""


def plan(request: Request) -> Launch:
    """The jobs of a request; writes nothing.

    Args:
        request: What is asked for.

    Returns:
        The launch, every recipe of it resolved and checked.

    Raises:
        SwerveError: Something of it cannot be used; every fault of the recipe is named.
    """
    _check_options(request)
    site, path = request.site, request.recipe or _default_recipe(request)
    name = request.name or f"{path.stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = site.jobs.absolute() / name
    recipe = _resolve(request, path)
    recipe = replace(recipe, run=replace(recipe.run, directory=str(site.work / recipe.run.directory)))
    _check_site(request, recipe)
    first = secrets.randbelow(_NUM_SEEDS - request.replicas) if request.seed_base is None else request.seed_base
    inside = site.container.runtime != "none" or request.launcher in ("ray", "kubernetes")
    jobs = tuple(
        Job(
            name=f"{name}-{number}",
            number=number,
            recipe=replace(recipe, run=replace(recipe.run, seed=first + number - 1, name=f"{name}-{number}")),
            recipe_name=path.name,
            folder=folder / str(number),
            work=site.work.absolute(),
            python=site.paths.python or ("python3" if inside else sys.executable),
            evaluation_workers=site.evaluation_workers,
        )
        for number in range(1, request.replicas + 1)
    )
    for job in jobs:
        if job.run.exists():
            raise SwerveError(f"{job.run}: exists already: choose another --name")
    return Launch(
        name=name,
        launcher=request.launcher,
        folder=folder,
        jobs=jobs,
        site=site,
        site_file=str(request.site_file.resolve()) if request.site_file else "",
        site_digest=site_digest(request.site_file),
        site_overrides=request.site_overrides,
    )


def _check_site(request: Request, recipe: TrainRecipe) -> None:
    """Refuse what the site asks for and a job of this recipe and launcher would not do."""
    site, container = request.site, request.site.container
    if container.image and container.runtime == "none" and request.launcher != "kubernetes":
        raise SwerveError(
            f'{request.site_file}: container.image has no effect with container.runtime = "none": set the runtime, or '
            "remove it"
        )
    if recipe.mlperf.enabled and container.image and not container.pinned:
        raise SwerveError(
            f'{request.site_file}: container.image = "{container.image}" is a name that may come to mean another '
            "image: a scored run names it by digest, NAME@sha256:..."
        )
    if recipe.mlperf.enabled and recipe.engine.kind != "embedded" and site.evaluation_workers != 1:
        raise SwerveError(
            f"{request.site_file}: evaluation_workers = {site.evaluation_workers}: the servers of engine.urls hold one "
            "policy at a time: set it to 1"
        )


def _check_options(request: Request) -> None:
    if request.replicas < 1:
        raise SwerveError(f"--replicas {request.replicas}: must be at least 1")
    if request.seed_base is not None and not 0 <= request.seed_base <= _NUM_SEEDS - request.replicas:
        raise SwerveError(
            f"--seed-base {request.seed_base}: must be at least 0 and at most {_NUM_SEEDS - request.replicas}"
        )
    if request.name and not _NAME.fullmatch(request.name):
        raise SwerveError(f"--name {request.name}: letters, digits, dots, underscores and dashes, at most 64")
    for option in request.named:
        if OPTIONS[option] in request.overrides:
            raise SwerveError(f"{option} and --{OPTIONS[option]} are the same setting: give one of them")
    for key, why in _OF_LAUNCH.items():
        if key in request.overrides:
            raise SwerveError(f"--{key}: {why}: remove it")


def _default_recipe(request: Request) -> Path:
    if request.site.recipe:
        return request.site.work / request.site.recipe
    wanted = _BENCHMARK / f"qwen35_397b_gbs{request.gbs}_v7x128.toml"
    path = wanted if wanted.exists() else _BENCHMARK / "qwen35_397b_gbs1024_v7x128.toml"
    if not path.exists():
        raise SwerveError("no recipe named, and none of the benchmark's lies beside this installation: name a RECIPE")
    return path


def _resolve(request: Request, path: Path) -> TrainRecipe:
    layers: list[tuple[str, Mapping[str, str]]] = []
    stated = {**{key: str(value) for key, value in stated_values(path).items()}, **request.overrides}
    if request.site_file:
        layers.append((str(request.site_file), _from_site(request.site, stated)))
    if request.gbs is not None:
        layers.append((f"--gbs {request.gbs}", settings_by_law(request.gbs, request.overrides)))
    layers += [(f"{option} {value}", {OPTIONS[option]: value}) for option, value in request.named.items()]
    layers.append(("command line", request.overrides))
    recipe = read_layered(TrainRecipe, path, layers)
    for key in ("run.name", "mlperf.log"):
        if stated.get(key):
            raise SwerveError(f"{path}: {key}: {_OF_LAUNCH[key]}: remove it")
    return recipe


def _from_site(site: Site, stated: Mapping[str, str]) -> dict[str, str]:
    """Settings that the site knows better than the recipe, where the recipe needs such a thing at all.

    Args:
        site: Its file, read.
        stated: What recipe and command line state, by key.
    """
    paths = site.paths
    from_files = stated.get("tasks.family") == "files"
    scored = stated.get("mlperf.enabled", "").lower() == "true"
    candidates = (
        ("run.directory", paths.runs, True),
        ("policy.checkpoint", paths.checkpoint, stated.get("policy.checkpoint", "tiny") != "tiny"),
        ("tasks.train_file", paths.train_file, from_files),
        ("tasks.validation_file", paths.validation_file, from_files),
        ("sandbox.images", paths.images, bool(stated.get("sandbox.images"))),
        ("mlperf.org", site.submission.org, scored),
        ("mlperf.platform", site.submission.platform, scored),
    )
    return {key: value for key, value, needed in candidates if value and needed}
