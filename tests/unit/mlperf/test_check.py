"""The real checkers and those of this package: each kind of fault has its finding, its meaning and its remedy."""

import contextlib
import json
import logging
import random
from pathlib import Path

import pytest

from swerve.mlperf.check import check
from swerve.mlperf.checkers import checker
from swerve.mlperf.findings import EXPLANATIONS
from swerve.mlperf.read_log import TOKEN, read_log
from swerve.mlperf.run_summary import summarize
from swerve.types import SwerveError

from .logs import START_MS, line, write_log


def kinds(verdict):
    return [(finding.kind, finding.key, finding.checker) for finding in verdict.findings]


def one(path, kind):
    """The finding of this kind; there is exactly one."""
    [finding] = [finding for finding in check(path).findings if finding.kind == kind]
    assert finding.meaning and finding.remedy
    return finding


@pytest.mark.parametrize("division", ["open", "closed"])
def test_a_log_by_the_rules_is_clean(tmp_path, division):
    verdict = check(write_log(tmp_path / "run.log", division=division))
    assert verdict.findings == ()
    assert (verdict.kind, verdict.checkers) == ("log", ("swerve", "compliance_checker"))
    assert verdict.to_json()["clean"] is True


def test_what_the_open_division_leaves_open_is_no_finding(tmp_path):
    changes = {"opt_base_learning_rate": 3e-4, "generation_training_rollout_temperature": 0.7, "opt_adamw_beta_2": 0.95}
    assert check(write_log(tmp_path / "run.log", changes=changes)).findings == ()
    found = check(write_log(tmp_path / "run.log", division="closed", changes=changes)).findings
    assert {finding.key for finding in found} == set(changes)
    assert {finding.checker for finding in found} == {"compliance_checker"}
    [rate] = [finding for finding in found if finding.key == "opt_base_learning_rate"]
    assert (rate.kind, rate.found) == ("law-value", "0.0003, expected 1e-06")


def test_missing_keys_and_a_wrong_number_of_tasks_are_named_exactly(tmp_path):
    """What the published reference logs fail at."""
    missing = ("lowest_numerical_precision_in_linear", "lowest_numerical_precision_in_attn")
    missing += ("lowest_numerical_precision_in_comm", "config_filename")
    path = write_log(tmp_path / "run.log", division="closed", changes={**dict.fromkeys(missing), "eval_samples": 256})
    verdict = check(path)
    assert sorted(kinds(verdict)) == sorted(
        [("missing-key", key, "compliance_checker") for key in missing]
        + [("wrong-value", "eval_samples", "compliance_checker")]
    )
    assert one(path, "wrong-value").found == "256, expected 251"
    assert one(path, "wrong-value").line == 14


def test_an_accuracy_of_exactly_the_target_fails_and_is_explained(tmp_path):
    path = write_log(tmp_path / "run.log", accuracies=(0.69,))
    assert kinds(check(path)) == [("accuracy-at-target", "eval_accuracy", "compliance_checker")]
    assert "exactly 0.69 fails" in one(path, "accuracy-at-target").meaning
    assert check(write_log(path, accuracies=(174 / 251,))).findings == ()
    assert kinds(check(write_log(path, accuracies=(173 / 251,)))) == [
        ("accuracy-below-target", "eval_accuracy", "compliance_checker")
    ]


def test_an_aborted_run_passes_compliance_and_is_no_result(tmp_path):
    path = write_log(tmp_path / "run.log", status="aborted")
    assert kinds(check(path)) == [("run-aborted", "run_stop", "swerve")]
    assert "compliance passes such a log" in one(path, "run-aborted").meaning


def test_a_run_that_awaits_its_evaluation_is_said_to(tmp_path):
    path = write_log(tmp_path / "run.log", accuracies=(0.7,), status=None)
    assert kinds(check(path)) == [("not-finished", "run_stop", "compliance_checker")]
    assert "training has ended" in one(path, "not-finished").found


@pytest.mark.parametrize("cut", [5, 60])
def test_a_torn_last_line_is_named(tmp_path, cut):
    """Cut within the token, the checker does not see it."""
    path = write_log(tmp_path / "run.log")
    path.write_text(path.read_text() + line("seed", 3)[:cut])
    finding = one(path, "torn-line")
    assert finding.line == len(path.read_text().splitlines())
    assert finding.checker == ("swerve" if cut == 5 else "compliance_checker")
    assert len(check(path).findings) == 1


def test_lines_that_the_checker_stops_at_or_loses_are_named(tmp_path):
    path = write_log(tmp_path / "run.log", insert=[line("seed", 4)[:40] + line("power", 1)])
    assert kinds(check(path)) == [("glued-lines", "", "swerve")]
    path = write_log(path, insert=[":::MLLOG {nonsense}"])
    assert kinds(check(path)) == [("broken-line", "", "compliance_checker")]
    path = write_log(path, insert=[line("power", 1).replace('"metadata"', '"metadatum"')])
    assert [kind for kind, _, _ in kinds(check(path))] == ["checker-crash", "incomplete-line"]
    path.write_text("nothing\n")
    assert "empty-log" in [kind for kind, _, _ in kinds(check(path))]


