"""`swerve bench`: every bench is found, measures, and says under what load."""

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path

import jax
import numpy as np
import pytest

import swerve.cli.benches
from swerve import models
from swerve.cli.benches import _peer_trl, head, model, step
from swerve.cli.benches._sides import TRL_PACKAGES, Side, peer_python, start_side
from swerve.cli.main import main
from swerve.telemetry import TrajectoryLog
from swerve.trainer import SyntheticShape, synthetic_groups
from swerve.types import MachineError, SwerveError
from tiny import CONFIG


def test_the_sandbox_bench_measures_all_it_promises(capsys):
    sizes = {"starts": 4, "operations": 2, "gradings": 2, "concurrency": 2, "held": 3, "hold-s": 0}
    assert main(["bench", "sandbox", "--json", *(w for k, v in sizes.items() for w in (f"--{k}", str(v)))]) == 0
    told = json.loads(capsys.readouterr().out)
    figures = {figure["name"]: figure for figure in told["figures"]}
    assert {"grading, pytest", "grading, direct calls", "create, overlay, write, destroy"} <= set(figures)
    assert {"command", "command of the persistent shell", "./run_tests", "harness call"} <= set(figures)
    assert {"file written", "file read"} <= set(figures) and figures["command"]["count"] == 2
    assert figures["alive of 3 held for 0 s"]["value"] == 3
    assert 0 < figures["memory per live sandbox, a shell in it"]["value"] < 64
    assert all(figure["load"] >= 0 and figure["seconds"] > 0 for figure in told["figures"])


def test_every_bench_has_a_summary_and_help(capsys):
    names = [path.stem for path in Path(swerve.cli.benches.__file__).parent.glob("[!_]*.py")]
    assert "sandbox" in names
    assert main(["bench", "nothing"]) == 2


def test_the_kernel_bench_measures_each_part_against_a_product(capsys):
    assert main(["bench", "kernels", "--json", "--row-length", "64", "--repetitions", "1", "--kernels", "head"]) == 0
    figures = {figure["name"]: figure for figure in json.loads(capsys.readouterr().out)["figures"]}
    assert next(iter(figures)).startswith("product 1024^3, float32")
    for name in ("head, forward", "head, forward+backward"):
        assert 0 < figures[name]["value"] < 1.5
        assert figures[f"{name}: time"]["value"] > 0


_SMALL = ["--devices", "16", "--row-length", "64", "--width", "32", "--vocabulary", "256", "--chunk", "4"]


def _head(capsys, *words: str) -> dict[str, dict]:
    assert main(["bench", "head", "--json", *_SMALL, *words]) == 0
    return {figure["name"]: figure for figure in json.loads(capsys.readouterr().out)["figures"]}


@pytest.mark.usefixtures("as_users_run")
def test_the_head_bench_counts_what_both_heads_were_compiled_to(capsys):
    figures = _head(capsys, "--repetitions", "0")

    def value(head: str, what: str) -> float:
        return figures[f"{head} head, cpu:16, per device: {what}"]["value"]

    needed = 8 * 4 * 64 * 32 * 256 / 16 / 1e12  # four products of 4 rows
    assert value("sharded", "products") == pytest.approx(needed)
    assert value("plain", "products") == pytest.approx(4 * needed)
    for what in ("table gathers", "table reductions"):
        assert 1 <= value("sharded", what) <= 2 == figures[f"sharded head, cpu:16, per device: {what}"]["target"]
        assert value("sharded", f"{what}, those of parts too") <= 4
        assert value("plain", what) >= 16  # one for each chunk
        assert value("plain", f"{what}: size") > 10 * value("sharded", f"{what}: size")


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run")
def test_the_head_bench_runs_three_heads_that_find_the_same(capsys):
    sizes = {"timed-row-length": 32, "timed-width": 8, "timed-vocabulary": 64, "repetitions": 1}
    figures = _head(capsys, *(w for k, v in sizes.items() for w in (f"--{k}", str(v))))
    for axis in ("fsdp 2", "context 2"):
        for arm in ("sharded head", "plain head", "full logits, optax"):
            assert figures[f"{arm}, {axis}: forward+backward"]["value"] > 0
            assert figures[f"{arm}, {axis}: temporaries of a device"]["value"] > 0
        assert figures[f"plain head / sharded head, {axis}: temporaries of a device"]["value"] > 0


