"""Hands jobs to Kubernetes: a JobSet or a RayJob each, made by `kubectl`.

    ConfigMap NAME     files of the job's folder                 mounted at /etc/swerve/job
    JobSet NAME        one Job of `hosts` pods                   or
    RayJob NAME        a Ray cluster of `hosts` pods, made for the job, and the job on its head

A pod that fails is made again, `retries` times, and the job goes on from what its folder says. A job that failed for a
reason of its own (exit codes 1 and 2) is not tried again in a JobSet; a RayJob cannot tell the two apart.
"""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from swerve.launch.job import Job, Launch, job_files
from swerve.launch.launcher import last_line
from swerve.launch.remote import SCRIPT, script, values
from swerve.launch.site import Kubernetes, Site, seconds_of
from swerve.types import MachineError, SwerveError

Manifest = dict[str, Any]

_CARRIED = "/etc/swerve/job"
_COMMAND = ("bash", f"{_CARRIED}/{SCRIPT}")
_USER = 10001
"""Of the image that `containers/` builds."""
_MAX_NAME = 47
"""Letters of a RayJob's name, the shorter of the two: what is made for it has names that begin with its own."""
_NESTED = {"procMount": "Unmasked", "seccompProfile": {"type": "Unconfined"}}
"""What a sandbox needs of the container that it is made in."""
_OWN_FAULT = (1, 2)
"""Exit codes of a job that would fail again."""
_HEALTHY = (
    "from urllib.request import urlopen; "
    "assert b'success' in urlopen('http://localhost:52365/api/local_raylet_healthz', timeout=5).read()"
)
_FINAL = {"Completed": "SUCCEEDED", "Complete": "SUCCEEDED", "Failed": "FAILED"}


class KubernetesLauncher:
    """Implements `swerve.launch.Launcher`."""

    def check(self, launch: Launch) -> None:
        """Refuse what one process cannot do, and what would be lost with the pods."""
        _check_site(launch)
        site, file = launch.site, launch.site_file
        if site.kubernetes.hosts > 1:
            raise SwerveError(
                f"{file}: kubernetes.hosts = {site.kubernetes.hosts}: training runs in one process on one machine: set "
                "it to 1 (--dry-run shows the manifest for more)"
            )
        for job in launch.jobs:
            for what, path in (("paths.work", job.work), ("run.directory", job.run.parent)):
                if not any(path.is_relative_to(mount.target) for mount in site.kubernetes.mounts if mount.writable):
                    raise SwerveError(
                        f"{file or 'no site file'}: {what}: {path} lies in no volume that can be written, and would be "
                        "lost with the pod: name one in kubernetes.volumes, CLAIM:/PATH"
                    )

    def files(self, launch: Launch) -> dict[str, str]:
        """The manifest of each job."""
        _check_site(launch)
        return {f"{job.number}/job.yaml": _text(_manifests(job, launch.site)) for job in launch.jobs}

    def submit(self, launch: Launch) -> Iterator[tuple[str, str]]:
        """Make what the manifests say; what is there already is never changed."""
        for job in launch.jobs:
            manifest = job.folder / "job.yaml"
            if shutil.which("kubectl") is None:
                raise MachineError(
                    f"kubectl is not here: install it, or have it done elsewhere: kubectl create -f {manifest}"
                )
            _create(launch.site, str(manifest))
            yield job.name, resource_name(job)

    def states(self, launch: Launch, ids: Mapping[str, str]) -> dict[str, str]:
        """What the controllers say."""
        kind = launch.site.kubernetes.kind
        text = _kubectl(launch.site, "get", kind, *ids.values(), "--ignore-not-found", "-o", "json")
        found: Manifest = json.loads(text) if text.strip() else {}
        items = found.get("items", [found] if found else [])
        said = {item["metadata"]["name"]: _state(item) for item in items}
        return {name: said.get(identifier, "") for name, identifier in ids.items()}

    def cancel(self, launch: Launch, ids: Mapping[str, str]) -> None:
        """Delete what has not ended, with its pods."""
        ended = {name for name, state in self.states(launch, ids).items() if state in _FINAL.values()}
        for name, identifier in ids.items():
            if name not in ended:
                kinds = f"{launch.site.kubernetes.kind},configmap"
                _kubectl(launch.site, "delete", kinds, identifier, "--ignore-not-found", "--cascade=foreground")


