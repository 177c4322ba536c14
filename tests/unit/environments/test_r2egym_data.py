"""Rows of the dataset become task files, and such files tasks; whatever is wrong is named by file, line and key."""

import hashlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hub_server import COMMIT, REPOSITORY, Hub, serve
from swerve.cli.composition import read_tasks
from swerve.cli.main import main
from swerve.config.schema import Tasks
from swerve.environments import load_split, load_tasks, save_tasks
from swerve.environments.identity import identity_path, verify_identity, write_identity
from swerve.environments.r2egym import R2EGymEnvironment
from swerve.environments.r2egym.convert import convert
from swerve.environments.r2egym.gold import gold_files, gold_patch
from swerve.environments.r2egym.harness import counts, summary_statuses
from swerve.types import Limits, SwerveError

from .r2egym_samples import EXPECTED, MENDED, row

FIXES = [f"{number:040x}" for number in range(1, 6)]
IDS = [f"tinycalc__{fix}" for fix in FIXES]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl", [row(fix=fix) for fix in FIXES])


def lists(directory: Path, train: list[str], validation: list[str]) -> dict[str, Path]:
    paths = {}
    for split, names in (("train", train), ("validation", validation)):
        paths[split] = directory / f"{split}.txt"
        paths[split].write_text("# ids\n" + "\n".join(names) + "\n\n")
    return paths


def converted(rows: Path, train: list[str], validation: list[str], name: str = "out") -> list[Path]:
    directory = rows.parent / name
    return [file.path for file in convert([rows], lists(rows.parent, train, validation), directory)]


def edited(path: Path, change: Any) -> Path:
    """The file with its first line changed."""
    first, *others = path.read_text().splitlines(keepends=True)
    line = json.loads(first)
    change(line)
    path.write_text(json.dumps(line) + "\n" + "".join(others))
    return path


def test_rows_become_task_files_in_the_order_of_the_lists(rows: Path) -> None:
    paths = converted(rows, [IDS[3], IDS[0], IDS[2]], [IDS[4], IDS[1]])
    train, validation = load_split(*paths)
    assert [task.id for task in train] == [IDS[3], IDS[0], IDS[2]]
    assert [task.id for task in validation] == [IDS[4], IDS[1]]
    task = train[0]
    assert (task.family, task.image, task.base_commit, task.workspace) == ("r2egym", IDS[3], "b" * 40, {})
    assert task.fail_to_pass == ("TestMean.test_mean", "TestMean.test_names[a.b]", "TestMean.test_names[c")
    assert task.pass_to_pass == ("test_known_fault", "test_service", "test_total")
    assert task.expected_statuses == {"test_known_fault": "failed", "test_service": "error"}
    assert task.limits == Limits(max_turns=30, episode_timeout_s=1800.0, command_timeout_s=60.0, test_timeout_s=60.0)
    assert R2EGymEnvironment([task]).gold_work(task) == {"tinycalc/sums.py": MENDED}


def test_the_shape_is_the_references(rows: Path) -> None:
    path, _ = converted(rows, IDS[:1], IDS[1:2])
    line = json.loads(path.read_text())
    assert line["agent_ref"].keys() == {"type", "name"}
    metadata = line["responses_create_params"]["metadata"]
    assert list(metadata) == [
        "base_commit", "dataset_name", "instance_dict", "instance_id", "problem_statement", "split"
    ]  # fmt: skip
    assert all(isinstance(value, str) for value in metadata.values())
    assert json.loads(metadata["instance_dict"]) == row(fix=FIXES[0]) | {"instance_id": IDS[0]}
    assert metadata["problem_statement"] == row()["problem_statement"]


def test_bytes_are_reproducible_and_task_files_are_rows_again(rows: Path) -> None:
    first = converted(rows, IDS[:2], IDS[2:4])
    second = converted(rows, IDS[:2], IDS[2:4], "again")
    from_tasks = convert(first, lists(rows.parent, IDS[:2], IDS[2:4]), rows.parent / "third")
    for one, two, three in zip(first, second, from_tasks, strict=True):
        assert one.read_bytes() == two.read_bytes() == three.path.read_bytes()


