"""`swerve ab`: what is refused, how verdicts are given, and that every fault on purpose is noticed."""

import dataclasses
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import tiny
from swerve import models, parallel
from swerve.cli.ab import report
from swerve.cli.ab.arms import Reference, StepRecord, run_candidate, run_reference, trainer_of
from swerve.cli.ab.breaks import BREAKS, check_break
from swerve.cli.ab.verdicts import EXIT_CODES, Comparison, Difference, Verdict, compare, judge, overall, worst
from swerve.cli.composition import LoadedPolicy
from swerve.cli.main import main
from swerve.config import AbRecipe, TrainRecipe, arm_recipe, read_recipe_as
from swerve.config import schema as sections
from swerve.config.schema import AbBounds
from swerve.models.scoring import Table
from swerve.trainer import GrpoTrainer, TrainerState
from swerve.types import SwerveError

HEAD = Path(__file__).resolve().parents[3] / "recipes" / "ab" / "head.toml"

# ------------------------------------------------------------------------------------------------------ recipes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'candidate = ["execution.haed=plain"]',
            "arms.candidate: execution.haed is unknown; did you mean execution.head",
        ),
        ('candidate = ["execution.head=round"]', 'arms.candidate: execution.head = "round" must be one of sharded'),
        ('candidate = ["execution.head plain"]', 'has "execution.head plain": write each as "section.key=value"'),
        ('candidate = ["mesh.fsdp=2", "mesh.fsdp=1"]', "sets mesh.fsdp twice"),
        ('candidate = ["mesh.fsdp=3"]', "arms.candidate: packing.rows_per_micro_batch = 8 must be a multiple"),
        ('candidate = ["mesh.context=3"]', "arms.candidate: packing.row_length = 512 must be a multiple"),
        ('candidate = ["tasks.family=mini"]', "arms.candidate: tasks.family is the same for all arms"),
        ('candidate = ["training.num_steps=9"]', "arms.candidate: training.num_steps is the same for all arms"),
        ('candidate = ["algorithm.overlong_filter=true"]', "algorithm.overlong_filter would drop sequences"),
        ('candidate = ["algorithm.logprob_error_threshold=2"]', "logprob_error_threshold would drop sequences"),
        ("reference = []\ncandidate = []", "is the reference: there is nothing to compare"),
        ("contender = []", "arms.contender is unknown"),
        ("[bounds]\nloss = [1e-3]", r"bounds.loss = \[0.001\] must be two numbers"),
        ("[bounds]\nloss = [1e-3, 1e-4]", "the second no smaller"),
        ("[bounds]\nlos = [1e-3, 1e-4]", "bounds.los is unknown; did you mean bounds.loss"),
        ("[optimizer]\nbeta1 = 1.0", "optimizer.beta1 = 1.0 leaves no gradient"),
        ("[input]\ngroup_size = 2", "input.group_size = 2 must be an integer at least 3"),
    ],
)
def test_what_cannot_be_compared_is_refused_when_the_recipe_is_read(tmp_path, text, message):
    path = tmp_path / "r.toml"
    path.write_text(f'kind = "ab"\n[arms]\n{text}\n')
    with pytest.raises(SwerveError, match=message) as caught:
        read_recipe_as(AbRecipe, path)
    assert all(line.startswith(f"{path}: ") for line in str(caught.value).splitlines())


def test_a_gate_on_log_probabilities_is_refused(tmp_path, capsys):
    path = tmp_path / "r.toml"
    gated = ["algorithm.importance=sequence_mask", "algorithm.importance_cap=2.0"]
    path.write_text(f'kind = "ab"\n[arms]\ncandidate = {json.dumps(gated)}\n')
    assert main(["ab", str(path)]) == 2
    error = capsys.readouterr().err
    assert (
        error
        == f"swerve: {path}: arms.candidate: algorithm.importance would drop sequences, which hides errors: remove it\n"
    )
    path.write_text('kind = "train"')
    assert main(["ab", str(path)]) == 2
    assert 'kind = "train": this command needs kind = "ab"' in capsys.readouterr().err