def test_a_second_train_samples_is_named_by_its_lines(tmp_path):
    path = write_log(tmp_path / "run.log", insert=[line("train_samples", 701)])
    finding = one(path, "repeated-key")
    assert (finding.key, finding.checker, finding.severity) == ("train_samples", "compliance_checker", "error")
    assert finding.found.endswith("700, 701")
    finding = one(write_log(path, insert=[line("train_samples", 700)]), "repeated-key")
    assert finding.severity == "warning"


@pytest.mark.parametrize(("division", "minutes"), [("closed", 30), ("open", 240)])
def test_initialisation_is_limited(tmp_path, division, minutes):
    path = tmp_path / "run.log"
    assert check(write_log(path, division=division, init_minutes=minutes - 0.1)).findings == ()
    finding = one(write_log(path, division=division, init_minutes=minutes), "init-too-long")
    assert (finding.found, finding.checker) == (f"{minutes:.1f} minutes, at most {minutes}", "compliance_checker")


def test_an_evaluation_after_the_first_that_passes_is_named(tmp_path):
    path = write_log(tmp_path / "run.log", division="closed", accuracies=(0.7, 0.72))
    assert kinds(check(path)) == [("extra-evaluation", "eval_accuracy", "swerve")]
    assert one(path, "extra-evaluation").found == "at 4864 samples, after 0.7000 had passed at 4608"


def test_evaluations_out_of_step_order_are_named(tmp_path):
    path = write_log(tmp_path / "run.log", division="closed", accuracies=(0.5, 0.6, 0.7))
    lines = path.read_text().splitlines()
    wanted = [place for place, text in enumerate(lines) if '"eval_accuracy"' in text]
    lines[wanted[0]], lines[wanted[1]] = lines[wanted[1]], lines[wanted[0]]
    path.write_text("\n".join(lines) + "\n")
    finding = one(path, "evaluation-gap")
    assert (finding.checker, finding.found) == ("compliance_checker", "at 4864 samples, expected 4608")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (line("tracked_stats", {"eval_accuracy_mean": 0.5}, step=3), "foreign-accuracy"),
        (line("best_eval_accuracy", 0.5), "foreign-accuracy"),
        (line("tracked_stats", {"reward": 1}, samples_count=256, global_batch_size=512), "foreign-batch-size"),
        (line("note", "submission_benchmark"), "foreign-benchmark"),
    ],
)
def test_words_that_readers_search_for_are_named(tmp_path, text, kind):
    path = write_log(tmp_path / "run.log", division="closed", insert=[text])
    assert [found for found, _, _ in kinds(check(path))] == [kind]


def test_the_reader_of_convergence_does_what_is_said_of_it(tmp_path):
    """The claims of the explanations, held against the reader itself."""
    read = checker("rcp_checker.rcp_checker").read_submission_file
    path = tmp_path / "run.log"
    assert read(write_log(path, division="closed", accuracies=(0.7,)), "6.1.0", False)[1:3] == (4608, 256)
    assert read(write_log(path, division="closed", accuracies=(0.7, 0.6)), "6.1.0", False)[1] == 4864
    size = line("tracked_stats", {"reward": 1}, samples_count=256, global_batch_size=512)
    assert read(write_log(path, insert=[size]), "6.1.0", False)[2] == {"reward": 1}
    with pytest.raises(KeyError):
        read(write_log(path, insert=[line("best_eval_accuracy", 0.5)]), "6.1.0", False)


def test_a_clock_that_runs_backwards_and_an_unfilled_value_are_named(tmp_path):
    stop = line("run_stop", None, START_MS, "INTERVAL_END", status="success")
    path = write_log(tmp_path / "run.log", status=None, insert=[stop])
    assert one(path, "clock").found == "run_stop is dated 60.000 s before run_start"
    path = write_log(path, changes={"submission_platform": "64 x @NODE@"})
    assert one(path, "placeholder").severity == "warning"


def test_unknown_names_that_end_the_checker_with_a_traceback_are_named(tmp_path):
    path = write_log(tmp_path / "run.log", changes={"submission_division": "ajar"})
    assert {"unknown-division", "checker-crash"} <= {kind for kind, _, _ in kinds(check(path))}
    path = write_log(path, changes={"submission_benchmark": "poker"})
    assert {"unknown-benchmark", "checker-crash"} <= {kind for kind, _, _ in kinds(check(path))}
    path = write_log(path, accuracies=("high",))  # pyright: ignore[reportArgumentType]
    assert "bad-accuracy" in {kind for kind, _, _ in kinds(check(path))}


