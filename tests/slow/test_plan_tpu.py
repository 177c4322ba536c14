"""Plans for real TPU topologies, with libtpu and without a TPU, in the environment that `make tpu` makes."""

import json
import os
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = Path(os.environ.get("SWERVE_TPU_PYTHON", ROOT / ".venv-tpu" / "bin" / "python"))
MESH = {"fsdp": 4, "expert": 2}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.usefixtures("as_users_run")]


def run(*words, cwd=ROOT, **environment):
    if not PYTHON.exists():
        pytest.fail(f"{PYTHON} is missing: run make tpu")
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "slow")])
    return subprocess.run(
        [PYTHON, *words], cwd=cwd, env={**os.environ, "PYTHONPATH": path, **environment}, capture_output=True, text=True
    )


def plan(name, topology, mesh=None, budget_mib=8192, tier="full"):
    script = str(ROOT / "tests" / "slow" / "tpu_programs.py")
    done = run(script, name, topology, json.dumps(mesh or MESH), str(budget_mib), tier)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("topology", ["tpu7x:2x2x1", "v5p:2x2x2"])
def test_what_is_emitted_is_what_was_asked_for(topology):
    found = plan("small_step", topology)
    assert found["fits"]
    micro = found["programs"]["micro_batch"]
    for key in ("collectives", "collectives_asked_for"):
        micro[key] = sorted((c["kind"], c["axes"], c["count"]) for c in micro[key])
    assert micro["collectives"] == micro["collectives_asked_for"]
    assert micro["notes"] == micro["bad_lowerings"] == []
    assert micro["compile"]["code_bytes"] > 0
    assert micro["memory_bytes"]["activations"] == 6 * 65536 // 8 * 256 * 2  # inputs of six layers, in bf16
    assert sum(micro["memory_bytes"].values()) == pytest.approx(micro["total_mib"] * 2**20, abs=2**19)


def test_the_quick_tier_finds_the_memory_of_the_full_one():
    full, quick = (plan("small_step", "tpu7x:2x2x1", tier=tier) for tier in ("full", "quick"))
    for name, program in full["programs"].items():
        assert quick["programs"][name]["memory_bytes"] == program["memory_bytes"]
        assert quick["programs"][name]["collectives"] == program["collectives"]
        assert quick["programs"][name]["compile"]["code_bytes"] is None


def test_what_does_not_fit_is_a_verdict():
    roomy = plan("large_step", "tpu7x:2x2x1", tier="quick")
    assert roomy["fits"]
    tight = plan("large_step", "tpu7x:2x2x1", budget_mib=roomy["total_mib"] // 2, tier="full")
    assert not tight["fits"]
    assert "RESOURCE_EXHAUSTED" in tight["programs"]["micro_batch"]["out_of_memory"]
    assert tight["total_mib"] > tight["budget_mib"]


@pytest.mark.parametrize("topology", ["tpu7x:2x2x1", "v5p:2x2x2", "v6e:2x4"])
def test_the_kernels_of_the_model_compile(topology):
    found = plan("kernel_programs", topology)
    assert found["fits"]
    for program in found["programs"].values():
        assert program["compile"]["code_bytes"] > 0
        assert program["bad_lowerings"] == []
    # Forward, and the gradients by rows and by weights, each once over every pair's row; nothing dense over experts.
    works = found["programs"]["experts"]["flops_by_source"]
    pairs, weights = 2048 * 4, 3 * 512 * 256
    assert sum(work["flops"] for work in works if "route" not in work["source"]) == 3 * 2 * pairs * weights


def test_the_gradient_of_a_ragged_product_is_called_dense():
    program = plan("ragged_programs", "tpu7x:2x2x1", tier="quick")["programs"]["product"]
    (line,) = program["bad_lowerings"]
    assert "dense masked convolution over all 16 groups" in line


def test_gathers_over_the_whole_mesh_are_found_to_be_reductions():
    mesh = {"fsdp": 128, "expert": 2}
    program = plan("whole_mesh_gathers", "tpu7x:4x4x8", mesh, tier="quick")["programs"]["product"]
    (line,) = program["bad_lowerings"]
    assert line == "1 x all_gather over fsdp, expert became 1 all-reduce, which moves twice the bytes"


def test_the_benchmark_cell_fits_in_the_time_and_memory_that_a_laptop_has(tmp_path):
    recipe = ROOT / "recipes" / "mlperf" / "qwen35_397b_gbs1024_v7x128.toml"
    began = time.monotonic()
    words = ("-m", "swerve.cli", "plan", str(recipe), "--topology", "tpu7x:4x4x8", "--json", "--no-cache")
    done = run(*words, cwd=tmp_path)
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["total_mib"] <= found["budget_mib"] == 84_992
    micro = found["programs"]["micro_batch"]
    assert not [line for line in micro["bad_lowerings"] if "ragged_dot" in line]
    assert 0 < micro["reference_flops"] < micro["flops"]
    compiles = [program["compile"] for program in found["programs"].values()]
    assert max(each["peak_rss_bytes"] for each in compiles) < 8e9
    assert sum(each["cpu_seconds"] for each in compiles) < 240, f"{seconds:.0f} s of wall clock"
    assert list(tmp_path.iterdir()) == []