def test_tasks_survive_swerves_own_format(rows: Path, tmp_path: Path) -> None:
    path, _ = converted(rows, IDS[:1], IDS[1:2])
    save_tasks(tmp_path / "own.jsonl.xz", load_tasks(path))
    assert load_tasks(tmp_path / "own.jsonl.xz") == load_tasks(path)


@pytest.mark.parametrize(
    "name",
    [
        f"tinycalc-{FIXES[0]}",
        f"tinycalc_final_{FIXES[0]}",
        f"tinycalc_final-{FIXES[0]}",
        f"Some_Org__TinyCalc-{FIXES[0]}",
    ],
)
def test_rows_answer_to_the_names_in_use(rows: Path, name: str) -> None:
    path, _ = converted(rows, [name], IDS[1:2])
    assert load_tasks(path)[0].id == name


def test_what_the_recorded_run_does_not_tell_is_not_taken_for_passing(rows: Path) -> None:
    silent = json.dumps({"old_commit_res_stdout": None})
    write_rows(rows, [row(fix=FIXES[0], execution_result_content=silent), row(fix=FIXES[1])])
    task = load_tasks(converted(rows, IDS[:1], IDS[1:2])[0])[0]
    assert set(task.fail_to_pass) == {name for name, status in expected().items() if status == "PASSED"}


def expected() -> dict[str, str]:
    return {name.split(" - ")[0]: status for name, status in EXPECTED.items()}


@pytest.mark.parametrize(
    ("train", "validation", "told"),
    [
        ([IDS[0], IDS[0]], [IDS[1]], r"train.txt:3: id '.*' is already on line 2"),
        ([IDS[0]], [IDS[1], IDS[0]], r"is in .*train.txt and in .*validation.txt"),
        ([IDS[0], "absent__1", "absent__2"], [IDS[1]], r"rows.jsonl: no rows for absent__1, absent__2$"),
        ([IDS[0]], [f"tinycalc-{FIXES[0]}"], r"is already that of .*rows.jsonl:1|stand for the same row"),
        ([], [IDS[1]], r"train.txt: holds no ids"),
    ],
)
def test_lists_at_fault(rows: Path, train: list[str], validation: list[str], told: str) -> None:
    with pytest.raises(SwerveError, match=told):
        converted(rows, train, validation)
    assert not (rows.parent / "out").exists()


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in row(fix=FIXES[0]).items() if name != key}


@pytest.mark.parametrize(
    ("record", "told"),
    [
        (without("expected_output_json"), r":1: key expected_output_json: missing"),
        (row(fix=FIXES[0], surprise=1), r":1: key surprise: unknown; known are repo_name, "),
        (row(fix=FIXES[0], problem_statement=7), r":1: key problem_statement: expected a string, found 7"),
        (row(fix=FIXES[0], modified_files=7), r":1: key modified_files: expected a list or a string, found 7"),
        (row(fix=FIXES[0], expected_output_json="{"), r":1: key expected_output_json: no JSON"),
        (row(fix=FIXES[0], expected_output_json="{}"), r":1: key expected_output_json: expected an object"),
        (row(fix=FIXES[0], expected_output_json='{"t": "OK"}'), r':1: key expected_output_json.t: "OK" is none of P'),
        (row(fix=FIXES[0], expected_output_json='{"t": "FAILED"}'), r":1: key expected_output_json: no test passes"),
        (row(fix=FIXES[0], execution_result_content="{}"), r"execution_result_content.old_commit_res_stdout: missing"),
        (row(fix=FIXES[0], parsed_commit_content='{"old_commit_hash": "b"}'), r"_content.file_diffs: missing"),
        (
            row(fix=FIXES[0], parsed_commit_content='{"old_commit_hash": "b", "file_diffs": [{"header": {}}]}'),
            r"parsed_commit_content.file_diffs\[0\].old_file_content: missing",
        ),
        (row(fix=FIXES[0], commit_hash="head"), r":1: key commit_hash: 'head' is no commit"),
        ([1], r":1: not a JSON object"),
    ],
)  # fmt: skip
def test_rows_at_fault_are_named_by_file_line_and_key(rows: Path, record: Any, told: str) -> None:
    write_rows(rows, [record, row(fix=FIXES[1])])
    with pytest.raises(SwerveError, match=f"rows.jsonl.*{told}"):
        converted(rows, IDS[:1], IDS[1:2])