def write_set(folder: Path, **options) -> Path:
    for number in range(3):
        write_log(folder / f"result_{number}.txt", **{"seed": number, "accuracies": (0.7,), **options})
    return folder


def test_a_set_of_three_is_clean_where_its_batch_size_has_a_reference(tmp_path):
    for gbs in (256, 384, 512, 768, 1024):
        verdict = check(write_set(tmp_path / str(gbs), division="closed", gbs=gbs))
        assert (verdict.findings, verdict.checkers[-1]) == ((), "rcp_checker"), gbs
    for gbs in (128, 1152):
        path = write_set(tmp_path / str(gbs), division="closed", gbs=gbs)
        assert kinds(check(path)) == [("no-reference", "", "rcp_checker")], gbs
        assert "256, 512 and 1024" in one(path, "no-reference").meaning


def test_what_is_wrong_with_a_set_is_named(tmp_path):
    path = write_set(tmp_path / "seeds", seed=7)
    assert kinds(check(path)) == [("equal-seeds", "seed", "swerve")] * 2
    path = write_set(tmp_path / "four")
    write_log(path / "result_3.txt", seed=9)
    assert one(path, "number-of-results").found == "4 logs where 3 are asked for"
    write_log(path / "result_2.txt", seed=2, gbs=512)
    assert one(path, "mixed-batch-sizes").found == "256, 512"
    path = write_set(tmp_path / "aborted", division="closed", status="aborted")
    assert ("not-converged", "", "rcp_checker") in kinds(check(path))
    # The last line that holds the word is read, whatever its key.
    early = line("eval_accuracy_of", 0.7, samples_count=3000)
    path = write_set(tmp_path / "fast", division="closed", insert=[early])
    assert ("too-fast", "", "rcp_checker") in kinds(check(path))


def test_checking_leaves_nothing_behind(tmp_path, monkeypatch, capfd):
    path = write_set(tmp_path / "logs", division="closed")
    monkeypatch.chdir(path)
    before = logging.getLogger().handlers[:]
    check(path)
    assert sorted(file.name for file in path.iterdir()) == ["result_0.txt", "result_1.txt", "result_2.txt"]
    assert logging.getLogger().handlers == before
    assert capfd.readouterr() == ("", "")


def test_what_cannot_be_checked_is_one_line(tmp_path):
    with pytest.raises(SwerveError, match="no log in it"):
        check(tmp_path)
    with pytest.raises(SwerveError, match=r"--ruleset 9.9.9: unknown; one of .*6.1.0"):
        check(write_log(tmp_path / "run.log"), "9.9.9")


def test_no_log_however_bent_ends_a_check_or_a_report(tmp_path):
    """Lines cut, doubled, lost and glued, fields lost or of other types, 60 times."""
    generator = random.Random(1)
    odd = [None, "x", [], {}, -1, float("inf"), float("nan"), True, 0, "256", 1.5, [1, 2], "eval_accuracy", 10**30]
    path = tmp_path / "run.log"
    for _ in range(60):
        lines = write_log(path, division=generator.choice(["open", "closed"])).read_text().splitlines()
        for _ in range(3):
            place, fields = generator.randrange(len(lines)), {}
            with contextlib.suppress(ValueError):
                fields = json.loads(lines[place][len(TOKEN) :])
            match generator.randrange(6):
                case 0:
                    del lines[place]
                case 1:
                    lines.insert(generator.randrange(len(lines)), lines[place])
                case 2:
                    lines[place] = lines[place][: generator.randrange(len(lines[place]) + 1)]
                case 3:
                    lines[place] += generator.choice(lines)
                case 4 if fields:
                    fields[generator.choice(list(fields))] = generator.choice(odd)
                    lines[place] = TOKEN + json.dumps(fields)
                case 5 if isinstance(fields.get("metadata"), dict):
                    fields["metadata"][generator.choice(["samples_count", "step", "status"])] = generator.choice(odd)
                    lines[place] = TOKEN + json.dumps(fields)
        path.write_text("\n".join(lines))
        json.dumps(check(tmp_path).to_json())
        summarize(read_log(path)).to_json()


def test_several_trees_at_once_are_refused_and_hidden_files_left_out(tmp_path):
    for org in ("A", "B"):
        (tmp_path / org / "results").mkdir(parents=True)
        (tmp_path / org / "systems").mkdir()
    with pytest.raises(SwerveError, match=r"holds several trees: name one of .*/A, .*/B"):
        check(tmp_path)
    assert [finding.kind for finding in check(tmp_path / "A").findings] == ["no-results"]
    write_log(tmp_path / "logs" / ".half" / "run.log")
    write_log(tmp_path / "logs" / "run.log")
    assert check(tmp_path / "logs").logs == (tmp_path / "logs" / "run.log",)


def test_every_explanation_says_what_and_what_to_do():
    for kind, (meaning, remedy) in EXPLANATIONS.items():
        assert len(meaning) > 20 and len(remedy) > 10, kind
