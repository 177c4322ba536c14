"""A Ray cluster of one node, started here, that is given jobs by `swerve launch ray`, runs them and stops them.

Needs an interpreter with Ray beside what Swerve needs: .venv-ray, which `make ray` fills, or that which
SWERVE_RAY_PYTHON names.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "demo.toml"
PYTHON = Path(os.environ.get("SWERVE_RAY_PYTHON", ROOT / ".venv-ray" / "bin" / "python"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a cluster of one node."""
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is missing: run make ray")
    directory = tmp_path_factory.mktemp("ray")
    ports = []
    for _ in range(3):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            ports.append(free.getsockname()[1])
    # Short, for the paths of its sockets.
    temporary = Path("/tmp") / f"swerve-ray-{os.getpid()}"
    words = [
        *(PYTHON, "-c", "from ray.scripts.scripts import main; main()", "start", "--head", "--block"),
        *("--node-ip-address=127.0.0.1", f"--port={ports[0]}", f"--dashboard-port={ports[1]}"),
        *(f"--dashboard-agent-listen-port={ports[2]}", "--num-cpus=2", "--object-store-memory=100000000"),
        *("--disable-usage-stats", f"--temp-dir={temporary}"),
    ]
    with (directory / "ray.log").open("wb") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{ports[1]}"
        ask = [PYTHON, "-c", f"from ray.job_submission import *; JobSubmissionClient({address!r}).list_jobs()"]
        deadline = time.monotonic() + 120
        while subprocess.run(ask, capture_output=True).returncode:
            assert process.poll() is None and time.monotonic() < deadline, (directory / "ray.log").read_text()
            time.sleep(1)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(60)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def swerve(*words: str, codes: tuple[int, ...] = (0,)) -> str:
    """What a command prints."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [PYTHON, "-m", "swerve.cli", *words], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode in codes, done.stderr
    return done.stdout


def wait_for(folder: Path, wanted: Callable[[list[dict[str, Any]]], bool]) -> list[dict[str, Any]]:
    """The status of a launch, once it is as wanted."""
    deadline = time.monotonic() + 600
    while True:
        rows = json.loads(swerve("launch", "status", str(folder), "--json", codes=(0, 1)))
        if wanted(rows):
            return rows
        assert time.monotonic() < deadline, rows
        time.sleep(2)


def test_a_cluster_runs_jobs_and_stops_them(cluster: str, tmp_path: Path):
    site = tmp_path / "site.toml"
    site.write_text(
        f'paths = {{work = "{tmp_path}/work", jobs = "{tmp_path}/jobs", python = "{sys.executable}"}}\n'
        f'environment.values = ["PYTHONPATH={ROOT}/src", "JAX_PLATFORMS=cpu"]\n'
        "ray.cpus = 1\n"
    )
    (tmp_path / "work").mkdir()
    short = [
        *("--training.num_steps", "1", "--rollout.prompts_per_step", "2", "--rollout.generations_per_prompt", "4"),
        *("--rollout.num_slots", "8", "--evaluation.before", "false", "--evaluation.after", "false"),
    ]
    launch = ["launch", "ray", str(RECIPE), "--site", str(site), "--address", cluster]
    swerve(*launch, "--name", "short", "--replicas", "2", "--seed-base", "7", *short)
    rows = wait_for(tmp_path / "jobs/short", lambda rows: all(row["phase"] == "finished" for row in rows))
    assert [(row["id"], row["launcher"], row["seed"]) for row in rows] == [
        ("short-1", "SUCCEEDED", 7),
        ("short-2", "SUCCEEDED", 8),
    ]
    assert json.loads((tmp_path / "work/runs/short-2/summary.json").read_text())

    swerve(*launch, "--name", "long")
    wait_for(tmp_path / "jobs/long", lambda rows: rows[0]["phase"] == "training")
    swerve("launch", "cancel", str(tmp_path / "jobs/long"), codes=(0, 1))
    (row,) = wait_for(tmp_path / "jobs/long", lambda rows: rows[0]["launcher"] == "STOPPED")
    assert row["phase"] == "interrupted" and not (tmp_path / "work/runs/long-1/summary.json").exists()
