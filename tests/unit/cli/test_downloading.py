"""`download` of models and datasets, from the words of the command line to files that other commands read."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from hub_server import COMMIT, REPOSITORY, Fault, Hub, serve
from swerve.cli.main import main
from swerve.config.directories import TINY_POLICY

NAMES = ("config.json", "model.safetensors", "tokenizer.json")


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    files = {name: (TINY_POLICY / name).read_bytes() for name in NAMES}
    with serve(Hub(files=files, large={"model.safetensors"})) as served:
        yield served


def test_a_model_is_downloaded_inspected_and_verified(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.token = "secret"
    monkeypatch.setenv("HF_TOKEN", "secret")
    hub.faults["model.safetensors"] = [Fault(drop_after=1_000_000)]
    out = tmp_path / "model"
    words = ["checkpoint", "download", REPOSITORY, "--revision", "main", "--out", str(out), "--endpoint", hub.url]
    assert main([*words, "--json"]) == 0
    done = capsys.readouterr()
    size = sum((TINY_POLICY / name).stat().st_size for name in NAMES)
    facts = {"path": str(out), "source": f"models/{REPOSITORY}", "revision": COMMIT, "files": 3, "bytes": size}
    assert json.loads(done.out) == {**facts, "fetched": 3, "fetched_bytes": size, "faults": []}
    assert done.err.splitlines() == [
        f"models/{REPOSITORY}: main is {COMMIT}",
        "model.safetensors: the connection was dropped after 1000000 of 4794680 bytes: again in 0.5 s (1 of 8)",
    ]
    assert main(["checkpoint", "inspect", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fault"] == ""
    assert main(words) == 0
    assert capsys.readouterr().out == (f"{out}: 3 files, 4.89 MB, models/{REPOSITORY} at {COMMIT}: 0 fetched (0 B)\n")
    hub.asked.clear()
    assert main(["checkpoint", "download", "--verify", "--out", str(out)]) == 0
    assert capsys.readouterr().out.endswith(": 0 at fault\n")
    with (out / "model.safetensors").open("r+b") as file:
        file.seek(2_000_000)
        file.write(b"????")
    assert main(["checkpoint", "download", "--verify", "--out", str(out)]) == 2
    assert capsys.readouterr().out.startswith(f"{out}/model.safetensors: sha256 is ")
    assert hub.asked == []


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["a/b"], "swerve: download a/b: name a commit with --revision; main takes and records today's"),
        ([], "swerve: download: name either ORG/NAME or --manifest FILE"),
        (["a/b", "--manifest", "m"], "swerve: download: name either ORG/NAME or --manifest FILE"),
        (["a/../b", "--revision", "main"], "swerve: a/../b: no name of a repository: expected ORG/NAME"),
        (["a/b", "--revision", "main", "--endpoint", "ftp://h"], "swerve: --endpoint 'ftp://h': expected a URL"),
        (["a/b", "--revision", "main", "--workers", "0"], "swerve: --workers 0: must be at least 1"),
        (["a/b", "--revision", "main", "--retries", "0"], "swerve: --retries 0: must be at least 1"),
        (
            ["--manifest", "m", "--endpoint", "https://h"],
            "swerve: --endpoint is of ORG/NAME: leave it out with --manif",
        ),
        (["--manifest", "none.json"], "swerve: none.json: cannot be read: No such file or directory"),
        (["--manifest", "m", "--revision", "main"], "swerve: --revision main: of a manifest it is its SHA-256"),
        (["a/b", "--verify"], "swerve: --verify goes by download.json alone: leave ORG/NAME out"),
        (["--verify", "--workers", "2"], "swerve: --verify goes by download.json alone: leave --workers out"),
        (["--verify"], "download.json: no such file: the folder is not one that was downloaded"),
    ],
)
def test_words_that_do_not_fit_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], told: str
) -> None:
    assert main(["tasks", "download", *words, "--out", str(tmp_path / "out")]) == 2
    assert told in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