def meta(line: dict[str, Any]) -> dict[str, Any]:
    return line["responses_create_params"]["metadata"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda line: meta(line).pop("instance_dict"), r"metadata.instance_dict: missing"),
        (lambda line: meta(line).update(split="later"), r"metadata.split: 'later' is none of train, validation"),
        (lambda line: meta(line).update(extra="x"), r"metadata.extra: unknown"),
        (lambda line: meta(line).update(instance_dict={}), r"metadata.instance_dict: expected a string, found {}"),
        (lambda line: meta(line).update(dataset_name="SWE-bench"), r"metadata.dataset_name: 'SWE-bench'"),
        (lambda line: meta(line).update(instance_id="other"), r"instance_dict.instance_id: is not other"),
        (lambda line: line["responses_create_params"].pop("metadata"), r"responses_create_params.metadata: missing"),
        (lambda line: line.update(agent_ref={"type": "x"}), r"agent_ref.name: missing"),
        (lambda line: line.update(more=1), r"more: unknown"),
        (
            lambda line: meta(line).update(instance_dict=meta(line)["instance_dict"].replace('"repo_name"', '"r"')),
            r"metadata.instance_dict.r: unknown",
        ),
    ],
)
def test_task_files_at_fault_are_named_by_file_line_and_key(rows: Path, change: Any, told: str) -> None:
    path = edited(converted(rows, IDS[:2], IDS[2:3])[0], change)
    with pytest.raises(SwerveError, match=f"r2egym_train.jsonl:1: .*{told}"):
        load_tasks(path)


def test_ids_that_cannot_name_a_file_are_refused(rows: Path) -> None:
    def rename(line: dict[str, Any]) -> None:
        meta(line)["instance_id"] = "../../etc/x"
        meta(line)["instance_dict"] = meta(line)["instance_dict"].replace(IDS[0], "../../etc/x")

    path = edited(converted(rows, IDS[:1], IDS[1:2])[0], rename)
    with pytest.raises(SwerveError, match="names its image's file"):
        load_tasks(path)


# ------------------------------------------------------------------------------------------------ identity


def test_a_file_is_held_against_its_identity(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"{}\n\n{}\n")
    identity = write_identity(path)
    assert (identity.rows, identity.bytes) == (2, 7)
    assert identity.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert verify_identity(path) == identity
    for data, told in (
        (b"{}\n{}\n{}\n", "rows is 3, expected 2"),
        (b"{}\n{}\n", "bytes is 6, expected 7"),
        (b"{}\n\n[]\n", f"sha256 is .*, expected {identity.sha256}"),
    ):
        path.write_bytes(data)
        with pytest.raises(SwerveError, match=told):
            verify_identity(path)


def test_a_run_holds_its_task_files_against_their_identities(rows: Path) -> None:
    train, validation = converted(rows, IDS[:2], IDS[2:4])
    section = Tasks(family="files", train_file=str(train), validation_file=str(validation))
    assert [len(tasks) for tasks in (read_tasks(section).train, read_tasks(section).validation)] == [2, 2]
    validation.write_text(validation.read_text() + "\n")
    with pytest.raises(SwerveError, match=r"r2egym_validation.jsonl: bytes is \d+, expected \d+ by"):
        read_tasks(section)
    identity_path(validation).unlink()
    assert len(read_tasks(section).validation) == 2


