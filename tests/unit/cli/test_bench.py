"""`swerve bench`: every bench is found, measures, and says under what load."""

import json
from pathlib import Path

import swerve.cli.benches
from swerve.cli.main import main


def test_the_sandbox_bench_measures_all_it_promises(capsys):
    words = [
        "bench",
        "sandbox",
        "--json",
        "--starts",
        "4",
        "--gradings",
        "2",
        "--concurrency",
        "2",
        "--held",
        "3",
        "--hold-s",
        "0",
    ]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)
    figures = {figure["name"]: figure for figure in told["figures"]}
    assert {"grading, pytest", "grading, direct calls", "create, overlay, write, destroy"} <= set(figures)
    assert figures["alive of 3 held for 0 s"]["value"] == 3
    assert 0 < figures["memory per live sandbox, a shell in it"]["value"] < 64
    assert all(figure["load"] >= 0 and figure["seconds"] > 0 for figure in told["figures"])


def test_every_bench_has_a_summary_and_help(capsys):
    names = [path.stem for path in Path(swerve.cli.benches.__file__).parent.glob("[!_]*.py")]
    assert "sandbox" in names
    assert main(["bench", "nothing"]) == 2
