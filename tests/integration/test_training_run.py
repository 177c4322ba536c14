"""Whole runs of `swerve train`, each a process of its own, with the shipped policy on generated tasks."""

import contextlib
import dataclasses
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from slurm_cluster import cluster, wait_until
from swerve.cli.main import main
from swerve.config import TINY_POLICY, read_recipe
from swerve.config import digest as recipe_digest
from swerve.environments import load_tasks, save_tasks, shipped_file
from swerve.launch import read_state
from swerve.rendering import Template
from swerve.telemetry import file_digest, read_metrics, read_trajectories

RECIPE = Path(__file__).resolve().parents[2] / "recipes" / "mini.toml"
NUM_STEPS = 3
SETTINGS = {
    "tasks.num_train": 6,
    "rollout.prompts_per_step": 4,
    "rollout.generations_per_prompt": 4,
    "rollout.num_slots": 16,
    "evaluation.num_tasks": 2,
    "evaluation.attempts": 4,
    "packing.rows_per_micro_batch": 4,
    "training.num_steps": NUM_STEPS,
    "checkpoint.every": 1,
    "checkpoint.keep": 0,
    "telemetry.progress": "plain",
}


def command(*words: object, **settings: object) -> list[str]:
    chosen = SETTINGS | {name.replace("__", "."): value for name, value in settings.items()}
    options = [str(word) for name, value in chosen.items() for word in (f"--{name}", value)]
    return [sys.executable, "-m", "swerve.cli", "train", str(RECIPE), *options, *map(str, words)]


def finish(words: list[str], timeout: float = 800) -> subprocess.CompletedProcess[str]:
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout)


def digest(run: Path) -> dict[str, object]:
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert main(["checkpoint", "digest", str(run), "--json"]) == 0
    found = json.loads(told.getvalue())
    return {name: found[name] for name in ("step", "params", "optimizer")}