def test_downloaded_rows_become_task_files(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    out = tmp_path / "rows"
    with serve(Hub(files={"data/train.jsonl": rows.read_bytes(), "README.md": b"..."})) as hub:
        words = [REPOSITORY, "--revision", COMMIT, "--out", str(out), "--endpoint", hub.url, "--include", "data/*"]
        assert main(["tasks", "download", *words]) == 0
    assert sorted(path.name for path in out.rglob("*") if path.is_file()) == [
        "download.json",
        "train.jsonl",
        "train.jsonl.identity.json",
    ]
    assert verify_identity(out / "data/train.jsonl").rows == 5
    ids = lists(tmp_path, IDS[:2], IDS[2:4])
    chosen = [
        "--train-ids",
        str(ids["train"]),
        "--validation-ids",
        str(ids["validation"]),
        "--out",
        str(tmp_path / "a"),
    ]
    capsys.readouterr()
    assert main(["tasks", "import", str(out / "data/train.jsonl"), *chosen, "--json"]) == 0
    assert [file["rows"] for file in json.loads(capsys.readouterr().out)] == [2, 2]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, "no such identity file"),
        ("{", "no JSON"),
        ('{"rows": 1, "bytes": 1}', "key sha256: missing"),
        ('{"rows": "1", "bytes": 1, "sha256": ""}', "key rows: expected an integer"),
        ('{"rows": 1, "bytes": 1, "sha256": "", "md5": ""}', "key md5: unknown"),
    ],
)
def test_identities_at_fault(tmp_path: Path, text: str | None, told: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text("{}\n")
    if text is not None:
        identity_path(path).write_text(text)
    with pytest.raises(SwerveError, match=told):
        verify_identity(path)


def test_the_commands(rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = lists(rows.parent, IDS[:3], IDS[3:])
    out = rows.parent / "out"
    words = ["--train-ids", str(paths["train"]), "--validation-ids", str(paths["validation"]), "--out", str(out)]
    assert main(["tasks", "import", str(rows), *words, "--json"]) == 0
    files = json.loads(capsys.readouterr().out)
    assert [(file["path"], file["rows"]) for file in files] == [
        (str(out / "r2egym_train.jsonl"), 3), (str(out / "r2egym_validation.jsonl"), 2)
    ]  # fmt: skip
    train = files[0]["path"]
    assert main(["tasks", "verify", train, "--read-only", "--identity"]) == 0
    assert "3 tasks read" in capsys.readouterr().out
    Path(train).write_text(Path(train).read_text().replace("too small", "too large"))
    assert main(["tasks", "verify", train, "--read-only", "--identity"]) == 2
    assert f"sha256 is {hashlib.sha256(Path(train).read_bytes()).hexdigest()}, expected" in capsys.readouterr().err
    other = f"{files[1]['path']}.identity.json"
    assert main(["tasks", "verify", train, "--read-only", "--identity", other]) == 2
    assert "rows is 3, expected 2" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- parquet


def test_parquet_needs_pyarrow_and_says_so(rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    rows = rows.rename(rows.with_suffix(".parquet"))
    with pytest.raises(SwerveError, match=r"rows.parquet: needs pyarrow to be read: pip install 'swerve\[parquet\]'"):
        converted(rows, IDS[:1], IDS[1:2])


@pytest.mark.skipif(importlib.util.find_spec("pyarrow") is None, reason="NOT TESTED: pip install 'swerve[parquet]'")
def test_parquet_and_json_lines_give_the_same_files(rows: Path) -> None:
    pyarrow, parquet = __import__("pyarrow"), importlib.import_module("pyarrow.parquet")
    table = pyarrow.Table.from_pylist([row(fix=fix) for fix in FIXES])
    parquet.write_table(table, rows.with_suffix(".parquet"))
    first = converted(rows, IDS[:2], IDS[2:4])
    second = converted(rows.with_suffix(".parquet"), IDS[:2], IDS[2:4], "again")
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]
    rows.with_suffix(".parquet").write_bytes(b"PAR1 cut short")
    with pytest.raises(SwerveError, match="is no parquet file"):
        converted(rows.with_suffix(".parquet"), IDS[:1], IDS[1:2])


# ------------------------------------------------------------------------------------ the fix, and test logs


def change(path: str, before: str, after: str, minus: str = "", plus: str = "") -> dict[str, Any]:
    return {
        "header": {"file": {"path": path}},
        "old_file_content": before,
        "new_file_content": after,
        "minus_file": {"path": minus or f"a/{path}"},
        "plus_file": {"path": plus or f"b/{path}"},
    }


def test_a_patch_holds_whole_files_and_git_applies_it(tmp_path: Path) -> None:
    files = [
        change("a.py", "1\n2\n-- 3\n++ 4\n5\n", "1\n2\n++ 4\n5\n6"),
        change("new.py", "", "--- x\n+++ y\n", minus="/dev/null"),
        change("gone.py", "x\n", "", plus="/dev/null"),
        change("moved.py", "m\n", "m\nn\n", minus="a/old.py"),
        change("end.txt", "no end", "no end\n"),
        change("empty.py", "", "", minus="/dev/null"),
        change("tests/test_a.py", "secret\n", "other\n"),
        change("setup.cfg", "[x]\n", "[y]\n"),
    ]
    patch = gold_patch({"file_diffs": files})
    assert gold_files(patch, "task") == {
        "a.py": "1\n2\n++ 4\n5\n6",
        "new.py": "--- x\n+++ y\n",
        "gone.py": None,
        "old.py": None,
        "moved.py": "m\nn\n",
        "end.txt": "no end\n",
        "empty.py": "",
    }
    before = {"a.py": "1\n2\n-- 3\n++ 4\n5\n", "gone.py": "x\n", "old.py": "m\n", "end.txt": "no end"}
    for name, text in before.items():
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "apply", "-"], input=patch, text=True, cwd=tmp_path, check=True)
    found = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert found == {name: text for name, text in gold_files(patch, "task").items() if text is not None}
    with pytest.raises(SwerveError, match="task 1: key gold_patch: not a unified diff"):
        gold_files("nonsense\n", "task 1")
    with pytest.raises(SwerveError, match=r"task 1: key gold_patch: line \d+ of the patch: the hunk has other lines"):
        gold_files("".join(gold_patch({"file_diffs": files[:1]}).splitlines(keepends=True)[:-3]), "task 1")


