"""A submission tree appears whole and passes the checkers, or is refused before anything is written."""

import json

import pytest

from swerve.mlperf.check import check
from swerve.mlperf.package import Submission, make_package
from swerve.mlperf.rules import SYSTEM_FIELDS
from swerve.mlperf.system import Accelerators, missing_fields, probe_system, read_site, template
from swerve.types import MachineError, SwerveError

from .logs import line, write_log

RDI = "Research, Development, or Internal (RDI)"
FIELDS = {name: "N/A" for name in SYSTEM_FIELDS if name not in ("submitter", "division", "system_name")}
FIELDS["status"] = RDI


def submission(tmp_path, *, division="open", fields=None, code="", num_logs=3, **options):
    logs = tuple(
        write_log(
            tmp_path / f"run{number}" / "mlperf.log",
            **{"division": division, "seed": number, "accuracies": (0.7,), **options},
        )
        for number in range(num_logs)
    )
    known = FIELDS if fields is None else fields
    return Submission(org="Example", system="laptop", division=division, fields=known, logs=logs, code=code)


@pytest.mark.parametrize("division", ["open", "closed"])
def test_a_tree_of_three_logs_passes_every_checker(tmp_path, division):
    tree = make_package(submission(tmp_path, division=division), tmp_path / "out")
    assert sorted(str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()) == [
        "benchmarks/qwen35_397b_grpo/implementations/laptop/README.md",
        *(f"results/laptop/qwen35_397b_grpo/result_{number}.txt" for number in range(3)),
        "systems/laptop.json",
    ]
    verdict = check(tree)
    assert verdict.findings == ()
    assert check(tmp_path / "out") == verdict
    convergence = ("rcp_checker",) if division == "closed" else ()
    assert set(verdict.checkers) == {
        *("swerve", "compliance_checker", "system_desc_checker", "package_checker"),
        *convergence,
    }
    description = json.loads((tree / "systems" / "laptop.json").read_text())
    assert list(description) == list(SYSTEM_FIELDS)
    assert (description["submitter"], description["division"]) == ("Example", division)
    assert list((tmp_path / "out").iterdir()) == [tree]


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_logs": 2}, "2 logs where 3 are asked for"),
        ({"seed": 5}, "seed: 5, as in mlperf.log"),
        ({"status": "aborted"}, "metadata.status is aborted"),
        ({"status": None}, "no run_stop"),
        ({"accuracies": (0.69,)}, "accuracy: 0.69, and none above"),
        ({"changes": {"config_filename": None}}, "config_filename: missing"),
        ({"changes": {"submission_org": "Other"}}, "submission_org: Other, not Example"),
        ({"division": "closed", "changes": {"opt_base_learning_rate": 1e-4}}, "0.0001, expected 1e-06"),
        ({"insert": [line("train_samples", 1)]}, "train_samples: 2 records"),
    ],
)
def test_what_the_checkers_would_refuse_is_refused_before_anything_is_written(tmp_path, options, reason):
    with pytest.raises(SwerveError, match="nothing is written") as caught:
        make_package(submission(tmp_path, **options), tmp_path / "out")
    assert reason in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_torn_log_mixed_sizes_and_an_existing_tree_are_refused(tmp_path):
    wanted = submission(tmp_path)
    wanted.logs[0].write_text(wanted.logs[0].read_text() + line("seed")[:30])
    write_log(wanted.logs[1], seed=9, gbs=512)
    (tmp_path / "out" / "Example").mkdir(parents=True)
    with pytest.raises(SwerveError) as caught:
        make_package(wanted, tmp_path / "out")
    for reason in ("the line is cut off", "global_batch_size: 256, 512", "Example: exists"):
        assert reason in str(caught.value)


def test_a_description_that_lacks_fields_names_each(tmp_path):
    with pytest.raises(SwerveError) as caught:
        make_package(submission(tmp_path, fields={"cooling": "air", "status": "mine"}), tmp_path / "out")
    text = str(caught.value)
    assert text.count("is missing: ") == len(SYSTEM_FIELDS) - 5
    assert "system: host_networking is missing: network between nodes" in text
    assert "cooling" not in text
    assert "status: mine: must be one of" in text


def test_names_and_code_that_cannot_be_are_refused(tmp_path):
    good = submission(tmp_path, code=str(tmp_path / "nowhere"))
    bad = Submission(org="My Org", system=".box", division="open", fields=FIELDS, logs=good.logs, code=good.code)
    with pytest.raises(SwerveError) as caught:
        make_package(bad, tmp_path / "out")
    for reason in ("--org My Org", "--system .box", "nowhere: neither a folder nor an address"):
        assert reason in str(caught.value)


