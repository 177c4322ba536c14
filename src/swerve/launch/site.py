"""The site file: what a cluster is called, where things lie on it, and who pays; none of it belongs to a recipe.

A TOML file read as strictly as a recipe: `--site FILE`, else `~/.config/swerve/site.toml` where there is one. Each
launcher reads its own section. Secrets are named here, never written down: `environment.inherit` lists variables whose
values come from whoever launches.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

from swerve.config import RecipeError, read_settings
from swerve.config.constraints import Count, CountOrZero

Contradictions = Iterator[tuple[str, str]]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORD = re.compile(r"[A-Za-z0-9_.,:@+*=/-]*")
_RESOURCE = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_TIME = re.compile(r"(\d+-)?\d{1,3}:\d\d(:\d\d)?")
_PINNED = re.compile(r".+@sha256:[0-9a-f]{64}")
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|_KEY$|^KEY$", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """What scored runs say of who ran them; stands in place of what their recipe says.

    Attributes:
        org: Who submits.
        platform: On what, in the submitter's own words.
    """

    org: str = ""
    platform: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Paths:
    """Where things lie, as absolute paths; empty leaves it to the recipe.

    Attributes:
        work: Working directory of jobs, below which relative paths of a recipe lie; empty is the present one.
        jobs: Folder of what is launched; empty is `jobs` in the working directory.
        runs: Folder of run directories.
        checkpoint: The policy, for recipes that do not train the one that ships.
        train_file: Tasks to train on, for recipes whose tasks come from files.
        validation_file: Held-out tasks, for the same recipes.
        images: Images of sandboxes, for recipes that need some.
        python: Interpreter that has Swerve; empty is the present one, or `python3` in a container.
    """

    work: str = ""
    jobs: str = ""
    runs: str = ""
    checkpoint: str = ""
    train_file: str = ""
    validation_file: str = ""
    images: str = ""
    python: str = ""

    def contradictions(self) -> Contradictions:
        """A job starts elsewhere, so that a relative path would name something else there."""
        for key in (one.name for one in fields(self)):
            value = getattr(self, key)
            named = key == "python" and "/" not in value
            if value and not named and not (value.startswith("/") or "://" in value):
                yield key, "must be absolute: a job starts in another directory"
            if any(ord(letter) < 32 or letter in "\"'%\\" for letter in value):
                yield key, "holds a quote, a percent sign, a backslash or a control character: name another path"


@dataclass(frozen=True, kw_only=True, slots=True)
class Container:
    """What jobs run inside.

    Attributes:
        runtime: `none` runs on the node itself. Kubernetes takes the image without a runtime.
        image: NAME@sha256:DIGEST of a registry (`docker://` before it for Apptainer), or /PATH.sif@sha256:DIGEST of a
            file. Scored runs refuse one without a digest.
        binds: Directories of the node that the container sees, SOURCE[:TARGET[:ro]].
    """

    runtime: Literal["none", "apptainer"] = "none"
    image: str = ""
    binds: tuple[str, ...] = ()

    @property
    def pinned(self) -> bool:
        """Whether the image is named by what it holds."""
        return bool(_PINNED.fullmatch(self.image))

    def contradictions(self) -> Contradictions:
        """A runtime needs an image; binds need a runtime."""
        if self.runtime != "none" and not self.image:
            yield "image", f'is missing: runtime = "{self.runtime}" runs one'
        if self.binds and self.runtime == "none":
            yield "binds", 'has no effect with runtime = "none": remove it'
        if "@" in self.image and not self.pinned:
            yield "image", "must end in @sha256: and 64 hexadecimal digits"


@dataclass(frozen=True, kw_only=True, slots=True)
class Environment:
    """What jobs find around them.

    Attributes:
        inherit: Names of variables that jobs get from whoever launches; the place for secrets.
        values: NAME=VALUE of variables that are no secret.
        prologue: Lines of shell before anything else, for example `module load apptainer`.
    """

    inherit: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    prologue: tuple[str, ...] = ()

    def contradictions(self) -> Contradictions:
        """Names are names, and no secret is written down."""
        for name in self.inherit:
            if not _NAME.fullmatch(name):
                yield "inherit", f"holds {name}: write names of variables only, never values"
        for pair in self.values:
            name, found, _ = pair.partition("=")
            if not found or not _NAME.fullmatch(name):
                yield "values", f"holds {pair}: write NAME=VALUE"
            elif name in self.inherit:
                yield "values", f"holds {name}, which inherit names too: keep one of them"


def _time_faults(time: str) -> Contradictions:
    """Complaints about a limit that `seconds_of` does not read."""
    if time and not _TIME.fullmatch(time):
        yield "time", "must be [D-]HH:MM[:SS]"


@dataclass(frozen=True, kw_only=True, slots=True)
class Slurm:
    """What Slurm is asked for; empty or 0 leaves it to the cluster.

    Attributes:
        partition: Where jobs queue.
        account: Who pays.
        qos: Quality of service.
        time: Limit of a job, [D-]HH:MM[:SS].
        nodes: Machines of a job.
        cpus_per_task: Cores on each.
        memory_mib: Memory on each.
        gres: Accelerators on each, for example `gpu:8`.
        exclusive: Share nodes with nobody.
        constraint: Features that nodes must have.
        reservation: Reservation to run in.
    """

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""
    nodes: Count = 1
    cpus_per_task: CountOrZero = 0
    memory_mib: CountOrZero = 0
    gres: str = ""
    exclusive: bool = False
    constraint: str = ""
    reservation: str = ""

    def contradictions(self) -> Contradictions:
        """Words go into a script, and stay words there."""
        for key in ("partition", "account", "qos", "gres", "constraint", "reservation"):
            if not _WORD.fullmatch(getattr(self, key)):
                yield key, "holds a character that no name of Slurm's has"
        yield from _time_faults(self.time)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ray:
    """What a Ray cluster is asked for, for the process that runs a job; 0 or empty asks for nothing.

    Attributes:
        address: Of the cluster's dashboard, http://HEAD:8265.
        cpus: Cores.
        gpus: GPUs.
        memory_mib: Memory.
        resources: NAME=AMOUNT of other resources, for example `TPU=4`.
    """

    address: str = ""
    cpus: CountOrZero = 0
    gpus: CountOrZero = 0
    memory_mib: CountOrZero = 0
    resources: tuple[str, ...] = ()

    @property
    def amounts(self) -> dict[str, float]:
        """Amounts of the other resources, by name."""
        return {name: float(amount) for name, _, amount in (pair.partition("=") for pair in self.resources)}

    def contradictions(self) -> Contradictions:
        """An address is one, and amounts are amounts."""
        if self.address and not re.fullmatch(r"https?://[^/@\s]+/?", self.address):
            yield "address", "must be http://HOST:PORT, without a user or a password"
        for pair in self.resources:
            if not re.fullmatch(r"[A-Za-z][\w.:-]*=\d+(\.\d+)?", pair):
                yield "resources", f"holds {pair}: write NAME=AMOUNT"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mount:
    """A volume of a pod.

    Attributes:
        claim: Name of the PersistentVolumeClaim.
        target: Where pods see it.
        writable: Whether they may write to it.
    """

    claim: str
    target: str
    writable: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Kubernetes:
    """What pods are asked for; empty or 0 leaves it to the cluster.

    Attributes:
        kind: What is made of a job, a JobSet or a RayJob.
        context: Of `kubectl`.
        namespace: Where jobs live.
        service_account: Who pods are to the cluster.
        queue: Kueue's local queue.
        time: Limit of an attempt, [D-]HH:MM[:SS].
        retries: Times a job is tried again after its pods failed.
        hosts: Pods of a job, one to a machine.
        accelerator: What is in them.
        accelerators: How many in each.
        tpu_type: Kind of TPU as GKE calls it, for example `tpu7x`.
        tpu_topology: Its arrangement, for example `2x2x1`.
        cpus: Cores of each pod.
        memory_mib: Memory of each pod.
        node_selector: NAME=VALUE of labels that nodes must have.
        volumes: CLAIM:/PATH[:ro] of PersistentVolumeClaims.
        secrets: Names of Secrets whose entries pods find in their environment.
        nested_sandboxes: Let pods make sandboxes: a user namespace of their own, a whole /proc, no seccomp filter.
    """

    kind: Literal["jobset", "rayjob"] = "jobset"
    context: str = ""
    namespace: str = ""
    service_account: str = ""
    queue: str = ""
    time: str = ""
    retries: CountOrZero = 3
    hosts: Count = 1
    accelerator: Literal["none", "tpu", "gpu"] = "none"
    accelerators: CountOrZero = 0
    tpu_type: str = ""
    tpu_topology: str = ""
    cpus: CountOrZero = 0
    memory_mib: CountOrZero = 0
    node_selector: tuple[str, ...] = ()
    volumes: tuple[str, ...] = ()
    secrets: tuple[str, ...] = ()
    nested_sandboxes: bool = False

    @property
    def mounts(self) -> tuple[Mount, ...]:
        """The volumes."""
        parts = (volume.split(":") for volume in self.volumes)
        return tuple(Mount(claim=one[0], target=one[1], writable=one[2:] == []) for one in parts)

    def contradictions(self) -> Contradictions:
        """Names are names of the cluster's, and accelerators are counted where there are some."""
        for key in ("namespace", "service_account", "queue"):
            if getattr(self, key) and not _RESOURCE.fullmatch(getattr(self, key)):
                yield key, "must be small letters, digits, dashes and dots"
        for name in self.secrets:
            if not _RESOURCE.fullmatch(name):
                yield "secrets", f"holds {name}: write names of Secrets only, never values"
        for volume in self.volumes:
            if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*:/[\w./-]*(:ro)?", volume):
                yield "volumes", f"holds {volume}: write CLAIM:/PATH or CLAIM:/PATH:ro"
        for pair in self.node_selector:
            if not re.fullmatch(r"[\w./-]+=[\w.-]*", pair):
                yield "node_selector", f"holds {pair}: write NAME=VALUE"
        yield from _time_faults(self.time)
        if (self.accelerator == "none") != (self.accelerators == 0):
            yield "accelerators", f'does not go with accelerator = "{self.accelerator}": state both or neither'
        if (self.tpu_type or self.tpu_topology) and self.accelerator != "tpu":
            yield "tpu_type" if self.tpu_type else "tpu_topology", 'needs accelerator = "tpu"'