@pytest.mark.parametrize(
    ("path", "is_work"),
    [
        ("numpy/core/a.py", True),
        ("numpy/testing/utils.py", True),
        ("data.bin", True),
        ("numpy/tests/helper.py", False),
        ("test_x.py", False),
        ("a/x_test.py", False),
        ("a/conftest.py", False),
        ("r2e_tests/x.py", False),
        ("run_tests.sh", False),
        (".git/config", False),
        (".venv/lib/x.py", False),
        ("a/sitecustomize.py", False),
        ("a.egg-info/PKG-INFO", False),
        ("x.pth", False),
        ("pyproject.toml", False),
    ],
)
def test_what_counts_as_work(path: str, is_work: bool) -> None:
    assert counts(path) is is_work


def test_a_summary_is_read_strictly() -> None:
    log = (
        "FAILED r2e_tests/test_1.py::test_before_the_summary\n"
        "=== short test summary info ===\n"
        "\x1b[32mPASSED\x1b[0m r2e_tests/test_1.py::\x1b[1mTestA::test_a\x1b[0m\r\n"
        "SKIPPED [1] r2e_tests/test_1.py:3: PASSED elsewhere\n"
        "XFAIL r2e_tests/test_1.py::test_x\n"
        "FAILED r2e_tests/test_1.py::test_b[x - y] - AssertionError: PASSED\n"
        "ERROR r2e_tests/test_2.py - ImportError\n"
        " PASSED r2e_tests/test_1.py::test_indented\n"
        "PASSEDr2e_tests/test_1.py::test_glued\n"
    )
    assert summary_statuses(log) == {"TestA.test_a": "passed", "test_b[x": "failed", "": "error"}
    assert summary_statuses("nothing at all") == {}
