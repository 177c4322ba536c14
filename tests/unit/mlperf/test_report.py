"""A report says how long runs took by which definition, and shows runs that failed as such."""

import json
import re
from html.parser import HTMLParser

import pytest

from swerve.mlperf.figures import parts_of_time
from swerve.mlperf.read_log import read_log
from swerve.mlperf.report import collect_runs, group_runs, make_report, run_names
from swerve.mlperf.run_summary import olympic_mean, summarize
from swerve.types import SwerveError

from .logs import START_MS, STEP_MS, line, write_log


def summary(path, **options):
    return summarize(read_log(write_log(path, **options)))


def test_times_of_a_run_by_their_definitions(tmp_path):
    """19 steps of 60 s, of which 50 are logged, and two evaluations of 30 s; the second one passes."""
    run = summary(tmp_path / "a.log", accuracies=(0.6, 0.7))
    assert (run.outcome, run.global_batch_size, run.seed, run.notes) == ("converged", 256, 1, ())
    assert (run.score_s, run.train_to_target_s, run.samples_to_target) == (19 * 60, 19 * 60, 19 * 256)
    assert (run.evaluation_s, run.evaluation_in_score_s) == (60, 0)
    inline = summary(tmp_path / "b.log", accuracies=(0.6, 0.7), backdated=False)
    assert (inline.score_s, inline.train_to_target_s, inline.evaluation_in_score_s) == (19 * 60 + 60, 19 * 60, 60)
    early = summary(tmp_path / "c.log", accuracies=(0.7, 0.6))
    assert (early.samples_to_target, early.train_to_target_s) == (18 * 256, 18 * 60)


def test_logged_step_times_are_reconciled_with_the_wall(tmp_path):
    run = summary(tmp_path / "a.log", accuracies=(0.7,))
    gap = run.gap
    assert (gap.wall_s, gap.logged_s, gap.num_logged_steps) == (18 * 60, 18 * 50, 18)
    assert (gap.gap_s, gap.share) == (180, pytest.approx(1 / 6))
    assert (gap.first_step_s, gap.between_s, gap.after_s) == (10, 170, 0)
    assert [step.wall_s for step in run.steps] == [60] * 18
    assert run.steps[0].parts_s == {
        "policy_training_time": 20,
        "exposed_generation_time": 25,
        "weight_sync_time": 2,
    }
    assert sum(parts_of_time(run).values()) == pytest.approx(run.score_s)
    # The last step logs no time, as in the published logs.
    path = tmp_path / "a.log"
    kept = [text for text in path.read_text().splitlines() if "train_step_time" not in text or '"step": 18' not in text]
    path.write_text("\n".join(kept) + "\n")
    run = summarize(read_log(path))
    gap = run.gap
    assert run.num_steps == 18
    assert (gap.num_logged_steps, gap.first_step_s, gap.between_s, gap.after_s) == (17, 10, 160, 60)
    assert gap.gap_s == gap.first_step_s + gap.between_s + gap.after_s


def test_a_run_stop_dated_back_is_the_update_itself(tmp_path):
    """Statistics are logged after the update, and three steps are trained beyond the one that passes."""
    path = write_log(tmp_path / "a.log", accuracies=(0.7, 0.7, 0.7), status=None)
    lines = [text for text in path.read_text().splitlines() if "eval_" not in text or '"samples_count": 4608' in text]
    update = START_MS + 60_000 + 18 * STEP_MS - 2_000
    lines.append(line("run_stop", None, update, "INTERVAL_END", status="success", samples_count=4608, step=18))
    path.write_text("\n".join(lines) + "\n")
    run = summarize(read_log(path))
    assert (run.score_s, run.train_to_target_s, run.evaluation_in_score_s) == (18 * 60 - 2, 18 * 60 - 2, 0)
    assert (run.num_steps, run.gap.wall_s) == (20, 20 * 60)