def test_arms_have_what_they_share_and_what_tells_them_apart():
    recipe = read_recipe_as(AbRecipe, HEAD, {"input.num_steps": "5", "optimizer.learning_rate": "0.5"})
    reference, candidate = arm_recipe(recipe, "reference"), arm_recipe(recipe, "candidate")
    assert (reference.execution.head, candidate.execution.head) == ("plain", "sharded")
    assert dataclasses.replace(reference, execution=candidate.execution) == candidate
    assert reference.training.num_steps == 5 and reference.optimizer.learning_rate == 0.5
    assert reference.rollout.context_length == recipe.input.context_length
    assert reference.mesh.num_devices == 8
    staged = AbRecipe(
        arms=sections.AbArms(
            candidate=("training.max_trajectory_age=1", "training.pipelined=true", "training.staged = true")
        )
    )
    assert arm_recipe(staged, "candidate").training.staged


# ----------------------------------------------------------------------------------------------------- verdicts


@pytest.mark.parametrize(
    ("difference", "noise", "verdict"),
    [
        (0.0, 0.0, "PASS"),
        (1.0, 0.0, "PASS"),
        (1.0, 1.0, "PASS"),
        (1.5, 0.0, "INCONCLUSIVE"),
        (2.0, 0.5, "INCONCLUSIVE"),
        (0.5, 1.5, "INCONCLUSIVE"),  # so noisy that a difference of 1 could not be told from none
        (2.1, 0.0, "FAIL"),
        (2.1, 1.5, "FAIL"),  # noisy, but not as noisy as that
        (9.0, 2.5, "INCONCLUSIVE"),
        (math.inf, 0.0, "FAIL"),
        (math.nan, 0.0, "FAIL"),
        (0.0, math.nan, "INCONCLUSIVE"),
        (math.inf, math.inf, "INCONCLUSIVE"),
    ],
)
def test_a_metric_is_judged_by_two_bounds_and_its_noise(difference: float, noise: float, verdict: Verdict):
    assert judge(difference, noise, 1.0, 2.0) == verdict


@given(st.floats(0, 10), st.floats(0, 10), st.floats(0.1, 5), st.floats(0, 5), st.floats(0, 5))
def test_worse_never_becomes_better(difference: float, noise: float, passes: float, gap: float, more: float):
    rank = {"PASS": 0, "INCONCLUSIVE": 1, "FAIL": 2}
    before = judge(difference, noise, passes, passes + gap)
    assert rank[judge(difference + more, noise, passes, passes + gap)] >= rank[before]
    if before == "PASS":
        assert max(difference, noise) <= passes
    assert (judge(difference, noise + more, passes, passes + gap) == "PASS") <= (before == "PASS")


def comparison(metric: str, verdict: Verdict, relative: float = 0.0, noise: float = 0.0) -> Comparison:
    found = Difference(relative=relative, first=1.0, second=1.0 + relative, step=2, where="head")
    return Comparison(metric=metric, found=found, noise=noise, passes=1e-4, fails=1e-3, verdict=verdict)


def test_the_worst_metric_decides_and_is_named_in_one_line():
    good, odd = comparison("loss", "PASS", 1e-5), comparison("entropy", "INCONCLUSIVE", 5e-4)
    bad, worse = comparison("gradient", "FAIL", 2e-3), comparison("weights", "FAIL", 0.5)
    assert overall([good, good]) == "PASS"
    assert overall([good, odd]) == "INCONCLUSIVE"
    assert overall([odd, bad, good, worse]) == "FAIL"
    assert worst([odd, bad, good, worse]) is worse
    assert (
        report.closing_line([odd, bad, worse])
        == "FAIL: weights differs by 5.0e-01 in step 2, head: 500.0 times its bound"
    )
    assert report.closing_line([good, odd]).startswith("INCONCLUSIVE: entropy differs by 5.0e-04 in step 2")
    noisy = comparison("loss", "INCONCLUSIVE", 0.0, noise=0.1)
    assert "the reference differs from itself by 1.0e-01 in loss" in report.closing_line([noisy])
    assert report.closing_line([good]).startswith("PASS")
    assert EXIT_CODES == {"PASS": 0, "FAIL": 1, "INCONCLUSIVE": 3}


