"""The cases leave no field of the configuration and no layout of the files unexercised, and stay small."""

import dataclasses
import json

from safetensors import safe_open

from swerve import models
from swerve.models.hf import read_config

from .cases import CASES, GOLDENS

RECORDED_ONLY = {"initializer_range", "max_position_embeddings"}
"""Fields that no computation of the model reads."""


def test_every_field_takes_several_values() -> None:
    configs = [read_config(GOLDENS / case) for case in CASES]
    names = {field.name for field in dataclasses.fields(models.Qwen35MoeConfig)}
    assert names > RECORDED_ONLY
    same = {name for name in names if len({getattr(config, name) for config in configs}) == 1}
    assert same <= RECORDED_ONLY


def test_ratios_and_shares_that_matter_occur() -> None:
    configs = [read_config(GOLDENS / case) for case in CASES]
    assert {c.num_attention_heads // c.num_key_value_heads for c in configs} >= {1, 2, 4}
    assert any(c.num_key_value_heads == 1 < c.num_attention_heads for c in configs)
    assert {c.linear_num_value_heads // c.linear_num_key_heads for c in configs} >= {1, 2, 4}
    assert all(c.linear_key_head_dim != c.linear_value_head_dim for c in configs)
    assert {c.partial_rotary_factor for c in configs} >= {0.25, 0.5, 1.0}
    assert {c.linear_conv_kernel_dim for c in configs} >= {2, 3, 4}
    assert {c.full_attention_interval for c in configs} >= {2, 3, 4}
    assert {c.num_experts_per_tok for c in configs} >= {1, 2}
    assert any(c.num_experts_per_tok == c.num_experts for c in configs)


def test_the_files_have_the_layouts_that_the_cases_name() -> None:
    layouts = set()
    for name, case in CASES.items():
        with safe_open(GOLDENS / name / "model.safetensors", framework="numpy") as reader:
            tensors = set(reader.keys())
        raw = json.loads((GOLDENS / name / "config.json").read_text())
        assert any("experts.gate_up_proj" in tensor for tensor in tensors) == case.fused
        assert any(".experts.0." in tensor for tensor in tensors) != case.fused
        assert ("text_config" in raw) == case.nested == any(tensor.startswith("mtp.") for tensor in tensors)
        layouts.add((case.fused, case.nested, case.config["tie_word_embeddings"]))
    assert all(len(values) == 2 for values in map(set, zip(*layouts, strict=True)))


def test_the_golden_files_are_small() -> None:
    assert {path.name for path in GOLDENS.iterdir()} == set(CASES)
    assert sum(path.stat().st_size for path in GOLDENS.rglob("*") if path.is_file()) < 1.5e6
