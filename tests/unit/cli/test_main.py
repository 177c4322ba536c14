"""The command line answers fast, in one line where something is wrong, and with the right exit code."""

import json
import os
import resource
import signal
import subprocess
import sys

import pytest

from swerve.cli import machine, registry
from swerve.cli import main as cli_main
from swerve.cli.commands import doctor
from swerve.cli.main import main
from swerve.sandboxes.probe import Finding
from swerve.types import MachineError


def run(capsys, *words):
    code = main(words)
    return code, *capsys.readouterr()


def test_help_lists_every_command_and_imports_none(capsys):
    code, out, _ = run(capsys, "--help")
    assert code == 0
    for name, command in registry.commands().items():
        assert f"  {name}" in out
        assert command.summary in out
    assert run(capsys)[1] == out
    probe = "import sys; from swerve.cli.main import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60, check=True)
    loaded = set(done.stderr.split())
    assert not loaded & {"jax", "numpy", "rich", "tensorboardX", "tokenizers"}
    assert not any(name.startswith("swerve.cli.commands.") for name in loaded)


@pytest.mark.parametrize("name", registry.commands())
def test_every_command_has_a_summary_and_help(capsys, name):
    assert 10 < len(registry.commands()[name].summary) < 90
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0
    assert f"swerve {name}" in capsys.readouterr().out


def test_help_takes_less_than_half_a_second():
    """Measured in processor time, which neighbours on a busy machine do not stretch as they do the wall's."""

    def seconds():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "swerve.cli", "--help"], capture_output=True, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.5


def test_version(capsys):
    code, out, _ = run(capsys, "--version")
    assert (code, out.count(".")) == (0, 2)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["cofig"], "swerve: unknown command cofig; did you mean config?"),
        (["qqq"], "swerve: unknown command qqq; see swerve --help"),
        (["config"], "swerve config: the following arguments are required: {show,check,diff}; see swerve config"),
        (["config", "show", "recipes/none.toml"], "swerve: recipes/none.toml: no such recipe"),
        (
            ["config", "show", "r", "--rollout.num_slot", "3"],
            "swerve config: unknown argument --rollout.num_slot; did ",
        ),
        (["checkpoint", "list", "none"], "swerve: none: no such directory: name a run directory, a checkpoint of one"),
        (["checkpoint", "digest", "recipes"], "swerve: recipes: holds no checkpoint: name a run directory"),
        (["checkpoint", "export", "recipes"], "swerve checkpoint export: name the directory to write with --out DIR"),
        (["tasks", "mint", "--family", "mini", "--num-train", "0"], "swerve: --num-train 0: must be at least 1"),
        (["tasks", "stats", "recipes"], "swerve: recipes: cannot be read: Is a directory"),
        (["tasks", "stats", "pyproject.toml"], "swerve: pyproject.toml:1: not a JSON object"),
        (
            ["tasks", "show", "mini.0700.sum_square", "--tasks", "mini"],
            "swerve: no task mini.0700.sum_square in --tasks mini; there is, for example, mini.0700.sum_squares",
        ),
        (["rollout", "mini.0700.sum_square", "--tasks.family", "mini"], "swerve: no task mini.0700.sum_square in /"),
        (["rollout", "first", "--recipe", "recipes"], "swerve: recipes: cannot be read: Is a directory"),
        (["eval", "recipes/tiny_pretrain.toml"], 'swerve: recipes/tiny_pretrain.toml: kind = "pretrain": this comm'),
        (["doctor", "--jsn"], "swerve doctor: unknown argument --jsn; did you mean --json?"),
    ],
)
def test_a_fault_of_the_input_is_one_line_and_exit_code_2(capsys, words, line):
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    assert err.startswith(line)
    assert err.count("\n") == 1


class Failing:
    description = "Fail."

    def __init__(self, error):
        self.error = error

    def load(self):
        return self

    def add_arguments(self, parser):
        pass

    def run(self, arguments):
        raise self.error


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (MachineError("disk full"), 1, "swerve: disk full\n"),
        (KeyboardInterrupt(), 130, "swerve: interrupted\n"),
        (ValueError("a\nb"), 1, "swerve: internal error: ValueError: a b in _dispatch, main.py:"),
    ],
)
def test_faults_of_the_machine_and_of_swerve(capsys, monkeypatch, error, code, line):
    monkeypatch.setattr(cli_main, "commands", lambda: {"fail": Failing(error)})
    got, out, err = run(capsys, "fail")
    assert (got, out) == (code, "")
    assert err.startswith(line)
    assert err.count("\n") == 1
    main(["fail", "--debug"])
    assert "Traceback" in capsys.readouterr().err


def test_termination_runs_every_finally(tmp_path):
    code = f"""
import time
from pathlib import Path
from swerve.cli import main as cli_main
class Waiting:
    description = "Wait."
    def load(self): return self
    def add_arguments(self, parser): pass
    def run(self, arguments):
        try:
            print("ready", flush=True)
            time.sleep(60)
        finally:
            Path({str(tmp_path / "left")!r}).write_text("clean")
cli_main.commands = lambda: {{"wait": Waiting()}}
raise SystemExit(cli_main.main(["wait"]))
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 143
    assert (tmp_path / "left").read_text() == "clean"


def test_a_reader_that_leaves_is_no_error():
    code = f"{sys.executable} -m swerve.cli config show recipes/demo.toml | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_doctor_reports_and_remedies(capsys):
    code, out, _ = run(capsys, "doctor", "--json")
    findings = {finding["name"]: finding for finding in json.loads(out)["findings"]}
    assert {"python", "cores", "memory", "disk", "user namespaces", "cgroups", "bubblewrap"} <= set(findings)
    assert {"sandbox", "apptainer", "docker", "accelerators"} <= set(findings)
    assert code == int(any(finding["required"] and not finding["ok"] for finding in findings.values()))
    for finding in findings.values():
        assert finding["detail"]
        assert finding["ok"] or finding["remedy"], finding


def test_the_doctor_shows_remedies_below_what_is_missing(capsys, monkeypatch):
    missing = Finding(name="disk", ok=False, required=True, detail="full", remedy="make room")
    optional = Finding(name="docker", ok=False, required=False, detail="none", remedy="install it")
    monkeypatch.setattr(doctor, "_looks", lambda: [lambda: missing, lambda: optional])
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert [line.split() for line in out.splitlines()] == [
        ["disk", "MISSING", "full"],
        ["->", "make", "room"],
        ["docker", "-", "none"],
        ["->", "install", "it"],
    ]


def test_cores_are_those_of_this_process():
    assert machine.find_cores().detail.startswith(f"{len(os.sched_getaffinity(0))} cores")


def test_a_dry_run_says_what_samples_and_several_workers_need_an_engine_each(capsys, tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text(
        'kind = "train"\n[tasks]\nfamily = "mini"\n[engine]\nkind = "vllm"\n'
        'urls = ["http://node1:8000", "http://node2:8000"]\nweights_directory = "/shared/weights"\n'
    )
    for command in ("train", "eval"):
        code, out, _ = run(capsys, command, str(recipe), "--dry-run")
        assert code == 0
        assert (
            "vLLM at http://node1:8000, http://node2:8000, that run already, 64 slots of 512 tokens; "
            "weights by reload from /shared/weights\n" in out
        )
    code, _, err = run(capsys, "eval", str(recipe), "--manifest", "m.jsonl", "--workers", "2")
    assert code == 2
    assert "--workers 2: the servers of engine.urls hold one policy at a time: remove it" in err