def record(gradient: np.ndarray, weights: np.ndarray, **numbers: float) -> StepRecord:
    named = {"loss": 0.5, "token_logdiff_absmean": 0.1, "entropy": 2.0, "grad_norm": 1.0} | numbers
    stats: Any = SimpleNamespace(**named)
    return StepRecord(stats=stats, gradient={"head": gradient, "router": 0 * gradient}, weights={"head": weights})


def test_a_gradient_of_the_right_norm_in_the_wrong_places_fails_alone():
    gradient, weights = np.arange(1.0, 5.0, dtype=np.float32), np.full(4, 2.0, np.float32)
    right = [record(gradient, weights + 1), record(gradient, weights + 2, entropy=1.9)]
    reference = Reference(start={"head": weights}, groups=[], records=right, repeat=right)
    wrong = [right[0], dataclasses.replace(right[1], gradient={"head": gradient[::-1], "router": 0 * gradient})]
    found = {one.metric: one for one in compare(reference, wrong, AbBounds())}
    assert {name for name, one in found.items() if one.verdict != "PASS"} == {"gradient"}
    assert (found["gradient"].found.step, found["gradient"].found.where) == (2, "head")
    assert found["gradient"].found.first == pytest.approx(found["gradient"].found.second)
    assert overall(compare(reference, right, AbBounds())) == "PASS"
    # Nothing may come of nothing: a parameter without a gradient in the reference has none in the candidate.
    moved = [right[0], dataclasses.replace(right[1], gradient={"head": gradient, "router": 1e-9 * gradient})]
    found = {one.metric: one for one in compare(reference, moved, AbBounds())}
    assert (found["gradient"].verdict, found["gradient"].found.where) == ("FAIL", "router")


def test_a_candidate_that_refuses_a_step_fails():
    gradient, weights = np.ones(4, np.float32), np.full(4, 2.0, np.float32)
    right = [record(gradient, weights + 1), record(gradient, weights + 2)]
    reference = Reference(start={"head": weights}, groups=[], records=right, repeat=right)
    comparisons = compare(reference, right[:1], AbBounds())
    assert [one.metric for one in comparisons if one.verdict == "FAIL"] == ["steps"]
    assert report.closing_line(comparisons) == "FAIL: the candidate made 1 of 2 steps"
    assert [one.metric for one in compare(reference, [], AbBounds())] == ["steps"]


def test_numbers_and_changes_are_relative_to_the_reference():
    gradient, weights = np.ones(4, np.float32), np.full(4, 100.0, np.float32)
    first, again = record(gradient, weights + 1), record(gradient, weights + 1, entropy=2.001)
    reference = Reference(start={"head": weights}, groups=[], records=[first], repeat=[again])
    candidate = [record(gradient, weights + 1.25, loss=-0.5, grad_norm=math.nan)]
    found = {one.metric: one for one in compare(reference, candidate, AbBounds())}
    assert found["weights"].found.relative == pytest.approx(0.25)  # of the change, not of the weights
    assert found["loss"].found.relative == pytest.approx(2.0)
    assert (found["grad_norm"].found.relative, found["grad_norm"].verdict) == (math.inf, "FAIL")
    assert found["entropy"].noise == pytest.approx(5e-4)
    assert (found["entropy"].found.relative, found["entropy"].verdict) == (0.0, "INCONCLUSIVE")


