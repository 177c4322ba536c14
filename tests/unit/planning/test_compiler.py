"""Compiling in a process of its own, on simulated devices: the whole path without an accelerator's compiler."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from swerve.planning import Job, Options, make_plan, parse_topology, run_job
from swerve.planning.compiler import check_compiler
from swerve.types import MachineError, SwerveError

from . import programs_under_test as small

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    """Children find the programs under test; cache and temporary files are the test's own."""
    before = psutil.Process().children()  # sandboxes that other tests of this process share
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), *filter(None, sys.path)]))
    monkeypatch.setenv("SWERVE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    yield
    assert list((tmp_path / "temporary").iterdir()) == []
    assert [child for child in psutil.Process().children() if child not in before] == []


def job(programs="step_programs", budget_mib=8192, **mesh):
    return Job(
        recipe="",
        topology="cpu:8",
        mesh=mesh or {"fsdp": 4, "expert": 2},
        programs=f"programs_under_test:{programs}",
        budget_mib=budget_mib,
    )


def test_a_step_is_planned_and_known_the_next_time():
    said = []
    results = run_job(job(), Options(), said.append)
    description, compiled = results["micro_batch"]
    layers = 4 * small.LAYERS * small.WIDTH * small.WIDTH  # bytes
    assert dict(description.argument_bytes) == {
        "parameters": layers / 4,
        "gradients": layers / 4,
        "batch": small.ROWS / 8 * small.WIDTH * 4,
    }
    assert description.donated_bytes == layers / 4
    once = 2 * small.LAYERS * small.ROWS / 8 * small.WIDTH**2
    assert {(work.source, work.direction): work.flops for work in description.costs.work} == {
        ("mixer", "forward"): once,
        ("mixer", "recomputed"): once,
        ("mixer", "backward"): 2 * once,
    }
    # What was emitted is what was asked for: loops multiply, kinds, axes and bytes agree.
    assert set(compiled.emitted.collectives) == set(description.costs.collectives)
    assert compiled.memory.argument_bytes == sum(description.argument_bytes.values())
    # Layer inputs, kept from the forward to the backward pass, are alive at the peak or before it.
    assert compiled.memory.total_bytes > compiled.memory.argument_bytes
    plan = make_plan(parse_topology("cpu:8"), job().mesh, False, results)
    assert plan.fits
    assert plan.programs["micro_batch"].memory_bytes["optimizer"] == layers / 4

    again = run_job(job(), Options(), said.append)
    assert all(compiled.cached for _, compiled in again.values())
    assert {name: result[0] for name, result in again.items()} == {name: result[0] for name, result in results.items()}
    assert [line for line in said if line.startswith("micro_batch: known")]


def test_a_full_plan_generates_code():
    (_, compiled) = run_job(job("update_program"), Options(full=True, use_cache=False), lambda line: None)["update"]
    assert compiled.code_bytes is not None
    assert not compiled.cached


def test_a_state_larger_than_the_budget_is_refused_before_compiling():
    with pytest.raises(SwerveError, match="--budget-mib 0: parameters, gradients and optimizer alone need more"):
        run_job(job(budget_mib=0), Options(), lambda line: None)


def test_a_program_that_fails_says_why_in_one_line():
    with pytest.raises(MachineError, match="describe: the compiling process failed: RuntimeError: no such model"):
        run_job(job("broken_programs"), Options(), lambda line: None)


def test_a_time_limit_ends_it():
    with pytest.raises(MachineError, match=r"not done after .* raise --time-limit-s"):
        run_job(job(), Options(time_limit_s=0.3), lambda line: None)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_plan_leaves_no_process(number, tmp_path):
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))\n"
        "from swerve.planning import Job, Options, run_job\n"
        f"run_job(Job(**{ {field: getattr(job(), field) for field in Job.__slots__}!r}), Options(),"
        " lambda line: print(line, flush=True))\n"
    )
    planner = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert planner.stdout.readline().startswith("describe: tracing")
    children = psutil.Process(planner.pid).children()
    assert children
    planner.send_signal(number)
    planner.communicate(timeout=30)
    _, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    if number == signal.SIGKILL:  # files are all that may stay behind then
        for path in (tmp_path / "temporary").iterdir():
            subprocess.run(["rm", "-r", path], check=True)


def test_without_a_compiler_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "libtpu", None)  # as if it were not installed
    with pytest.raises(SwerveError, match=r"tpu7x:2x2x1: no compiler for TPUs here; pip install 'swerve\[tpu\]'"):
        check_compiler(parse_topology("tpu7x:2x2x1"))
    check_compiler(parse_topology("cpu:8"))
