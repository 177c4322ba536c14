"""What a launch comes to before anything is written: precedence, seeds, names, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from swerve.cli.main import main
from swerve.config import TrainRecipe, laws, read_recipe_as
from swerve.launch import Request, freeze, plan, read_job, read_launch, read_site, read_state
from swerve.launch.run_and_time import run_job
from swerve.launch.slurm import SlurmLauncher
from swerve.types import SwerveError

RECIPES = Path(__file__).resolve().parents[3] / "recipes"
LAPTOP, MINI = RECIPES / "mlperf" / "laptop_open.toml", RECIPES / "mini.toml"
DIGEST = "0123456789abcdef" * 4


def launch(tmp_path, recipe: Path | None = MINI, text: str = "", **request):
    path = tmp_path / "site.toml"
    path.write_text(text or f'[paths]\nwork = "{tmp_path}"\n')
    site = read_site(path)
    return plan(Request(launcher="slurm", site=site, site_file=path, recipe=recipe, **request))


def settled(tmp_path, **request):
    return launch(tmp_path, **request).jobs[0].recipe


@pytest.mark.parametrize("gbs", laws.BATCH_SIZES)
def test_the_benchmark_is_launched_by_its_batch_size_alone(tmp_path, gbs):
    recipe = settled(tmp_path, recipe=None, gbs=gbs)
    assert recipe.policy.model == "qwen35_397b_a17b"
    assert recipe.rollout.global_batch_size == gbs
    assert recipe.rollout.generations_per_prompt == 16
    assert recipe.optimizer.learning_rate == laws.learning_rate(gbs)
    assert recipe.optimizer.max_grad_norm == laws.max_grad_norm(gbs)
    assert recipe.training.num_steps == laws.MAX_STEPS[gbs]


def test_options_stand_above_what_follows_from_the_batch_size_and_that_above_the_recipe(tmp_path):
    named = {"--lr": "3e-6", "--max-steps": "5"}
    recipe = settled(tmp_path, gbs=256, named=named, overrides={"training.time_limit_s": "60"})
    assert (recipe.optimizer.learning_rate, recipe.training.num_steps) == (3e-6, 5)
    base = read_recipe_as(TrainRecipe, MINI)
    assert recipe.optimizer.max_grad_norm == laws.max_grad_norm(256) != base.optimizer.max_grad_norm
    assert recipe.training.time_limit_s == 60
    assert recipe.agent == base.agent


def test_what_the_site_asks_for_and_no_job_would_do_is_refused(tmp_path):
    work = f'[paths]\nwork = "{tmp_path}"\n'
    with pytest.raises(SwerveError, match=r"site\.toml: container\.image has no effect"):
        launch(tmp_path, text=f'{work}[container]\nimage = "a@sha256:{DIGEST}"\n')
    gpus = RECIPES / "mlperf" / "qwen35_397b_gpu64x4.toml"
    with pytest.raises(SwerveError, match=r"site\.toml: evaluation_workers = 4: the servers"):
        launch(tmp_path, recipe=gpus, text=f"evaluation_workers = 4\n{work}")
    assert launch(tmp_path, recipe=gpus, text=work).jobs[0].evaluation_workers == 1


def test_options_of_a_scored_run_reach_their_settings(tmp_path):
    named = {"--val-start": "4", "--target": "0.5", "--clip": "0.25", "--max-steps": "9"}
    recipe = settled(tmp_path, recipe=LAPTOP, named=named)
    assert (recipe.first_evaluation_step, recipe.mlperf.target_accuracy) == (4, 0.5)
    assert (recipe.optimizer.max_grad_norm, recipe.training.num_steps) == (0.25, 9)


def test_a_site_says_where_things_are_that_a_recipe_needs_and_who_submits(tmp_path):
    site = (
        '[submission]\norg = "We"\nplatform = "pod"\n[paths]\nruns = "/r"\ncheckpoint = "/c"\ntrain_file = "/t"\n'
        'validation_file = "/v"\nimages = "/i"\njobs = "/j"\n'
    )
    laptop = settled(tmp_path, recipe=LAPTOP, text=site)
    assert (laptop.mlperf.org, laptop.mlperf.platform, laptop.run.directory) == ("We", "pod", "/r")
    assert (laptop.policy, laptop.tasks) == (
        read_recipe_as(TrainRecipe, LAPTOP).policy,
        read_recipe_as(TrainRecipe, LAPTOP).tasks,
    )
    pod = settled(tmp_path, recipe=None, text=site)
    assert (pod.policy.checkpoint, pod.tasks.train_file, pod.tasks.validation_file) == ("/c", "/t", "/v")
    assert pod.sandbox.images == "/i"
    assert (
        settled(tmp_path, recipe=None, text=site, overrides={"policy.checkpoint": "/own"}).policy.checkpoint == "/own"
    )


def test_seeds_count_up_from_a_base_that_is_by_chance_where_none_is_given(tmp_path):
    given = launch(tmp_path, replicas=3, seed_base=2**31 - 3, name="x")
    assert [job.seed for job in given.jobs] == [2**31 - 3, 2**31 - 2, 2**31 - 1]
    assert [job.recipe.run.name for job in given.jobs] == ["x-1", "x-2", "x-3"]
    assert len({job.run for job in given.jobs}) == len({job.folder for job in given.jobs}) == 3
    bases = [launch(tmp_path, replicas=2) for _ in range(4)]
    assert all(one.jobs[1].seed == one.jobs[0].seed + 1 for one in bases)
    assert len({one.jobs[0].seed for one in bases}) > 1


@pytest.mark.parametrize(
    ("request_", "complaint"),
    [
        ({"named": {"--lr": "-1"}}, "--lr -1: optimizer.learning_rate = -1 must be a number above 0"),
        ({"named": {"--lr": "1"}, "overrides": {"optimizer.learning_rate": "1"}}, "--lr and --optimizer.learning_rate"),
        ({"gbs": 256, "overrides": {"rollout.prompts_per_step": "4"}}, "--gbs and --rollout.prompts_per_step"),
        ({"gbs": 100}, "--gbs 100"),
        ({"named": {"--target": "0.5"}}, "--target 0.5: mlperf.target_accuracy = 0.5 has no effect"),
        ({"overrides": {"run.seed": "3"}}, "--run.seed: the seeds of replicas count up from --seed-base"),
        ({"overrides": {"run.name": "n"}}, "--run.name"),
        ({"overrides": {"mlperf.log": "l"}}, "--mlperf.log"),
        ({"overrides": {"rollout.temprature": "1"}}, "command line: --rollout.temprature is unknown"),
        ({"replicas": 0}, "--replicas 0"),
        ({"seed_base": -1}, "--seed-base -1"),
        ({"seed_base": 2**31 - 1, "replicas": 2}, "--seed-base"),
        ({"name": "a/b"}, "--name a/b"),
        ({"recipe": RECIPES / "tiny_pretrain.toml"}, 'this command needs kind = "train"'),
        ({"recipe": LAPTOP, "overrides": {"checkpoint.full": "true"}}, "checkpoint.full = true must be false"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_by_option_or_key(tmp_path, request_, complaint):
    with pytest.raises(SwerveError) as caught:
        launch(tmp_path, **request_)
    assert complaint in str(caught.value)


def test_a_run_or_launch_that_is_there_is_not_overwritten(tmp_path):
    first = launch(tmp_path, name="a")
    freeze(first, {})
    with pytest.raises(SwerveError, match=r"jobs/a: exists already: choose another --name"):
        freeze(first, {})
    (tmp_path / "runs" / "b-1").mkdir(parents=True)
    with pytest.raises(SwerveError, match=r"runs/b-1: exists already"):
        launch(tmp_path, name="b")


def test_a_scored_run_names_its_image_by_digest(tmp_path):
    site = f'[paths]\nwork = "{tmp_path}"\n[container]\nruntime = "apptainer"\nimage = "docker://a/b:1'
    with pytest.raises(SwerveError, match="names it by digest"):
        launch(tmp_path, recipe=LAPTOP, text=f'{site}"')
    assert launch(tmp_path, text=f'{site}"').jobs[0].python == "python3"
    assert launch(tmp_path, recipe=LAPTOP, text=f'{site}@sha256:{DIGEST}"')


def test_a_frozen_launch_reads_back_and_a_changed_recipe_is_refused(tmp_path):
    made = launch(tmp_path, replicas=2, name="kept")
    freeze(made, {"1/job.sh": "x"})
    (tmp_path / "site.toml").write_text('[paths]\nwork = "/elsewhere"')
    assert read_launch(made.folder) == made
    assert json.loads((made.folder / "provenance.json").read_text())["source"]
    changed = made.jobs[0].recipe_file
    changed.write_text(changed.read_text().replace("prompts_per_step = 16", "prompts_per_step = 8"))
    with pytest.raises(SwerveError, match=r"mini.toml: was changed after it was launched"):
        read_job(made.jobs[0].folder)


def test_a_script_quotes_what_it_holds_and_asks_slurm_for_what_the_site_says(tmp_path):
    value = "a 'b' $(touch x)"
    site = (
        f'[paths]\nwork = "{tmp_path}"\n[environment]\nvalues = ["ODD={value}"]\nprologue = ["cd /"]\n'
        'inherit = ["HF_TOKEN"]\n[slurm]\npartition = "p"\nnodes = 2\ngres = "tpu:4"\nexclusive = true\n'
        f'[container]\nruntime = "apptainer"\nimage = "/i.sif@sha256:{DIGEST}"\n'
    )
    made = launch(tmp_path, text=site)
    (script,) = SlurmLauncher().files(made).values()
    for line in ("--partition=p", "--nodes=2", "--gres=tpu:4", "--exclusive", "--requeue", "--signal=B:USR1@120"):
        assert f"#SBATCH {line}\n" in script
    assert "srun --ntasks-per-node=1 --kill-on-bad-exit=1 apptainer exec" in script
    assert f"{DIGEST}  /i.sif" in script
    assert "HF_TOKEN" in script
    head = script[: script.index("sha256sum")] + '\nprintf %s "$ODD"'
    assert subprocess.run(["bash", "-c", head], capture_output=True, text=True, check=True).stdout == value
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0
    with pytest.raises(SwerveError, match=r"slurm.nodes = 2"):
        SlurmLauncher().check(made)


def test_an_option_of_another_launcher_is_refused(tmp_path, capsys):
    assert main(["launch", "local", str(MINI), "--partition", "p"]) == 2
    assert "unknown argument --partition; another action takes it" in capsys.readouterr().err


def test_a_variable_that_is_not_set_is_named_before_anything_is_submitted(tmp_path):
    site = f'[paths]\nwork = "{tmp_path}"\n[environment]\ninherit = ["SWERVE_NOT_SET"]\n'
    with pytest.raises(SwerveError, match=r"environment.inherit: SWERVE_NOT_SET is not set here"):
        SlurmLauncher().check(launch(tmp_path, text=site))


def test_a_scored_run_is_handed_over_only_once_it_is_known_whose_it_is(tmp_path, capfd):
    """A launch can be looked at without it."""
    words = ["launch", "local", "--gbs", "256", "--run.directory", str(tmp_path), "--name", "x"]
    assert main([*words, "--dry-run"]) == 0
    capfd.readouterr()
    assert main(words) == 2
    assert "qwen35_397b_gbs256_v7x128.toml: mlperf.org is missing: a scored run names it" in capfd.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # JAX is here only where other tests brought it
def test_an_interrupted_scored_run_starts_anew_beside_what_there_is(tmp_path, capfd):
    overrides = {"policy.checkpoint": "/nowhere", "mlperf.clear_cache": "false"}
    made = launch(tmp_path, recipe=LAPTOP, name="s", overrides=overrides)
    freeze(made, {})
    (job,) = made.jobs
    (job.run / "checkpoints").mkdir(parents=True)
    assert run_job(job.folder) == 1
    state = read_state(job.folder)
    assert (state.phase, state.run) == ("failed", f"{job.run}.2")
    assert "/nowhere" in state.cause
    assert "starts anew" in capfd.readouterr().out


def test_a_job_runs_once_at_a_time(tmp_path):
    made = launch(tmp_path, name="once")
    freeze(made, {})
    folder = made.jobs[0].folder
    hold = f"import fcntl, os; fcntl.flock(os.open({str(folder)!r}, 0), fcntl.LOCK_EX); print(1, flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout.readline() == "1\n"
        with pytest.raises(SwerveError, match="another process runs in it"):
            run_job(folder)
        other.communicate("\n")
