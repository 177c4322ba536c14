"""Manifests that a cluster takes, and what becomes of them; a `kubectl` of ours stands in for the cluster."""

import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from swerve.cli.launching import statuses
from swerve.cli.main import main
from swerve.launch import Launch, Request, freeze, plan, read_job, read_site, record_id
from swerve.launch.kubernetes import KubernetesLauncher, resource_name
from swerve.launch.site import seconds_of
from swerve.types import MachineError, SwerveError

from .schemas import faults

RECIPE = Path(__file__).parents[3] / "recipes" / "demo.toml"
IMAGE = "registry.example.org/swerve@sha256:" + "5" * 64
SITE = f"""
[paths]
work = "/mnt/work"
jobs = "JOBS"
[container]
image = "{IMAGE}"
[environment]
values = ["JAX_PLATFORMS=tpu"]
prologue = ["ulimit -n 65536"]
[kubernetes]
namespace = "research"
service_account = "swerve"
queue = "tpus"
accelerator = "tpu"
accelerators = 4
tpu_type = "tpu7x"
tpu_topology = "2x2x1"
cpus = 64
memory_mib = 262144
node_selector = ["example.org/pool=v7x"]
volumes = ["swerve-work:/mnt/work", "models:/models:ro"]
secrets = ["swerve-secrets"]
time = "1-06:30"
nested_sandboxes = true
"""
JOB = ("spec", "replicatedJobs", 0, "template")
Make = Callable[..., Launch]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Launches of two jobs on the site above, with changes to its text and settings above it."""

    def build(*changes: tuple[str, str], name: str = "night_1", **settings: str) -> Launch:
        text = SITE.replace("JOBS", str(tmp_path / "jobs"))
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        file = tmp_path / "site.toml"
        file.write_text(text)
        site = read_site(file, {f"kubernetes.{key}": value for key, value in settings.items()})
        request = Request(launcher="kubernetes", site=site, site_file=file, recipe=RECIPE, replicas=2, seed_base=7)
        return plan(replace(request, name=name))

    return build


def manifests(launch: Launch, number: int = 1) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(KubernetesLauncher().files(launch)[f"{number}/job.yaml"]))


@pytest.mark.parametrize("kind", ["jobset", "rayjob"])
@pytest.mark.parametrize("hosts", ["1", "4"])
def test_manifests_keep_to_their_schemas(make: Make, kind: str, hosts: str):
    config, job = manifests(make(kind=kind, hosts=hosts))
    assert (config["kind"], job["kind"].lower()) == ("ConfigMap", kind)
    assert faults(config) + faults(job) == []


@pytest.mark.parametrize(
    ("kind", "at", "old", "new"),
    [
        ("jobset", (), "spec", "specs"),
        ("jobset", ("spec", "failurePolicy"), "maxRestarts", "maxRestart"),
        ("jobset", (*JOB, "spec"), "backoffLimit", "backofflimit"),
        ("jobset", (*JOB, "spec", "template", "spec"), "nodeSelector", "nodeselector"),
        ("rayjob", ("spec",), "entrypoint", "entryPoint"),
        ("rayjob", ("spec", "rayClusterSpec"), "headGroupSpec", "headgroupSpec"),
        ("rayjob", ("spec", "rayClusterSpec", "headGroupSpec", "template", "spec", "containers", 0), "image", "img"),
        ("rayjob", ("spec", "rayClusterSpec", "workerGroupSpecs", 0), "replicas", "replica"),
    ],
)
def test_the_schemas_find_a_key_that_is_misspelt(make: Make, kind: str, at: tuple[Any, ...], old: str, new: str):
    job = manifests(make(kind=kind, hosts="2"))[1]
    place = job
    for key in at:
        place = place[key]
    place[new] = place.pop(old)
    assert any(f"{new}: unknown" in fault for fault in faults(job))


def test_the_schemas_find_a_value_of_another_type(make: Make):
    jobset, rayjob = manifests(make())[1], manifests(make(kind="rayjob"))[1]
    jobset["spec"]["failurePolicy"]["maxRestarts"] = "3"
    rayjob["spec"]["shutdownAfterJobFinishes"] = 1
    assert "maxRestarts" in faults(jobset)[0]
    assert faults(rayjob) == [".spec.shutdownAfterJobFinishes: is no bool"]


@pytest.mark.parametrize("kind", ["jobset", "rayjob"])
def test_a_manifest_says_what_the_site_asks_for(make: Make, kind: str):
    job = manifests(make(kind=kind), 2)[1]
    spec = job["spec"]
    inner = spec["replicatedJobs"][0]["template"]["spec"] if kind == "jobset" else spec
    pod = (inner if kind == "jobset" else spec["rayClusterSpec"]["headGroupSpec"])["template"]["spec"]
    (container,) = pod["containers"]
    assert job["metadata"]["namespace"] == "research"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "tpus"
    assert job["metadata"]["labels"]["swerve/seed"] == "8"
    assert (container["image"], pod["serviceAccountName"], pod["hostUsers"]) == (IMAGE, "swerve", False)
    assert container["envFrom"] == [{"secretRef": {"name": "swerve-secrets"}}]
    assert container["env"] == [{"name": "JAX_PLATFORMS", "value": "tpu"}]
    assert container["resources"]["limits"] == {"cpu": "64", "memory": "262144Mi", "google.com/tpu": "4"}
    assert pod["nodeSelector"] == {
        "example.org/pool": "v7x",
        "cloud.google.com/gke-tpu-accelerator": "tpu7x",
        "cloud.google.com/gke-tpu-topology": "2x2x1",
    }
    claims = {one["persistentVolumeClaim"]["claimName"] for one in pod["volumes"] if "persistentVolumeClaim" in one}
    assert claims == {"swerve-work", "models"}
    assert inner["activeDeadlineSeconds"] == seconds_of("1-06:30") == 109800
    command = container["command"] if kind == "jobset" else spec["entrypoint"].split()
    assert command == ["bash", "/etc/swerve/job/job.sh"]


def test_gpus_are_asked_for_by_their_own_name(make: Make):
    changes = [('"tpu"\n', '"gpu"\n'), ('tpu_type = "tpu7x"\ntpu_topology = "2x2x1"\n', "")]
    pod = manifests(make(*changes))[1]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "4"
    assert pod["nodeSelector"] == {"example.org/pool": "v7x"}


def test_a_job_is_unpacked_once_and_run(make: Make, tmp_path: Path):
    work, carried = tmp_path / "work", tmp_path / "carried"
    launch = make(("/mnt/work", str(work)), ("ulimit -n 65536", "true"))
    config = manifests(launch)[0]["data"]
    carried.mkdir()
    work.mkdir()
    for name, text in config.items():
        (carried / name).write_text(text)
    programs = tmp_path / "bin"
    programs.mkdir()
    (programs / "python3").write_text('#!/bin/sh\necho "$PWD $@"\n')
    (programs / "python3").chmod(0o755)
    environment = {"PATH": f"{programs}:{os.environ['PATH']}"}
    run = ["bash", str(carried / "job.sh")]
    first = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    folder = work / "jobs" / "night_1" / "1"
    assert first == f"{work} -m swerve.cli launch run {folder}\n"
    assert read_job(folder).seed == 7 and read_job(folder).folder == folder
    (folder / "state.json").write_text("{}")
    assert subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout == first
    assert (folder / "state.json").exists()
    freeze(launch, {})
    here = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    assert here == f"{work} -m swerve.cli launch run {launch.jobs[0].folder}\n"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ((IMAGE, "registry.example.org/swerve"), "name it by digest"),
        (("[container]\n", '[container]\nruntime = "apptainer"\n'), "Kubernetes runs the image itself"),
        (("[environment]\n", '[environment]\ninherit = ["HF_TOKEN"]\n'), "put it into a Secret of the cluster"),
    ],
)
def test_what_no_manifest_can_say_is_refused(make: Make, change: tuple[str, str], told: str):
    with pytest.raises(SwerveError, match=told):
        KubernetesLauncher().files(make(change))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (("swerve-work:/mnt/work", "swerve-work:/mnt/other"), "would be lost with the pod"),
        (("swerve-work:/mnt/work", "swerve-work:/mnt/work:ro"), "would be lost with the pod"),
        (("cpus = 64", "hosts = 2"), "one process on one machine"),
    ],
)
def test_what_could_not_be_run_is_refused(make: Make, change: tuple[str, str], told: str):
    with pytest.raises(SwerveError, match=told):
        KubernetesLauncher().check(make(change))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (('"swerve-secrets"', '"TOKEN=abc"'), "write names of Secrets only"),
        (('"models:/models:ro"', '"models"'), "write CLAIM:/PATH"),
        (("accelerators = 4", "accelerators = 0"), "state both or neither"),
        (('accelerator = "tpu"', 'accelerator = "gpu"'), 'needs accelerator = "tpu"'),
        (('"1-06:30"', '"30 hours"'), r"\[D-\]HH:MM\[:SS\]"),
    ],
)
def test_a_site_that_contradicts_itself_is_refused(make: Make, change: tuple[str, str], told: str):
    with pytest.raises(SwerveError, match=told):
        make(change)


def test_names_become_names_of_the_cluster(make: Make):
    assert [resource_name(job) for job in make(name="Night_1.b").jobs] == ["night-1-b-1", "night-1-b-2"]
    for name in ("n" * 50, "1st"):
        with pytest.raises(SwerveError, match="must begin with a letter and have at most 47"):
            KubernetesLauncher().files(make(name=name))


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that stands in for a cluster: a file for each thing made, and the words of every call."""
    root, programs = tmp_path / "cluster", tmp_path / "programs"
    root.mkdir()
    programs.mkdir()
    (programs / "kubectl").write_text(KUBECTL.replace("ROOT", str(root)))
    (programs / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    return root


KUBECTL = """\
#!/bin/sh
echo "$@" >>ROOT/calls
[ "$1 $2" = "--namespace research" ] || exit 3
shift 2
case $1 in
  create)
    for one in $(sed -n 's/^kind: //p' "$3" | tr A-Z a-z); do
      name=$one/$(sed -n 's/^  name: //p' "$3" | head -1)
      file=ROOT/$(echo "$name" | tr / .)
      [ ! -e "$file" ] || { echo "Error from server (AlreadyExists): $name exists" >&2; exit 1; }
      touch "$file"
      echo "$name created"
    done ;;
  get) cat ROOT/answer ;;
  delete) for one; do rm -f "ROOT/$(echo "$one" | tr / .)" "ROOT/jobset.$one" "ROOT/configmap.$one"; done ;;
esac
"""


def made(cluster: Path) -> set[str]:
    return {path.name for path in cluster.iterdir()} - {"calls", "answer"}


def test_jobs_are_made_looked_after_and_deleted(make: Make, cluster: Path):
    launcher, launch = KubernetesLauncher(), make()
    launcher.check(launch)
    freeze(launch, launcher.files(launch))
    ids = dict(launcher.submit(launch))
    assert ids == {"night_1-1": "night-1-1", "night_1-2": "night-1-2"}
    assert made(cluster) == {f"{kind}.night-1-{number}" for kind in ("configmap", "jobset") for number in (1, 2)}
    items = [
        {"metadata": {"name": "night-1-1"}, "status": {"terminalState": "Completed"}},
        {"metadata": {"name": "night-1-2"}, "status": {"replicatedJobsStatus": [{"name": "run", "active": 1}]}},
    ]
    (cluster / "answer").write_text(json.dumps({"items": items}))
    assert launcher.states(launch, ids) == {"night_1-1": "SUCCEEDED", "night_1-2": "RUNNING"}
    launcher.cancel(launch, ids)
    assert made(cluster) == {"configmap.night-1-1", "jobset.night-1-1"}
    (cluster / "answer").write_text("")
    assert launcher.states(launch, ids) == {"night_1-1": "", "night_1-2": ""}


def test_of_jobs_that_are_not_seen_the_cluster_has_the_word(make: Make, cluster: Path):
    launcher, launch = KubernetesLauncher(), make()
    freeze(launch, launcher.files(launch))
    for name, identifier in launcher.submit(launch):
        record_id(launch, name, identifier)
    items = [
        {"metadata": {"name": f"night-1-{number}"}, "status": {"terminalState": state}}
        for number, state in ((1, "Completed"), (2, "Failed"))
    ]
    (cluster / "answer").write_text(json.dumps({"items": items}))
    assert [(row["phase"], row["launcher"], bool(row["cause"])) for row in statuses(launch)] == [
        ("finished", "SUCCEEDED", False),
        ("failed", "FAILED", True),
    ]


def test_options_stand_above_the_site(make: Make, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    make()
    words = ["--kind", "rayjob", "--time", "0:30", "--namespace", "other", "--seed-base", "7", "--name", "n"]
    site = ["--site", str(tmp_path / "site.toml")]
    assert main(["launch", "kubernetes", str(RECIPE), *site, *words, "--dry-run", "--json"]) == 0
    job = list(yaml.safe_load_all(json.loads(capsys.readouterr().out)["files"]["1/job.yaml"]))[1]
    assert (job["kind"], job["metadata"]["namespace"]) == ("RayJob", "other")
    assert job["spec"]["activeDeadlineSeconds"] == 1800
    assert not (tmp_path / "jobs").exists()


def test_what_was_there_before_is_left_as_it_was(make: Make, cluster: Path):
    launcher, launch = KubernetesLauncher(), make()
    freeze(launch, launcher.files(launch))
    (cluster / "jobset.night-1-1").touch()
    with pytest.raises(MachineError, match="AlreadyExists"):
        next(launcher.submit(launch))
    assert made(cluster) == {"jobset.night-1-1"}


def test_states_of_ray_jobs(make: Make, cluster: Path):
    launch = make(kind="rayjob")
    for deployment, word in (("Running", "RUNNING"), ("Initializing", "PENDING"), ("Failed", "FAILED")):
        item = {"metadata": {"name": "x"}, "status": {"jobDeploymentStatus": deployment}}
        (cluster / "answer").write_text(json.dumps(item))
        assert KubernetesLauncher().states(launch, {"night_1-1": "x"}) == {"night_1-1": word}


def test_without_kubectl_the_manifest_is_there_to_be_used_elsewhere(make: Make, monkeypatch: pytest.MonkeyPatch):
    launcher, launch = KubernetesLauncher(), make()
    freeze(launch, launcher.files(launch))
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(MachineError, match=r"kubectl create -f \S+/night_1/1/job.yaml"):
        next(launcher.submit(launch))
    assert len(list(yaml.safe_load_all((launch.folder / "1/job.yaml").read_text()))) == 2
