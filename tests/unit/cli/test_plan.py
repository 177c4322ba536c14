"""`swerve plan` on simulated devices: numbers, verdicts, and what is refused."""

import json
import sys

import pytest

from swerve.cli.main import main
from swerve.models import Qwen35MoeConfig

MODEL = Qwen35MoeConfig(
    vocab_size=64,
    hidden_size=32,
    num_hidden_layers=2,
    full_attention_interval=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
)

RECIPE = """\
kind = "train"

[packing]
row_length = 4096
rows_per_micro_batch = 2

[mesh]
fsdp = 2
context = 2

[execution]
layers = "scan"
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.setenv("SWERVE_CACHE_DIR", str(tmp_path / "cache"))
    (tmp_path / "config.json").write_text(json.dumps(MODEL.to_hf()))
    path = tmp_path / "recipe.toml"
    path.write_text(RECIPE + f'\n[policy]\ncheckpoint = "{tmp_path}"\n')
    return path


def plan(capsys, *words):
    code = main(["plan", *map(str, words)])
    return code, *capsys.readouterr()


def test_a_recipe_is_planned_and_its_verdict_is_the_exit_code(capsys, recipe):
    code, out, err = plan(capsys, recipe, "--topology", "cpu:4", "--json", "--budget-mib", "2")
    assert code == 1, err
    found = json.loads(out)
    assert not found["fits"]
    assert found["total_mib"] > found["budget_mib"] == 2
    assert found["mesh"] == {"fsdp": 2, "context": 2, "expert": 1, "tensor": 1}
    micro, update = found["programs"]["micro_batch"], found["programs"]["update"]
    memory = micro["memory_bytes"]
    # Adam keeps two moments, and gradients are float32 as these parameters are.
    assert memory["optimizer"] == pytest.approx(2 * memory["parameters"], rel=1e-3)
    assert memory["gradients"] == pytest.approx(memory["parameters"], rel=1e-2)
    assert memory["activations"] > 0
    assert update["memory_bytes"]["activations"] == 0
    assert 0 < micro["reference_flops"] < micro["flops"]
    assert {"all_gather", "reduce_scatter", "permute"} <= {each["kind"] for each in micro["collectives"]}
    assert "micro_batch: reading what the compiler wrote" in err


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ([], "the following arguments are required: --topology"),
        (["--topology", "v7x:4x4x8"], "v7x is not a known accelerator; known: tpu7x, v6e, v5p, v5e, cpu"),
        (["--topology", "cpu:8"], "fsdp 2 x context 2 x expert 1 x tensor 1 is 4 devices, and cpu:8 has 8"),
        (["--topology", "cpu:4", "--budget-mib", "0"], "budget_mib must be a positive number, not 0"),
        (["--topology", "cpu:4", "--mesh.fspd", "2"], "did you mean --mesh.fsdp?"),
        (["--topology", "cpu:4", "--packing.rows_per_micro_batch", "3"], "rows_per_micro_batch"),
        (["--topology", "tpu7x:2x1x1"], "no compiler for TPUs here; pip install 'swerve[tpu]'"),
    ],
)
def test_what_cannot_be_planned_is_one_line(capsys, monkeypatch, recipe, words, wanted):
    monkeypatch.setitem(sys.modules, "libtpu", None)  # as if it were not installed
    code, out, err = plan(capsys, recipe, *words)
    assert (code, out) == (2, "")
    assert wanted in err
    assert len(err.strip().splitlines()) == 1