def leftovers(marker: str) -> list[str]:
    """Processes that carry a marker in their environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("SWERVE_TEST_MARKER") == marker:
                found.append(" ".join(process.cmdline()))
        except (psutil.Error, OSError):
            continue
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "undisturbed"
    done = finish(command(run__directory=run.parent, run__name=run.name))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 5, done.stdout
    return run


@pytest.mark.timeout(900)
class TestTrainingRun:
    def test_it_leaves_everything_a_reader_needs(self, undisturbed):
        summary = json.loads((undisturbed / "summary.json").read_text())
        wanted = {"seconds", "first_reward_s", "num_steps", "peak_rss_bytes"}
        wanted |= {f"pass_at_{k}_{when}" for k in (1, 4) for when in ("before", "after")}
        assert wanted <= summary.keys()
        assert summary["num_steps"] == NUM_STEPS
        assert 0 < summary["first_reward_s"] < summary["seconds"]
        assert summary["evaluations"]["0"]["complete"]
        assert {path.name for path in undisturbed.iterdir()} >= {"recipe.toml", "provenance.json", "tensorboard"}

    def test_it_says_by_digest_what_it_started_from(self, undisturbed):
        facts = json.loads((undisturbed / "provenance.json").read_text())
        recipe = read_recipe(undisturbed / "recipe.toml")
        assert facts["recipe_sha256"] == recipe_digest(recipe)
        inputs = facts["inputs"]
        for split, used in (("train", 6), ("validation", 2)):
            file = shipped_file("mini", split)
            wanted = {"file": str(file), "bytes": file.stat().st_size, "sha256": file_digest(file), "used": used}
            assert inputs["tasks"][split] == wanted
        weights = inputs["policy"]["files"]["model.safetensors"]
        assert weights["sha256"] == file_digest(TINY_POLICY / "model.safetensors")
        assert inputs["template"]["sha256"] == Template.load("tiny_repair").sha256
        assert len(inputs["tokenizer_sha256"]) == 64
        assert inputs["sandbox_images"] == {}

    def test_every_second_of_a_step_belongs_to_a_phase(self, undisturbed):
        steps = [line for line in read_metrics(undisturbed / "metrics.jsonl") if "loss" in line]
        assert [line["step"] for line in steps] == [1, 2, 3]
        for line in steps:
            phases = sum(value for name, value in line.items() if name.startswith("phase_s/"))
            assert phases == pytest.approx(line["step_s"], rel=0.01, abs=0.02)
            assert line["staleness_max"] == 0

    def test_every_episode_is_kept_with_the_version_that_sampled_it(self, undisturbed):
        kept = list(read_trajectories(undisturbed / "trajectories.jsonl", purposes=["train"]))
        assert len(kept) == NUM_STEPS * 16
        for step, trajectory in kept:
            assert set(trajectory.weights_versions[trajectory.sampled].tolist()) <= {step - 1}

    def test_training_changed_the_weights(self, undisturbed):
        first, last = (undisturbed / "checkpoints" / f"step_{step:08d}" for step in (1, NUM_STEPS))
        assert digest(first)["params"] != digest(last)["params"]

    def test_killed_and_stopped_and_resumed_it_ends_as_if_undisturbed(self, undisturbed, tmp_path):
        words = command(run__directory=tmp_path, run__name="killed")
        run = tmp_path / "killed"
        assert interrupt(words, run, 1, signal.SIGKILL, delay_s=0.3) == -signal.SIGKILL
        assert interrupt([*words, "--resume"], run, 2, signal.SIGTERM, delay_s=0.3) == 128 + signal.SIGTERM
        done = finish([*words, "--resume"])
        assert done.returncode == 0, done.stderr
        assert digest(run) == digest(undisturbed)
        steps = [line["step"] for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
        assert steps == [1, 2, 3]
        sampled = [one.tokens.tolist() for _, one in read_trajectories(run / "trajectories.jsonl", purposes=["train"])]
        wanted = read_trajectories(undisturbed / "trajectories.jsonl", purposes=["train"])
        assert sampled == [one.tokens.tolist() for _, one in wanted]

    def test_stopped_by_ctrl_c_it_leaves_no_process(self, undisturbed, tmp_path):
        words = command(run__directory=tmp_path, run__name="stopped", evaluation__before="false")
        assert interrupt(words, tmp_path / "stopped", 1, signal.SIGINT) == 128 + signal.SIGINT

    @pytest.mark.slow
    def test_queued_again_when_its_time_is_up_it_ends_as_if_undisturbed(self, undisturbed, tmp_path, monkeypatch):
        with cluster(tmp_path / "slurm") as slurm:
            monkeypatch.setenv("SLURM_CONF", slurm.environment["SLURM_CONF"])
            words = command("--site", slurm.site_file(tmp_path / "site.toml"), "--name", "again", "--seed-base", 0)
            train = words.index("train")
            done = finish([*words[:train], "launch", "slurm", *words[train + 1 :], "--json"])
            assert done.returncode == 0, done.stderr
            (job,) = json.loads(done.stdout)["jobs"]
            run, folder = tmp_path / "runs" / "again-1", tmp_path / "jobs" / "again" / "1"
            wait_until(lambda: (run / "checkpoints" / "step_00000001").exists(), timeout_s=600)
            slurm.client("scancel", "--signal=USR1", "--batch", job["id"])  # as Slurm does before its time is up
            slurm.start_soon(job["id"])
            assert slurm.end(job["id"], timeout_s=600) == "COMPLETED", (folder / "slurm.out").read_text()
        state = read_state(folder)
        assert (state.phase, state.attempt) == ("finished", 2), (folder / "slurm.out").read_text()
        assert "makes room, and goes on when it is started again" in (folder / "slurm.out").read_text()
        assert (run / "provenance.resume1.json").exists()
        assert digest(run) == digest(undisturbed)

    @pytest.mark.slow
    def test_played_ahead_and_staged_it_ends_the_same_killed_or_not(self, tmp_path):
        ahead = {"training__max_trajectory_age": 1, "training__num_steps": 4, "run__directory": tmp_path}
        staged = {"training__pipelined": "true", "training__staged": "true"}
        for name, ways in (("plain", {}), ("staged", staged)):
            done = finish(command(run__name=name, **ahead, **ways))
            assert done.returncode == 0, done.stderr
        words, run = command(run__name="killed", **ahead, **staged), tmp_path / "killed"
        assert interrupt(words, run, 1, signal.SIGKILL, delay_s=0.3) == -signal.SIGKILL
        assert interrupt([*words, "--resume"], run, 2, signal.SIGINT) == 128 + signal.SIGINT
        done = finish([*words, "--resume"])
        assert done.returncode == 0, done.stderr
        assert digest(tmp_path / "plain") == digest(tmp_path / "staged") == digest(run)
        kept = [line for line in read_metrics(run / "metrics.jsonl") if "loss" in line]
        assert [line["staleness_max"] for line in kept] == [0, 1, 1, 1]
        played = [
            list(read_trajectories(tmp_path / name / "trajectories.jsonl", ["train"])) for name in ("plain", "killed")
        ]
        assert [one.tokens.tolist() for _, one in played[0]] == [one.tokens.tolist() for _, one in played[1]]

    def test_a_corrupted_checkpoint_is_refused(self, undisturbed, tmp_path, capsys):
        run = tmp_path / "copy"
        subprocess.run(["cp", "-r", str(undisturbed), str(run)], check=True)
        weights = run / "checkpoints" / f"step_{NUM_STEPS:08d}" / "params.safetensors"
        content = bytearray(weights.read_bytes())
        content[len(content) // 2] ^= 1
        weights.write_bytes(content)
        words = command("--resume", "--run", run, run__directory=undisturbed.parent, run__name=undisturbed.name)
        assert main(words[3:]) == 2
        told = capsys.readouterr().err
        assert "params.safetensors" in told
        assert len(told.strip().splitlines()) == 1

    @pytest.mark.slow
    def test_a_full_disk_is_one_clear_line_and_the_run_goes_on_once_there_is_space(self, undisturbed, tmp_path):
        """In a user namespace of its own: one checkpoint fits on the disk, a second one does not."""
        size = sum(path.stat().st_size for path in (undisturbed / "checkpoints" / "step_00000001").iterdir())
        words = command(run__directory=tmp_path, run__name="full")
        run = tmp_path / "full"
        resume = shlex.join([sys.executable, "-m", "swerve.cli", "train", str(run / "recipe.toml"), "--resume"])
        script = (
            f"mount -t tmpfs -o size={size * 3 // 2} none {tmp_path}\n{shlex.join(words)}\necho rc=$?\n"
            f"find {run} -name '*tmp*'\nls {run}/checkpoints\n"
            f"mount -o remount,size={size * 8} {tmp_path}\n{resume} --run {run} >/dev/null\necho rc=$?\n"
            f"{sys.executable} -m swerve.cli checkpoint digest {run} --json\n"
        )
        done = finish(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", script], timeout=1800)
        *told, line = [line for line in done.stderr.splitlines() if line.startswith("swerve: ")]
        assert told == []
        assert f"{run}/checkpoints/step_00000002: cannot be written: No space left on device: free some space" in line
        assert line.endswith(f"then go on with swerve train {run}/recipe.toml --resume --run {run}")
        first, checkpoint, second, *found = done.stdout.splitlines()
        assert (first, checkpoint, second) == ("rc=1", "step_00000001", "rc=0")
        assert json.loads("\n".join(found))["params"] == digest(undisturbed)["params"]


def interrupt(words: list[str], run: Path, after_step: int, number: signal.Signals, *, delay_s: float = 0) -> int:
    """Send a signal to a run when it has written a step's checkpoint; its exit status, once nothing is left of it."""
    marker = f"{os.getpid()}-{after_step}-{number}"
    environment = {**os.environ, "SWERVE_TEST_MARKER": marker}
    with subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment) as process:
        wait_for(run / "checkpoints" / f"step_{after_step:08d}", process)
        time.sleep(delay_s)
        process.send_signal(number)
        process.wait(timeout=60)
    assert_nothing_left(marker)
    return process.returncode