def test_heads_that_differ_are_not_compared(tmp_path):
    for name, loss in (("a", 1.0), ("b", 1.001)):
        np.savez(tmp_path / f"{name}.npz", loss=np.float32(loss))
    with pytest.raises(MachineError, match=r"loss of b differs from that of a by 1.0e-03 of its size"):
        head._require_equal(tmp_path, ["a", "b"])


def test_the_packing_bench_holds_rows_and_times_against_what_they_must_reach(capsys):
    words = ["bench", "packing", "--json", "--seeds", "2", "--sequences", "256", "1152"]
    assert main([*words, "--lengths", "gamma", "bimodal"]) == 0
    figures = {figure["name"]: figure for figure in json.loads(capsys.readouterr().out)["figures"]}
    for shape in ("gamma", "bimodal"):
        for count in (256, 1152):
            title = f"{count} sequences, {shape}"
            worst = figures[f"{title}: rows / bound, worst"]
            assert 1 <= worst["value"] <= worst["target"] == 1.03
            assert 0 <= figures[f"{title}: padding, bound"]["value"] <= figures[f"{title}: padding"]["value"] < 4
        slowest = figures[f"1152 sequences, {shape}: time, slowest"]
        assert 0 < slowest["value"] < slowest["target"] == 100
    assert main(["bench", "packing", "--seeds", "0"]) == 2


_SIDE = """
import json, sys
seconds, loss, narrow = map(float, [*sys.argv[1:], "0"][:3])
for line in sys.stdin:
    asked = json.loads(line)
    took = narrow if asked.get("precision") == "bfloat16" else seconds
    if asked["call"] == "run":
        answer = {"seconds": took, "core_seconds": 2 * took, "peak_bytes": 1 << 20}
    elif not took:
        answer = {"error": "no such precision"}
    elif asked["limit_s"] is not None and took > asked["limit_s"]:
        answer = {"given_up": took}
    else:
        check = {"loss": loss} if asked["measurement"] == "forward_backward" else {"logits": [1.0, -loss]}
        answer = {"preparation": "start", "seconds": 1.0, "settings": "none", "check": check}
    print(json.dumps(answer), flush=True)
"""


def _sides(stack: ExitStack, *arguments: tuple[float, ...]) -> list[Side]:
    """Processes that keep to the protocol and always take as long and find as much as they are told."""
    commands = [[sys.executable, "-c", _SIDE, *map(str, words)] for words in arguments]
    return [stack.enter_context(start_side(f"side {i}", command, 1)) for i, command in enumerate(commands)]


def _compared(*arguments: tuple[float, ...], precision: str = "float32") -> dict[str, float]:
    options = argparse.Namespace(peer="transformers", rows=2, row_length=50, repetitions=3, precision=precision)
    with ExitStack() as stack:
        return {figure.name: figure.value for figure in model._compare(_sides(stack, *arguments), options)}


def test_two_sides_are_compared_when_they_find_the_same():
    figures = _compared((0.5, 7.0), (1.0, 7.0002))
    assert figures["forward+backward, float32: swerve / transformers"] == pytest.approx(2)
    assert figures["prefill, float32, side 0 (none)"] == pytest.approx(200)
    assert figures["prefill, float32, side 1: time of all cores"] == pytest.approx(2)


def test_no_ratio_is_given_where_the_sides_differ():
    with pytest.raises(MachineError, match=r"forward\+backward, float32: loss differs .* by 1.4e-03"):
        _compared((0.5, 7.0), (1.0, 7.01))


def test_a_precision_that_a_side_lacks_is_left_out_of_the_fastest(capsys):
    figures = _compared((0.5, 7.0), (1.0, 7.0), precision="all")
    assert figures["prefill, fastest of each (float32 / float32)"] == pytest.approx(2)
    assert not any("bfloat16" in name for name in figures)
    assert "side 1 cannot prepare: no such precision" in capsys.readouterr().err