def test_a_report_names_everything_as_json(tmp_path):
    recipe = read_recipe_as(AbRecipe, HEAD)
    comparisons = [comparison("loss", "FAIL", 0.1), comparison("entropy", "PASS")]
    told = json.loads(json.dumps(report.as_json(recipe, HEAD, comparisons, "axis-order", 1.234)))
    assert (told["verdict"], told["break"], told["candidate"]) == ("FAIL", "axis-order", ["execution.head=sharded"])
    assert told["metrics"][0]["difference"] == 0.1 and told["metrics"][1]["verdict"] == "PASS"
    assert told["bounds"]["grad_norm"] == [2e-3, 1e-2]
    changed = dataclasses.replace(recipe, bounds=AbBounds(loss=(1e-4, 1e-3)))
    assert report.bounds_digest(changed.bounds) != told["bounds_digest"] == report.bounds_digest(recipe.bounds)
    assert report.bounds_digest(recipe.bounds)[:12] in report.opening_lines(recipe, HEAD, "")[-1]
    text = report.table(comparisons)
    assert text[0].split()[0] == "metric" and text[1].endswith("FAIL") and text[-1].startswith("FAIL: loss")


# --------------------------------------------------------------------------------------------- real arms, broken

CONFIG = dataclasses.replace(tiny.CONFIG, num_experts=8)
SMALL = AbRecipe(
    input=sections.AbInput(num_steps=2, num_groups=5, group_size=4, context_length=16),
    arms=sections.AbArms(reference=("execution.head=plain",), candidate=("execution.head=sharded",)),
    mesh=sections.Mesh(fsdp=2, expert=2),
    packing=sections.Packing(row_length=16, rows_per_micro_batch=4),
    execution=sections.Execution(layers="scan", logprob_chunk=8),
    optimizer=sections.Optimizer(learning_rate=1e-2),
)


@pytest.fixture(scope="module")
def policy() -> LoadedPolicy:
    params = models.initialise(CONFIG, jax.random.key(0))
    tokenizer: Any = None  # no text is read here
    return LoadedPolicy(directory=Path(), config=CONFIG, params=params, tokenizer=tokenizer)


@pytest.fixture(scope="module")
def reference(policy: LoadedPolicy) -> Reference:
    return run_reference(SMALL, arm_recipe(SMALL, "reference"), policy, lambda line: None)


Run = Callable[[str], dict[str, Comparison]]
"""The candidate with a fault, or with none, against the reference: comparisons by metric."""


@pytest.fixture(scope="module")
def sharded(policy: LoadedPolicy) -> tuple[GrpoTrainer, TrainerState]:
    """The candidate's trainer, compiled once, and where it starts."""
    trainer = trainer_of(arm_recipe(SMALL, "candidate"), policy)
    return trainer, trainer.state()


@pytest.fixture(scope="module")
def run(reference: Reference, policy: LoadedPolicy, sharded: tuple[GrpoTrainer, TrainerState]) -> Run:
    arm = arm_recipe(SMALL, "candidate")

    def with_fault(fault: str) -> dict[str, Comparison]:
        trainer, start = sharded
        if fault in ("axis-order", "missing-gather", "gradient-twice"):
            trainer = trainer_of(arm, policy)  # traced anew
        trainer.restore(start)
        candidate = run_candidate(reference, arm, trainer, lambda line: None, BREAKS.get(fault))
        return {one.metric: one for one in compare(reference, candidate, SMALL.bounds)}

    return with_fault


def test_two_heads_pass(reference: Reference, run: Run):
    found = run("")
    assert {name: one.verdict for name, one in found.items()} == dict.fromkeys(found, "PASS")
    assert all(one.noise <= one.passes for one in found.values())
    assert found["gradient"].found.relative > 0  # they are two programs
    # Real gradients and real updates: every parameter but the routers has moved.
    last = reference.records[-1]
    assert last.stats.step == 2 and last.stats.batch.num_micro_batches > 1
    for name, start in reference.start.items():
        assert ("router" in name) != bool((last.weights[name] != start).any()), name
    np.testing.assert_allclose(
        last.stats.grad_norm, math.sqrt(sum(float((one**2).sum()) for one in last.gradient.values())), rtol=1e-4
    )