def seconds_of(time: str) -> int:
    """Seconds of a limit, [D-]HH:MM[:SS]."""
    days, _, clock = time.rpartition("-")
    hours, minutes, seconds = (*(int(part) for part in clock.split(":")), 0)[:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """One cluster as one group uses it.

    Attributes:
        recipe: Recipe to launch where the command line names none.
        evaluation_workers: Checkpoints that a scored run's evaluation evaluates at once.
        submission: Who submits scored runs.
        paths: Where things lie.
        container: What jobs run inside.
        environment: What jobs find around them.
        slurm: What Slurm is asked for.
        ray: What a Ray cluster is asked for.
        kubernetes: What Kubernetes is asked for.
    """

    recipe: str = ""
    evaluation_workers: Count = 1
    submission: Submission = field(default_factory=Submission)
    paths: Paths = field(default_factory=Paths)
    container: Container = field(default_factory=Container)
    environment: Environment = field(default_factory=Environment)
    slurm: Slurm = field(default_factory=Slurm)
    ray: Ray = field(default_factory=Ray)
    kubernetes: Kubernetes = field(default_factory=Kubernetes)

    @property
    def work(self) -> Path:
        """Working directory of jobs."""
        return Path(self.paths.work or Path.cwd())

    @property
    def jobs(self) -> Path:
        """Folder of what is launched."""
        return Path(self.paths.jobs) if self.paths.jobs else self.work / "jobs"


def default_site_file() -> Path:
    """Where the site file is looked for when none is named."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "swerve" / "site.toml"


def find_site(path: Path | None) -> Path | None:
    """The site file: the one named, else the default one, else `None`."""
    if path is None and default_site_file().exists():
        return default_site_file()
    return path


def read_site(path: Path | None, overrides: Mapping[str, str] | None = None) -> Site:
    """A site.

    Args:
        path: Its file; `None` for one that leaves all to others.
        overrides: Values from the command line by key, as text.

    Raises:
        RecipeError: A key or value cannot be used.
    """
    layers = [(f"--{key.rpartition('.')[2]}", {key: value}) for key, value in (overrides or {}).items()]
    site = read_settings(Site, path, "site file", layers)
    for name in (pair.partition("=")[0] for pair in site.environment.values):
        if _SECRET.search(name):  # said here, where the value is not repeated
            raise RecipeError(
                [f"{path}: environment.values holds {name}, which looks like a secret: name it in inherit"]
            )
    return site


def site_digest(path: Path | None) -> str:
    """SHA-256 of a site file; empty where there is none."""
    return hashlib.sha256(path.read_bytes()).hexdigest() if path else ""