def test_a_precision_that_is_far_slower_is_given_up_after_one_row():
    figures = _compared((0.5, 7.0, 2.0), (1.0, 7.0, 0.5), precision="all")
    assert figures["prefill, bfloat16, side 0: by one row, then given up"] == pytest.approx(50)
    assert figures["prefill, bfloat16, side 1 (none)"] == pytest.approx(200)
    assert "prefill, bfloat16: swerve / transformers" not in figures
    assert figures["prefill, fastest of each (float32 / bfloat16)"] == pytest.approx(1)


def test_a_side_that_dies_is_named_with_its_last_words():
    with ExitStack() as stack:
        command = [sys.executable, "-c", "raise RuntimeError('no room')"]
        side = stack.enter_context(start_side("the peer", command, 1))
        with pytest.raises(MachineError, match="the peer died during run: RuntimeError: no room"):
            side.ask("run")


def test_a_peer_without_its_packages_is_refused():
    with pytest.raises(SwerveError, match="cannot import numpy, torch and transformers"):
        peer_python(sys.executable)
    with pytest.raises(SwerveError, match="/nowhere/python: cannot be run: No such file"):
        peer_python("/nowhere/python")
    with pytest.raises(SwerveError, match="cannot import numpy, torch, transformers, trl, accelerate and datasets"):
        peer_python(sys.executable, TRL_PACKAGES)


@pytest.mark.slow
def test_our_side_measures_both_parts(capsys):
    words = ["bench", "model", "--json", "--rows", "2", "--row-length", "64", "--repetitions", "1"]
    assert main([*words, "--precision", "float32"]) == 0
    figures = {figure["name"]: figure["value"] for figure in json.loads(capsys.readouterr().out)["figures"]}
    assert figures["forward+backward, float32, swerve: loss"] == pytest.approx(7.6, abs=0.3)
    assert figures["forward+backward, float32, swerve: compilation"] > 0
    assert any(name.startswith("prefill, float32, swerve") for name in figures)


# ------------------------------------------------------------------------------------------------------ the trainer

TINY_STEPS = {
    "rollout.context_length": 64,
    "rollout.max_new_tokens": 8,
    "rollout.prompts_per_step": 2,
    "rollout.generations_per_prompt": 3,
    "packing.row_length": 64,
    "packing.rows_per_micro_batch": 1,
    "execution.layers": "scan",
    "steps": 2,
}


@pytest.fixture(scope="module")
def tiny_policy(tmp_path_factory) -> Path:
    """Hugging Face files of a model that compiles at once."""
    directory = tmp_path_factory.mktemp("policy")
    models.save_hf(directory, CONFIG, models.initialise(CONFIG, jax.random.key(0)))
    return directory


def tiny_steps(bench: str, policy: Path, capsys, *words: str) -> dict[str, float]:
    chosen = TINY_STEPS | {"policy.checkpoint": policy}
    options = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
    assert main(["bench", bench, "--json", *options, *words]) == 0
    return {row["name"]: row["value"] for row in json.loads(capsys.readouterr().out)["figures"]}


def test_the_trainer_bench_reports_rates_with_and_without_padding(tiny_policy, capsys):
    figures = tiny_steps("trainer", tiny_policy, capsys)
    padding = figures["padding share"]
    assert 0 < padding < 1
    slots, tokens = figures["token slots per device"], figures["real tokens per device"]
    assert tokens == pytest.approx(slots * (1 - padding))
    assert figures["step, fastest"] <= figures["step, mean"] <= figures["step, slowest"]
    phases = sum(value for name, value in figures.items() if name.startswith("phase "))
    assert phases == pytest.approx(figures["step, mean"], rel=0.05)
    assert figures["assignments dropped and used"] == 0


