"""`swerve bench`: every bench is found, measures, and says under what load."""

import argparse
import json
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

import swerve.cli.benches
from swerve.cli.benches import model
from swerve.cli.benches._sides import Side, peer_python, start_side
from swerve.cli.main import main
from swerve.types import MachineError, SwerveError


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


@pytest.mark.slow
def test_our_side_measures_both_parts(capsys):
    words = ["bench", "model", "--json", "--rows", "2", "--row-length", "64", "--repetitions", "1"]
    assert main([*words, "--precision", "float32"]) == 0
    figures = {figure["name"]: figure["value"] for figure in json.loads(capsys.readouterr().out)["figures"]}
    assert figures["forward+backward, float32, swerve: loss"] == pytest.approx(7.6, abs=0.3)
    assert figures["forward+backward, float32, swerve: compilation"] > 0
    assert any(name.startswith("prefill, float32, swerve") for name in figures)