def resource_name(job: Job) -> str:
    """What a job is called in Kubernetes, which takes small letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")


def _check_site(launch: Launch) -> None:
    """Refuse what no manifest can say."""
    site, file = launch.site, launch.site_file or "no site file"
    container = site.container
    if container.runtime != "none":
        raise SwerveError(
            f'{file}: container.runtime = "{container.runtime}": Kubernetes runs the image itself: "none"'
        )
    if not container.pinned or container.image.startswith("/"):
        raise SwerveError(f'{file}: container.image = "{container.image}": name it by digest, REGISTRY/NAME@sha256:...')
    if site.environment.inherit:
        raise SwerveError(
            f"{file}: environment.inherit: a manifest would show the value of {site.environment.inherit[0]} to "
            "everyone: put it into a Secret of the cluster, and name that in kubernetes.secrets"
        )
    for name in (resource_name(job) for job in launch.jobs):
        if len(name) > _MAX_NAME or not name[:1].isalpha():
            raise SwerveError(
                f"--name {launch.name}: {name} must begin with a letter and have at most {_MAX_NAME}: choose another"
            )


def _manifests(job: Job, site: Site) -> list[Manifest]:
    metadata = {"name": resource_name(job), "labels": _labels(job)}
    if site.kubernetes.namespace:
        metadata["namespace"] = site.kubernetes.namespace
    data = {**job_files(job), SCRIPT: script(job, site)}
    carried = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": data}
    queue = site.kubernetes.queue
    main = {**metadata, "labels": metadata["labels"] | ({"kueue.x-k8s.io/queue-name": queue} if queue else {})}
    make = _jobset if site.kubernetes.kind == "jobset" else _rayjob
    return [carried, make(job, site, main)]


def _labels(job: Job) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "swerve",
        "app.kubernetes.io/instance": resource_name(job),
        "swerve/seed": str(job.seed),
    }


def _jobset(job: Job, site: Site, metadata: Manifest) -> Manifest:
    wanted = site.kubernetes
    spec = {
        "parallelism": wanted.hosts,
        "completions": wanted.hosts,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podFailurePolicy": {
            "rules": [
                {
                    "action": "FailJob",
                    "onExitCodes": {"containerName": "swerve", "operator": "In", "values": list(_OWN_FAULT)},
                }
            ]
        },
        **_deadline(wanted),
        "template": _pod(job, site, {"command": list(_COMMAND)}),
    }
    own = {"name": "ownFault", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": metadata,
        "spec": {
            "failurePolicy": {"maxRestarts": wanted.retries, "rules": [own]},
            "replicatedJobs": [{"name": "run", "replicas": 1, "template": {"spec": spec}}],
        },
    }


def _rayjob(job: Job, site: Site, metadata: Manifest) -> Manifest:
    wanted = site.kubernetes
    # In place of those that the operator adds, which need a program that the image does not have.
    probe = {
        "exec": {"command": ["python3", "-c", _HEALTHY]},
        "initialDelaySeconds": 10,
        "periodSeconds": 10,
        "timeoutSeconds": 6,
        "failureThreshold": 120,
    }
    pod = _pod(job, site, {"livenessProbe": probe, "readinessProbe": probe})
    cluster: Manifest = {"headGroupSpec": {"rayStartParams": {}, "template": pod}}
    if wanted.hosts > 1:
        workers = wanted.hosts - 1
        counts = {"replicas": workers, "minReplicas": workers, "maxReplicas": workers}
        cluster["workerGroupSpecs"] = [{"groupName": "workers", **counts, "rayStartParams": {}, "template": pod}]
    spec = {
        "entrypoint": " ".join(_COMMAND),
        "jobId": metadata["name"],
        "backoffLimit": wanted.retries,
        "shutdownAfterJobFinishes": True,
        **_deadline(wanted),
        "rayClusterSpec": cluster,
    }
    return {"apiVersion": "ray.io/v1", "kind": "RayJob", "metadata": metadata, "spec": spec}


def _deadline(wanted: Kubernetes) -> Manifest:
    return {"activeDeadlineSeconds": seconds_of(wanted.time)} if wanted.time else {}


def _pod(job: Job, site: Site, main: Manifest) -> Manifest:
    """The template of a pod whose one container is given what else it needs."""
    wanted, mounts = site.kubernetes, site.kubernetes.mounts
    volumes: list[Manifest] = [{"name": "job", "configMap": {"name": resource_name(job)}}]
    volumes += [
        {"name": f"volume-{number}", "persistentVolumeClaim": {"claimName": mount.claim}}
        for number, mount in enumerate(mounts)
    ]
    places: list[Manifest] = [{"name": "job", "mountPath": _CARRIED, "readOnly": True}]
    places += [
        {"name": f"volume-{number}", "mountPath": mount.target, **({} if mount.writable else {"readOnly": True})}
        for number, mount in enumerate(mounts)
    ]
    container = {
        "name": "swerve",
        "image": site.container.image,
        **main,
        "env": [{"name": name, "value": value} for name, value in values(site).items()],
        "envFrom": [{"secretRef": {"name": name}} for name in wanted.secrets],
        "resources": _resources(wanted),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            **(_NESTED if wanted.nested_sandboxes else {}),
        },
        "volumeMounts": places,
    }
    spec = {
        "restartPolicy": "Never",
        "serviceAccountName": wanted.service_account,
        "nodeSelector": _node_selector(wanted),
        "hostUsers": False if wanted.nested_sandboxes else None,
        "securityContext": {"runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER},
        "containers": [{key: value for key, value in container.items() if value}],
        "volumes": volumes,
    }
    stated = {key: value for key, value in spec.items() if value not in ("", {}, None)}
    return {"metadata": {"labels": _labels(job)}, "spec": stated}


def _resources(wanted: Kubernetes) -> Manifest:
    """Requests and limits are one: a run measures time, and shares with nobody."""
    accelerator = {"tpu": "google.com/tpu", "gpu": "nvidia.com/gpu"}.get(wanted.accelerator, "")
    amounts = {
        "cpu": str(wanted.cpus) if wanted.cpus else "",
        "memory": f"{wanted.memory_mib}Mi" if wanted.memory_mib else "",
        accelerator: str(wanted.accelerators),
    }
    stated = {name: amount for name, amount in amounts.items() if name and amount}
    return {"requests": stated, "limits": dict(stated)} if stated else {}


def _node_selector(wanted: Kubernetes) -> dict[str, str]:
    chosen = dict(pair.split("=", 1) for pair in wanted.node_selector)
    for name, value in (("accelerator", wanted.tpu_type), ("topology", wanted.tpu_topology)):
        if value:
            chosen[f"cloud.google.com/gke-tpu-{name}"] = value
    return chosen


def _state(item: Manifest) -> str:
    """One word on a JobSet or a RayJob: SUCCEEDED, FAILED, RUNNING or PENDING."""
    status: Manifest = item.get("status", {})
    final = status.get("terminalState") or status.get("jobDeploymentStatus", "")
    if final in _FINAL:
        return _FINAL[final]
    running = any(job.get("active", 0) for job in status.get("replicatedJobsStatus", []))
    return "RUNNING" if running or final == "Running" else "PENDING"


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as such, and nothing by reference."""

    def ignore_aliases(self, data: object) -> bool:
        """Whatever occurs twice is written twice."""
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)


def _text(manifests: list[Manifest]) -> str:
    return yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False, width=120)


def _create(site: Site, manifest: str) -> None:
    """Make all of a manifest or nothing of it."""
    done = _run(site, "create", "-f", manifest)
    if done.returncode:
        made = [line.split()[0] for line in done.stdout.splitlines() if line.endswith(" created")]
        if made:
            _run(site, "delete", *made)
        raise MachineError(f"kubectl create -f {manifest}: {last_line(done.stderr)}")


def _kubectl(site: Site, *words: str) -> str:
    done = _run(site, *words)
    if done.returncode:
        raise MachineError(f"kubectl {words[0]}: {last_line(done.stderr)}")
    return done.stdout


def _run(site: Site, *words: str) -> subprocess.CompletedProcess[str]:
    where = [("--context", site.kubernetes.context), ("--namespace", site.kubernetes.namespace)]
    options = [word for option, value in where if value for word in (option, value)]
    try:
        return subprocess.run(["kubectl", *options, *words], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise MachineError("kubectl is not here: install it and set it up for the cluster") from None