@pytest.mark.parametrize(
    ("fault", "metrics"),
    [
        ("axis-order", {"gradient", "weights"}),
        pytest.param("gradient-twice", {"gradient", "grad_norm"}, marks=pytest.mark.slow),
        pytest.param("missing-gather", {"token_logdiff_absmean", "gradient", "weights"}, marks=pytest.mark.slow),
        ("stale-parameters", {"gradient", "weights"}),
        ("dropped-micro-batch", {"loss", "gradient", "weights"}),
    ],
)
def test_a_fault_on_purpose_fails(run: Run, fault: str, metrics: set[str]):
    before = Table.gather, Table.scatter_sum
    check_break(fault, arm_recipe(SMALL, "candidate"))
    found = run(fault)
    failed = {name for name, one in found.items() if one.verdict == "FAIL"}
    assert metrics <= failed, report.table(list(found.values()))
    assert (Table.gather, Table.scatter_sum) == before
    if fault == "axis-order":
        head = found["gradient"].found
        assert head.where == "head" and head.first == pytest.approx(head.second, rel=1e-2)


def test_a_staged_boundary_changes_no_bit_and_its_faults_are_noticed(
    reference: Reference, sharded: tuple[GrpoTrainer, TrainerState]
):
    trainer, start = sharded
    recipe = dataclasses.replace(SMALL, arms=read_recipe_as(AbRecipe, HEAD.with_name("boundary.toml")).arms)
    plain, staged = (arm_recipe(recipe, arm) for arm in ("reference", "candidate"))
    assert staged.training.staged and not plain.training.staged

    def records(arm: TrainRecipe, fault: str = "") -> list[StepRecord]:
        trainer.restore(start)
        return run_candidate(reference, arm, trainer, lambda line: None, BREAKS.get(fault))

    right = records(plain)
    exact = dataclasses.replace(reference, records=right, repeat=right)
    bounds = read_recipe_as(AbRecipe, HEAD.with_name("boundary.toml")).bounds
    assert all(one.found.relative == 0 for one in compare(exact, records(staged), bounds))
    for fault in ("stale-parameters", "dropped-micro-batch"):
        assert overall(compare(exact, records(staged, fault), bounds)) == "FAIL"


def test_a_fault_that_changes_nothing_is_refused():
    arm = arm_recipe(SMALL, "candidate")

    def with_(**changes: Any) -> TrainRecipe:
        return dataclasses.replace(arm, **changes)

    for recipe, fault, message in [
        (arm_recipe(SMALL, "reference"), "missing-gather", 'the candidate has execution.head = "plain"'),
        (with_(mesh=sections.Mesh(fsdp=2)), "axis-order", "lies along one axis"),
        (with_(mesh=sections.Mesh()), "gradient-twice", "runs on one device"),
        (with_(training=sections.Training(num_steps=1)), "stale-parameters", "takes one step"),
    ]:
        with pytest.raises(SwerveError, match=f"--break {fault}: .*{message}"):
            check_break(fault, recipe)


def test_names_of_parameters_are_those_of_the_model(reference: Reference):
    assert reference.start.keys() == parallel.flatten_names(models.parameters(CONFIG)).keys()


@pytest.mark.slow
@pytest.mark.usefixtures("as_users_run")
@pytest.mark.parametrize(("words", "verdict"), [([], "PASS"), (["--break", "axis-order"], "FAIL")])
def test_the_shipped_comparison_of_heads(words, verdict):
    command = [sys.executable, "-m", "swerve.cli", "ab", str(HEAD), "--json", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    told = json.loads(done.stdout)
    assert (done.returncode, told["verdict"]) == (EXIT_CODES[told["verdict"]], verdict)
    assert "candidate, step 3 of 3" in done.stderr
