"""What `swerve launch` does: launchers by name, and from parsed words to jobs that run."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from swerve.cli.recipe_arguments import dry_run_text, overrides_from
from swerve.config import check_startable
from swerve.types import SwerveError

if TYPE_CHECKING:
    from swerve.launch import Job, JobState, Launch, Launcher


@dataclass(frozen=True, kw_only=True, slots=True)
class Registered:
    """A launcher, not imported yet.

    Attributes:
        summary: One line of help.
        place: Its class, MODULE:NAME.
        options: Options of its own with their help; each stands in place of the site's `SECTION.OPTION`.
    """

    summary: str
    place: str
    options: dict[str, str] = dataclasses.field(default_factory=dict)

    def make(self) -> Launcher:
        """An instance."""
        module, _, name = self.place.partition(":")
        return cast("Callable[[], Launcher]", getattr(importlib.import_module(module), name))()


LAUNCHERS = {
    "local": Registered(summary="run jobs here, one after the other", place="swerve.launch.local:LocalLauncher"),
    "slurm": Registered(
        summary="submit jobs to Slurm",
        place="swerve.launch.slurm:SlurmLauncher",
        options={
            "time": "limit of a job, [D-]HH:MM[:SS]",
            "partition": "where jobs queue",
            "account": "who pays",
        },
    ),
    "ray": Registered(
        summary="submit jobs to a Ray cluster",
        place="swerve.launch.ray:RayLauncher",
        options={"address": "of the cluster's dashboard, http://HEAD:8265"},
    ),
    "kubernetes": Registered(
        summary="make JobSets or RayJobs in Kubernetes",
        place="swerve.launch.kubernetes:KubernetesLauncher",
        options={
            "kind": "what is made of a job, jobset or rayjob",
            "time": "limit of an attempt, [D-]HH:MM[:SS]",
            "namespace": "where jobs live",
        },
    ),
}
"""Every launcher by name; the section of the site file that it reads has the same name."""


def make_launch(arguments: argparse.Namespace, launcher: str) -> Launch:
    """The launch that the command line asks for, checked; nothing is written.

    Raises:
        SwerveError: Something of it cannot be used.
    """
    from swerve.launch import OPTIONS, Request, find_site, plan, read_site

    site_file = find_site(arguments.site)
    given = {option: getattr(arguments, option) for option in LAUNCHERS[launcher].options}
    site_overrides = {f"{launcher}.{option}": value for option, value in given.items() if value is not None}
    named = {option: getattr(arguments, option[2:].replace("-", "_")) for option in OPTIONS}
    return plan(
        Request(
            launcher=launcher,
            site=read_site(site_file, site_overrides),
            site_file=site_file,
            site_overrides=site_overrides,
            recipe=arguments.recipe,
            gbs=arguments.gbs,
            named={option: value for option, value in named.items() if value is not None},
            overrides=overrides_from(arguments),
            replicas=arguments.replicas,
            seed_base=arguments.seed_base,
            name=arguments.name,
        )
    )


def start(launch: Launch) -> None:
    """Write a launch's folder and hand its jobs over; where one is not taken, none of them is left.

    Raises:
        SwerveError: The launcher cannot do what is asked.
        MachineError: A job was not taken.
    """
    from swerve.launch import freeze, read_ids, record_id

    check_startable(launch.jobs[0].recipe, launch.jobs[0].recipe_name)
    launcher = LAUNCHERS[launch.launcher].make()
    launcher.check(launch)
    freeze(launch, launcher.files(launch))
    try:
        for name, identifier in launcher.submit(launch):
            record_id(launch, name, identifier)
            job = next(one for one in launch.jobs if one.name == name)
            print(f"{name}: {launch.launcher} job {identifier}, seed {job.seed}, {job.folder}", file=sys.stderr)
    except SwerveError:
        if ids := read_ids(launch):
            launcher.cancel(launch, ids)
        raise


def describe(launch: Launch, as_json: bool) -> str:
    """What would be launched: recipe and arithmetic, command lines, and what is handed over."""
    files = LAUNCHERS[launch.launcher].make().files(launch)
    first = launch.jobs[0]
    extra: dict[str, float | str] = {
        "launch": f"{launch.name}: {len(launch.jobs)} by {launch.launcher}",
        "site": f"{launch.site_file}, sha256 {launch.site_digest}" if launch.site_file else "no site file",
        "seeds": ", ".join(str(job.seed) for job in launch.jobs),
        "folder": str(launch.folder),
    }
    if as_json:
        jobs = [_job_json(job) for job in launch.jobs]
        text = json.loads(dry_run_text(first.recipe, as_json=True))
        return json.dumps({**text, **extra, "name": launch.name, "jobs": jobs, "files": files}, indent=2)
    lines = [dry_run_text(first.recipe, extra=extra)]
    for job in launch.jobs:
        lines.append(f"\n# {job.name}: seed {job.seed}, run {job.run}")
        lines += [f"#   {phase:<9} {' '.join(words)}" for phase, words in job.commands().items()]
    for name, text in files.items():
        lines += [f"\n# {launch.folder / name}", text.rstrip()]
    return "\n".join(lines)


def _job_json(job: Job) -> dict[str, object]:
    return {
        "name": job.name,
        "seed": job.seed,
        "run": str(job.run),
        "folder": str(job.folder),
        "command": list(job.command),
        "commands": {phase: list(words) for phase, words in job.commands().items()},
    }


def find_launch(name: str, site: Path | None) -> Launch:
    """A launch by its name or folder.

    Raises:
        SwerveError: There is none.
    """
    from swerve.launch import find_site, read_launch, read_site

    if "/" in name:
        return read_launch(Path(name))
    folder = read_site(find_site(site)).jobs
    if not (folder / name).is_dir():
        known = sorted(path.parent.name for path in folder.glob("*/launch.json"))
        raise SwerveError(
            f"{folder}: holds no launch {name}; " + (f"it holds {', '.join(known)}" if known else "none yet")
        )
    return read_launch(folder / name)


def statuses(launch: Launch) -> list[dict[str, object]]:
    """What is known of each job: from its own state, and from the launcher."""
    from swerve.launch import read_ids, read_state

    ids = read_ids(launch)
    launcher = LAUNCHERS[launch.launcher].make().states(launch, ids) if ids else {}
    found: list[dict[str, object]] = []
    for job in launch.jobs:
        state = read_state(job.folder)
        said = launcher.get(job.name, "")
        record = {"name": job.name, "seed": job.seed, "id": ids.get(job.name, ""), "launcher": said}
        cause = state.cause or (_lost(job, state, said) if job.name in ids else "")
        found.append({**record, **dataclasses.asdict(state), "phase": _phase(state, said), "cause": cause})
    return found


def _phase(state: JobState, said: str) -> str:
    """How far a job is; of one whose folder is not seen here, what the launcher says."""
    ended = {"succeeded": "finished", "failed": "failed"}
    return ended.get(said.partition(" ")[0].lower(), state.phase) if state.attempt == 0 else state.phase


_NO_END = (
    *("pending", "configuring", "running", "suspended", "completing", "requeued"),
    *("succeeded", "stopped", "cancelled"),
)
"""Words of launchers that need no explanation."""


def _lost(job: Job, state: JobState, said: str) -> str:
    """What to say of a job that stopped without a word of its own."""
    word = said.partition(" ")[0].lower()
    if state.phase in ("finished", "failed") or word in _NO_END:
        return ""
    return f"it ended without saying why{f': {said}' if said else ''}: see {job.folder}"


def table(rows: Sequence[dict[str, object]]) -> str:
    """Status as text, a line per job, and the cause below it."""
    heads = ("name", "seed", "id", "launcher", "phase", "attempt", "outcome")
    cells = [[str(row[head]) or "-" for head in heads] for row in rows]
    widths = [max(len(head), *(len(line[column]) for line in cells)) for column, head in enumerate(heads)]
    lines = ["  ".join(f"{head:<{width}}" for head, width in zip(heads, widths, strict=True)).rstrip()]
    for row, line in zip(rows, cells, strict=True):
        lines.append("  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip())
        if row["cause"]:
            lines.append(f"    {row['cause']}")
    return "\n".join(lines)