def wait_for(path: Path, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 250
    while not path.exists():
        assert process.poll() is None, f"ended with {process.returncode} before {path.name}"
        assert time.monotonic() < deadline, f"no {path}"
        time.sleep(0.02)


def assert_nothing_left(marker: str) -> None:
    deadline = time.monotonic() + 10
    while left := leftovers(marker):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def test_tasks_that_never_start_end_the_run_with_their_cause(tmp_path):
    files = {}
    for split in ("train", "validation"):
        tasks = load_tasks(shipped_file("mini", split))[:3]
        files[split] = tmp_path / f"{split}.jsonl"
        save_tasks(files[split], [dataclasses.replace(task, image="nowhere") for task in tasks])
    chosen = {"tasks__family": "files", "tasks__num_train": 0, "rollout__prompts_per_step": 3}
    chosen |= {f"tasks__{split}_file": path for split, path in files.items()}
    words = command(
        run__directory=tmp_path, run__name="r", evaluation__num_tasks=0, evaluation__before="false", **chosen
    )
    done = finish(words)
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("swerve: ")]
    assert "step 1: each of the 4 episodes of task" in line
    assert "nowhere" in line
    assert not (tmp_path / "r" / "summary.json").exists()


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"rollout__temprature": 1.0}, "temprature"),
        ({"rollout__temperature": "warm"}, "--rollout.temperature"),
        ({"policy__checkpoint": "/nowhere"}, "/nowhere/tokenizer.json"),
        (
            {"tasks__family": "files", "tasks__train_file": "none.jsonl", "tasks__validation_file": "x.jsonl"},
            "none.jsonl",
        ),
        ({"training__max_trajectory_age": 2}, "max_trajectory_age"),
        ({"training__staged": "true"}, "training.staged"),
        ({"tasks__num_train": 100_000}, "tasks.num_train"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, capsys, settings, complaint):
    assert main(command(run__directory=tmp_path, run__name="bad", **settings)[3:]) == 2
    told = capsys.readouterr().err
    assert complaint in told
    assert len(told.strip().splitlines()) == 1
    assert list(tmp_path.iterdir()) == []