def test_the_boundary_bench_sees_the_copy_where_it_is_not_hidden(tiny_policy, capsys):
    figures = tiny_steps("boundary", tiny_policy, capsys, "--copy-s", "0.1")
    for way in ("plain", "pipelined"):
        assert figures[f"{way}, copies of 0.1 s: idle at a boundary, mean"] >= 0.08
    for way in ("plain", "pipelined", "staged"):
        assert figures[f"{way}, copies of 0.1 s: step, mean"] > 0


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["trainer", "--steps", "0"], "--steps 0: must be at least 1"),
        (["boundary", "--copy-s", "-1"], "--copy-s -1"),
        (["boundary", "--steps", "1"], "--steps 1: must be at least 2"),
        (["trainer", "--packing.row_length", "0"], "packing.row_length"),
    ],
)
def test_benches_of_the_trainer_refuse_what_they_cannot_do(words, complaint, capsys):
    assert main(["bench", *words]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.slow
def test_the_loss_bench_gives_a_ratio_of_equal_gradients(capsys):
    words = ["bench", "loss", "--json", "--row-length", "128", "--groups", "2", "--repetitions", "1"]
    assert main(words) == 0
    figures = {figure["name"]: figure for figure in json.loads(capsys.readouterr().out)["figures"]}
    difference = figures["largest difference of a gradient"]
    assert 0 < difference["value"] < difference["target"]
    assert figures["one pass: forward passes"]["value"] == pytest.approx(1)
    assert figures["two passes: forward passes"]["value"] == pytest.approx(2)
    assert 1.2 < figures["work of two passes / of one"]["value"] <= 4 / 3
    kept = [figures[f"sequences that the {name} keeps"]["value"] for name in ("gate", "error filter")]
    assert 0 < kept[0] < kept[1] < 16
    assert figures["one pass: tokens"]["value"] > 0
    assert main(["bench", "loss", "--rows", "0"]) == 2


# ------------------------------------------------------------------------------------------------------ bench step

_STEP_SIDE = """
import json, sys
seconds, loss = map(float, sys.argv[1:3])
more = {"scoring_seconds": float(sys.argv[3])} if len(sys.argv) > 3 else {}
for line in sys.stdin:
    asked = json.loads(line)
    if asked["call"] == "run":
        answer = {"seconds": seconds, "core_seconds": 2 * seconds, "peak_bytes": 1 << 20, **more}
    else:
        answer = {"settings": "none", "slots": 80, "seconds": 9.0, "check": {"loss": loss, "gradient_norm": 2.0}}
    print(json.dumps(answer), flush=True)
"""


def _steps_compared(*arguments: tuple[float, ...]) -> dict[str, float]:
    commands = [[sys.executable, "-c", _STEP_SIDE, *map(str, words)] for words in arguments]
    with ExitStack() as stack:
        sides = [stack.enter_context(start_side(f"side {i}", words, 1)) for i, words in enumerate(commands)]
        return {figure.name: figure.value for figure in step._compare(sides, "context 9", 60, 2)}


def test_a_step_is_compared_with_and_without_the_peers_scoring_pass():
    figures = _steps_compared((0.5, -0.01), (2.0, -0.0100005, 0.5))
    assert figures["context 9: TRL / swerve"] == pytest.approx(4)
    assert figures["context 9: TRL without its scoring pass / swerve"] == pytest.approx(3)
    assert figures["context 9, side 0: tokens"] == pytest.approx(120)
    assert figures["context 9, side 1: of it the scoring pass"] == pytest.approx(0.5)
    assert "context 9: TRL / swerve" in _steps_compared((0.5, 2e-7), (2.0, 5e-7, 0.5))  # a loss of about nothing


def test_no_ratio_of_steps_that_differ():
    with pytest.raises(MachineError, match=r"context 9: loss differs from TRL's by 1\.\de-01 of its size"):
        _steps_compared((0.5, -0.01), (2.0, -0.009, 0.5))


def test_the_peer_reads_the_trajectories_that_were_written(tmp_path):
    groups = synthetic_groups(SyntheticShape(context_length=128), 2, 3, vocab_size=50, seed=1)
    log = TrajectoryLog(tmp_path / "trajectories.jsonl")
    for group in groups:
        log.append(1, "train", group.trajectories)
    log.close()
    read = _peer_trl._read_groups(tmp_path / "trajectories.jsonl")
    assert [len(group) for group in read] == [3, 3]
    for attempt, wanted in zip(
        [*read[0], *read[1]], [one for group in groups for one in group.trajectories], strict=True
    ):
        start = len(attempt.prompt_ids)
        assert attempt.prompt_ids + attempt.completion_ids == wanted.tokens.tolist()
        assert start > 0 and not wanted.sampled[:start].any()
        assert attempt.sampled == wanted.sampled[start:].tolist()
        assert attempt.logprobs == wanted.behaviour_logprobs[start:].tolist()
        assert attempt.reward == wanted.reward


_CHOOSING = """
import json, sys
tried = {}
for line in sys.stdin:
    asked = json.loads(line)
    tried = asked.get("settings", tried)
    slow = {"grouped_mm": 3, "eager": 2}[tried["experts"]] + {2: 3, 1: 4, 4: 1, 8: 0}[tried["batch"]]
    seconds = slow + 5 * tried["checkpointing"] + (tried["waiting"] == "default") + (tried["memory"] == "kept")
    print(json.dumps({"versions": "", "group_sizes": [4, 4], "seconds": seconds}), flush=True)
"""


def test_the_peers_settings_are_the_fastest_that_divide_a_step(tmp_path):
    chosen = step._choose([sys.executable, "-c", _CHOOSING], 1, tmp_path)
    assert chosen == {
        "waiting": "passive", "memory": "default", "experts": "eager", "batch": 4, "checkpointing": False
    }  # fmt: skip


def test_recorded_trajectories_are_those_of_whole_groups_of_the_first_step(tmp_path):
    whole, cut = synthetic_groups(SyntheticShape(context_length=128), 2, 3, vocab_size=50, seed=1)
    log = TrajectoryLog(tmp_path / "trajectories.jsonl")
    log.append(4, "evaluation", cut.trajectories)
    log.append(5, "train", [*whole.trajectories, *cut.trajectories[:2]])
    log.append(6, "train", cut.trajectories)
    log.close()
    read = step._recorded(tmp_path / "trajectories.jsonl")
    assert [(one.task_id, one.sample_index) for one in read] == [(whole.task_id, index) for index in range(3)]
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(SwerveError, match=r"empty.jsonl: no graded trajectory of a training step"):
        step._recorded(tmp_path / "empty.jsonl")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--group-size", "2"], "--group-size 2: at least 3"),
        (["--context-lengths", "512", "32"], "--context-lengths 32: at least 64"),
        (["--threads", "1000"], "--threads 1000: this process may use 1 to"),
        (["--trajectories", "x.jsonl"], "--trajectories and --policy go together"),
    ],
)
def test_the_step_bench_refuses_what_it_cannot_measure(words, message, capsys):
    assert main(["bench", "step", *words]) == 2
    assert message in capsys.readouterr().err


def test_our_side_takes_whole_steps_on_recorded_trajectories(tiny_policy, tmp_path, capsys):
    log = TrajectoryLog(tmp_path / "trajectories.jsonl")
    (group,) = synthetic_groups(SyntheticShape(context_length=64), 1, 4, vocab_size=48, seed=0)
    log.append(1, "train", group.trajectories)
    log.close()
    words = ["--trajectories", str(tmp_path / "trajectories.jsonl"), "--policy", str(tiny_policy), "--repetitions", "1"]
    assert main(["bench", "step", "--json", *words]) == 0
    figures = {figure["name"]: figure["value"] for figure in json.loads(capsys.readouterr().out)["figures"]}
    assert figures["recorded, swerve: gradient norm"] > 0 and figures["recorded, swerve: update norm"] > 0
    assert 0.05 < figures["recorded, swerve: logprob gap"] < 1
    assert figures["recorded, swerve: fastest repetition"] <= figures["recorded, swerve: slowest repetition"]
    assert not any("TRL" in name for name in figures)
