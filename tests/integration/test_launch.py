"""Jobs on a real Slurm of one node: what is submitted, what becomes of it, and that nothing is left."""

import json
import os
from pathlib import Path

import psutil
import pytest

from slurm_cluster import SlurmCluster, cluster, wait_until
from swerve.cli.main import main
from swerve.config import parse_recipe
from swerve.launch import read_ids, read_launch, read_state

RECIPES = Path(__file__).resolve().parents[2] / "recipes"


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    with cluster(tmp_path_factory.mktemp("slurm")) as made:
        yield made


@pytest.fixture
def site(slurm: SlurmCluster, tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
    monkeypatch.setenv("SWERVE_TEST_MARKER", str(tmp_path))
    return slurm.site_file(tmp_path / "site.toml")


def swerve(capsys, *words: object) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def marked(marker: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get("SWERVE_TEST_MARKER") == str(marker):
                found.append(" ".join(process.cmdline()))
        except (psutil.Error, OSError):
            continue
    return found


def test_slurm_holds_what_a_dry_run_showed_and_seeds_count_up(slurm, site, tmp_path, capsys):
    words = ["launch", "slurm", RECIPES / "mini.toml", "--site", site, "--name", "pair", "--replicas", 2]
    words += ["--seed-base", 41, "--gbs", 64, "--clip", 0.5, "--time", "1:00", "--partition", "all", "--json"]
    code, out, _ = swerve(capsys, *words, "--dry-run")
    shown = json.loads(out)
    assert code == 0
    assert not (tmp_path / "jobs").exists()
    slurm.client("scontrol", "update", "PartitionName=all", "State=DOWN")
    try:
        code, out, err = swerve(capsys, *words)
        assert code == 0
        launch = read_launch(tmp_path / "jobs" / "pair")
        ids = read_ids(launch)
        assert list(ids) == ["pair-1", "pair-2"] == [job["name"] for job in json.loads(out)["jobs"]]
        assert all(f"job {ids[name]}, seed {seed}" in err for name, seed in zip(ids, (41, 42), strict=True))
        for job, planned in zip(launch.jobs, shown["jobs"], strict=True):
            assert slurm.client("scontrol", "write", "batch_script", ids[job.name], "-") == (
                shown["files"][f"{job.number}/job.sh"].strip()
            )
            assert job.seed == planned["seed"] == 40 + job.number
            assert job.recipe.optimizer.max_grad_norm == 0.5
            assert job.recipe.rollout.global_batch_size == 64
            assert list(job.command) == planned["command"]
        assert launch.jobs[0].recipe == parse_recipe(shown["recipe"])
        rows = json.loads(swerve(capsys, "launch", "status", "pair", "--site", site, "--json")[1])
        assert [(row["phase"], row["launcher"].split()[0], row["cause"]) for row in rows] == [
            ("waiting", "PENDING", "")
        ] * 2
        code, out, _ = swerve(capsys, "launch", "cancel", launch.folder)
        assert code == 0
        assert out.count("CANCELLED") >= 2
    finally:
        slurm.client("scontrol", "update", "PartitionName=all", "State=UP")
    assert [slurm.state(identifier) for identifier in ids.values()] == ["CANCELLED"] * 2


def test_a_training_that_dies_ends_its_job_with_the_cause(slurm, site, tmp_path, capsys):
    words = [RECIPES / "mini.toml", "--site", site, "--name", "dead", "--policy.checkpoint", "/nowhere"]
    assert swerve(capsys, "launch", "slurm", *words)[0] == 0
    launch = read_launch(tmp_path / "jobs" / "dead")
    assert slurm.end(read_ids(launch)["dead-1"], timeout_s=120) == "FAILED"
    code, out, _ = swerve(capsys, "launch", "status", "dead", "--site", site)
    assert code == 1
    assert "swerve train: exit code 2: /nowhere/tokenizer.json" in out.splitlines()[-1]


def test_a_job_that_slurm_requeues_starts_again_and_once_cancelled_nothing_is_left(slurm, site, tmp_path, capsys):
    words = [RECIPES / "mini.toml", "--site", site, "--name", "long", "--evaluation.before", "false"]
    assert swerve(capsys, "launch", "slurm", *words)[0] == 0
    launch = read_launch(tmp_path / "jobs" / "long")
    (job,) = launch.jobs
    identifier = read_ids(launch)[job.name]
    wait_until(lambda: (job.run / "recipe.toml").exists())
    slurm.client("scontrol", "requeue", identifier)
    slurm.start_soon(identifier)
    wait_until(lambda: read_state(job.folder).attempt == 2 and read_state(job.folder).phase == "training")
    assert swerve(capsys, "launch", "cancel", "long", "--site", site)[0] == 0
    wait_until(lambda: not slurm.client("squeue", "--noheader"))
    wait_until(lambda: not marked(tmp_path))
    (row,) = json.loads(swerve(capsys, "launch", "status", "long", "--site", site, "--json")[1])
    assert (row["phase"], row["launcher"]) == ("interrupted", "CANCELLED")
    assert row["cause"] == "stopped by a signal"
    assert len((job.folder / "attempts.jsonl").read_text().splitlines()) == 2


def test_here_a_job_that_fails_keeps_none_of_the_others_from_running(tmp_path, capfd):
    (tmp_path / "site.toml").write_text(f'[paths]\nwork = "{tmp_path}"\n')
    words = [
        "launch",
        "local",
        RECIPES / "mini.toml",
        "--site",
        tmp_path / "site.toml",
        "--policy.checkpoint",
        "/nowhere",
    ]
    assert main([str(word) for word in [*words, "--replicas", 2, "--seed-base", 5, "--json"]]) == 1
    jobs = json.loads(capfd.readouterr().out)["jobs"]
    assert [(job["seed"], job["phase"]) for job in jobs] == [(5, "failed"), (6, "failed")]
    assert all("/nowhere/tokenizer.json" in job["cause"] for job in jobs)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("optimised_commands")
def test_a_scored_run_is_trained_evaluated_and_checked_here(tmp_path, capfd):
    site = tmp_path / "site.toml"
    site.write_text(f'[paths]\nwork = "{tmp_path}"\n[submission]\norg = "Us"\nplatform = "a laptop"\n')
    words = [RECIPES / "mlperf" / "laptop_open.toml", "--site", site, "--name", "scored", "--seed-base", 7]
    words += ["--rollout.prompts_per_step", 2, "--rollout.generations_per_prompt", 4, "--val-start", 1]
    words += ["--max-steps", 2, "--target", 0.01]
    words += ["--mlperf.clear_cache", "false", "--evaluation.attempts", 1, "--json"]
    code = main([str(word) for word in ["launch", "local", *words]])
    out = capfd.readouterr().out
    assert code == 0, out
    launch = read_launch(tmp_path / "jobs" / "scored")
    state = read_state(launch.jobs[0].folder)
    assert (state.phase, state.outcome, state.attempt) == ("finished", "success", 1)
    log = (launch.jobs[0].run / "mlperf.log").read_text()
    assert '"config_filename", "value": "laptop_open.toml"' in log
    assert '"submission_org", "value": "Us"' in log
    assert state.findings == 0
    assert json.loads((launch.jobs[0].folder / "check.json").read_text())["findings"] == []
    assert main(["launch", "run", str(launch.jobs[0].folder)]) == 0
    assert "finished already" in capfd.readouterr().out