def test_runs_that_failed_are_said_to_have(tmp_path):
    aborted = summary(tmp_path / "a.log", accuracies=(0.5,), status="aborted")
    assert (aborted.outcome, aborted.score_s, aborted.train_to_target_s) == ("aborted", None, None)
    waiting = summary(tmp_path / "b.log", accuracies=(), status=None)
    assert (waiting.outcome, waiting.notes) == ("unfinished", ("trained, not evaluated to the end",))
    claimed = summary(tmp_path / "c.log", accuracies=(0.5,))
    assert claimed.notes == ("says success, and no accuracy reaches 0.69",)
    path = write_log(tmp_path / "d.log")
    lines = path.read_text().splitlines()
    end = next(place for place, text in enumerate(lines) if '"step": 4}' in text)
    path.write_text("\n".join(lines[:end]) + "\n" + lines[end][:50])
    torn = summarize(read_log(path))
    assert (torn.outcome, len(torn.steps)) == ("unfinished", 3)
    assert torn.notes == (f"last line (line {end + 1}) is torn",)
    assert (torn.gap.wall_s, torn.gap.after_s) == (180, 0)
    path.write_text(line("seed", float("nan")) + "\n" + line("tracked_stats", 3, step=1) + "\n")
    empty = summarize(read_log(path))
    assert (empty.outcome, empty.seed, empty.steps, empty.gap) == ("no run", None, (), None)


def test_the_olympic_mean_leaves_out_the_best_and_the_worst():
    assert olympic_mean([1, 9, 4]) == 4
    assert olympic_mean([1, 9, 4, 6]) == 5
    assert olympic_mean([1, None, 4]) == 4
    assert olympic_mean([1, None, None]) is None
    assert olympic_mean([1, 2]) is None


class _Page(HTMLParser):
    """Text, addresses, and whether every element is closed."""

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """A report of runs of all kinds: the folder it was written to, and what it says."""
    folder = tmp_path_factory.mktemp("report")
    for number, size in enumerate((256, 256, 256, 512)):
        write_log(folder / "logs" / f"GBS{size}" / f"run_{number}.out", seed=number, gbs=size)
    write_log(folder / "logs" / "GBS512" / "<b>.out", gbs=512, status="aborted", accuracies=(0.5,))
    write_log(folder / "logs" / "waiting.log", gbs=512, status=None, changes={"global_batch_size": None})
    (folder / "logs" / "notes.txt").write_text("not a log\n")
    (folder / "logs" / "weights.bin").write_bytes(b"\0" * 8 + b":::MLLOG ")
    return folder / "out", make_report([folder / "logs"], folder / "out")


def test_a_report_is_one_page_its_pictures_and_json(drawn):
    out, told = drawn
    pictures = {"accuracy", "gap", "loss", "reward", "step_time", "time_to_target"}
    assert {path.stem for path in out.glob("*.png")} == pictures
    for path in out.glob("*.png"):
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG")
        width = int.from_bytes(data[16:20])
        assert 850 <= width <= 950
    page = _Page()
    page.feed((out / "report.html").read_text())
    assert page.open == []
    assert len(page.addresses) == len(pictures)
    assert all(address.startswith("data:image/png;base64,") for address in page.addresses)
    for words in ("6 runs, 4 converged", "aborted", "unfinished", "GBS512/<b>.out", "waiting.log", "olympic mean"):
        assert words in page.text
    assert "viewport" in (out / "report.html").read_text()
    assert json.loads((out / "report.json").read_text()) == json.loads(json.dumps(told))


def test_groups_are_batch_sizes_with_their_olympic_mean(drawn):
    told = {group["global_batch_size"]: group for group in drawn[1]["groups"]}
    assert list(told) == [256, 512, None]
    assert (told[256]["converged"], told[256]["olympic_score_s"]) == (3, 19 * STEP_MS / 1000)
    assert (told[512]["converged"], told[512]["runs"], told[512]["olympic_score_s"]) == (1, 2, None)
    assert told[256]["mean_step_time_s"] == 50
    assert told[256]["mean_exposed_generation_time_s"] == 25


def test_logs_and_folders_mix_and_count_once(tmp_path):
    one = write_log(tmp_path / "a" / "one.log")
    write_log(tmp_path / "b" / "two.log")
    runs = collect_runs([one, tmp_path / "a", tmp_path / "b" / "two.log"])
    assert sorted(run_names(runs).values()) == ["a/one.log", "b/two.log"]
    assert run_names(runs[:1]) == {one: "one.log"}
    assert [group.global_batch_size for group in group_runs(runs)] == [256]
    with pytest.raises(SwerveError, match=re.escape("no log in it")):
        (tmp_path / "empty").mkdir()
        collect_runs([tmp_path / "empty"])