def test_code_recipes_and_recorded_commands_go_into_the_tree(tmp_path):
    code = tmp_path / "code"
    (code / ".git").mkdir(parents=True)
    (code / ".git" / "config").write_text("secret")
    (code / "train.sh").write_text("swerve train\n")
    wanted = submission(tmp_path, code=str(code))
    (wanted.logs[0].parent / "recipe.toml").write_text("[run]\n")
    record = {"command": ["/bin/swerve", "train", "my recipe.toml"], "source": {"commit": "c0ffee", "dirty": True}}
    (wanted.logs[0].parent / "provenance.json").write_text(json.dumps(record))
    tree = make_package(wanted, tmp_path / "out")
    place = tree / "benchmarks" / "qwen35_397b_grpo" / "implementations" / "laptop"
    assert sorted(path.name for path in place.iterdir()) == ["README.md", "recipe_0.toml", "train.sh"]
    readme = (place / "README.md").read_text()
    assert "at commit c0ffee with changes, started as `swerve train 'my recipe.toml'`\n" in readme
    assert "        swerve train recipe_0.toml\n" in readme
    assert "        swerve train recipe.toml --run.seed 1\n" in readme
    assert check(tree).findings == ()


def test_a_disk_that_refuses_leaves_nothing_behind(tmp_path):
    (tmp_path / "out").write_text("a file where a folder must be")
    with pytest.raises(MachineError, match="cannot be written"):
        make_package(submission(tmp_path), tmp_path / "out")


def test_faults_of_a_tree_are_named(tmp_path):
    tree = make_package(submission(tmp_path, division="closed"), tmp_path / "out")
    system = tree / "systems" / "laptop.json"
    fields = json.loads(system.read_text())
    del fields["cooling"]
    system.write_text(json.dumps({**fields, "status": "mine", "host_processor_core_count": 2}))
    found = {(finding.kind, finding.key, finding.checker) for finding in check(tree).findings}
    assert ("missing-system-field", "cooling", "swerve") in found  # a wrong status hides it from the checker
    assert ("system-field-type", "host_processor_core_count", "swerve") in found
    assert "checker-crash" in {kind for kind, _, _ in found}
    system.write_text(json.dumps({**fields, "cooling": "air", "division": "open"}))
    assert {finding.kind for finding in check(tree).findings} == {"system-division"}
    results = tree / "results" / "laptop" / "qwen35_397b_grpo"
    system.write_text(json.dumps({**fields, "cooling": "air"}))
    (results / "notes.md").write_text("why\n")
    write_log(results / "result_1.txt", division="closed", seed=1, accuracies=(0.69,))
    found = {(finding.kind, finding.checker) for finding in check(tree).findings}
    assert {("unknown-file", "package_checker"), ("one-bad-log", "package_checker")} <= found
    (results / "result_2.txt").unlink()
    write_log(results / "result_0.txt", division="closed", seed=1, accuracies=(0.6,))
    found = {(finding.kind, finding.checker) for finding in check(tree).findings}
    assert {("bad-logs", "package_checker"), ("number-of-results", "package_checker")} <= found
    assert {("seeds", "package_checker"), ("equal-seeds", "swerve")} <= found
    assert sorted(path.name for path in results.iterdir()) == ["notes.md", "result_0.txt", "result_1.txt"]
    system.unlink()
    verdict = check(tree)
    assert "no-system" in {finding.kind for finding in verdict.findings}
    assert "package_checker" not in verdict.checkers


def test_a_machine_tells_what_it_can_and_the_rest_is_named(tmp_path):
    fields = probe_system(Accelerators(platform="cpu", count=1, kind="cpu"))
    assert set(fields) <= set(SYSTEM_FIELDS)
    assert all(isinstance(value, str) for value in fields.values())
    assert int(fields["host_processor_vcpu_count"]) >= 1
    assert fields["framework"].startswith("JAX ")
    assert (fields["accelerators_per_node"], fields["accelerator_model_name"]) == ("0", "N/A")
    assert {"status", "cooling", "host_networking", "number_of_nodes"} <= set(missing_fields(fields))
    assert probe_system(Accelerators(platform="tpu", count=4, kind="TPU7x"))["accelerators_per_node"] == "4"
    assert not [name for name in probe_system(None) if name.startswith("accelerator")]
    path = tmp_path / "site.json"
    path.write_text(json.dumps({**template(fields), "cooling": "air"}))
    assert read_site(path)["cooling"] == "air"
    assert "status" not in read_site(path)
    for text, reason in (
        ("[]", "must be a JSON object"),
        ('{"cooling": 3}', "cooling: 3 is no text"),
        ("{", "no JSON"),
    ):
        path.write_text(text)
        with pytest.raises(SwerveError, match=reason):
            read_site(path)
