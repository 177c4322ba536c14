"""Hugging Face files: bit-exact there and back, every published layout, refusals by name."""

import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from swerve import models
from swerve.models.hf import read_dtypes
from swerve.types import MachineError, SwerveError

from .samples import CONFIG, make_params


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    models.save_hf(tmp_path / "m", CONFIG, make_params())
    return tmp_path / "m"


def rewrite(path: Path, change: Any) -> None:
    tensors = load_file(path / "model.safetensors")
    save_file({k: np.ascontiguousarray(v) for k, v in change(tensors).items()}, path / "model.safetensors")


def test_float32_comes_back_as_it_went(tmp_path: Path) -> None:
    models.save_hf(tmp_path, CONFIG, models.unstack_blocks(make_params()), dtype="float32")
    config, params = models.load_hf(tmp_path)
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, params, make_params())


def test_bfloat16_files_are_written_back_bit_for_bit(saved: Path, tmp_path: Path) -> None:
    config, params = models.load_hf(saved)
    models.save_hf(tmp_path / "again", config, params, dtypes=read_dtypes(saved))
    for name in ("config.json", "model.safetensors"):
        assert (saved / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert {read_dtypes(saved)[f"model.layers.0.linear_attn.{n}"] for n in ("A_log", "dt_bias")} == {
        "float32",
        "bfloat16",
    }


def unfuse(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    out: dict[str, np.ndarray] = {}
    for name, value in tensors.items():
        base = name.removesuffix("gate_up_proj").removesuffix("down_proj")
        if ".experts." not in name:
            out[name] = value
            continue
        for expert, own in enumerate(value):
            if name.endswith("down_proj"):
                out[f"{base}{expert}.down_proj.weight"] = own
            else:
                gate, up = np.split(own, 2)
                out[f"{base}{expert}.gate_proj.weight"], out[f"{base}{expert}.up_proj.weight"] = gate, up
    return out


def with_prefix(prefix: str) -> Any:
    def change(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        renamed = {k.replace("model.", prefix, 1) if k.startswith("model.") else k: v for k, v in tensors.items()}
        return renamed | {"mtp.layers.0.x": np.zeros(3, np.float32), "model.visual.y": np.zeros(2, np.float32)}

    return change


@pytest.mark.parametrize("change", [unfuse, with_prefix("model.language_model."), with_prefix("language_model.model.")])
def test_published_layouts_are_read(saved: Path, change: Any) -> None:
    _, expected = models.load_hf(saved)
    rewrite(saved, change)
    jax.tree.map(np.testing.assert_array_equal, models.load_hf(saved)[1], expected)


def test_sharded_files_and_nested_configurations_are_read(saved: Path) -> None:
    _, expected = models.load_hf(saved)
    tensors = load_file(saved / "model.safetensors")
    names = sorted(tensors)
    for part, own in enumerate((names[::2], names[1::2]), 1):
        save_file({n: tensors[n] for n in own}, saved / f"model-0000{part}-of-00002.safetensors")
    (saved / "model.safetensors").unlink()
    flat = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({"model_type": "qwen3_5_moe", "text_config": flat}))
    config, params = models.load_hf(saved)
    assert config == CONFIG
    jax.tree.map(np.testing.assert_array_equal, params, expected)


NORM, EXPERTS = "model.layers.1.input_layernorm.weight", "model.layers.0.mlp.experts."


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: {k: v for k, v in t.items() if k != NORM}, f"missing tensor {NORM}"),
        (lambda t: t | {"model.layers.1.odd": t[NORM]}, "unknown tensor model.layers.1.odd"),
        (lambda t: t | {NORM: t[NORM][:-1]}, f"tensor {NORM} has shape \\(15,\\)"),
        (
            lambda t: {k: v for k, v in unfuse(t).items() if k != f"{EXPERTS}2.up_proj.weight"},
            f"missing tensor {EXPERTS}2.up_proj.weight",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(saved: Path, change: Any, message: str) -> None:
    rewrite(saved, change)
    with pytest.raises(SwerveError, match=message):
        models.load_hf(saved)


def test_damaged_and_missing_files_are_one_clear_line(saved: Path) -> None:
    (saved / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(SwerveError, match="damaged"):
        models.load_hf(saved)
    (saved / "model.safetensors").unlink()
    with pytest.raises(SwerveError, match=r"no \*.safetensors"):
        models.load_hf(saved)
    (saved / "config.json").write_text("{")
    with pytest.raises(SwerveError, match="not JSON"):
        models.load_hf(saved)
    with pytest.raises(SwerveError, match="cannot be read"):
        models.load_hf(saved / "nowhere")


def test_a_place_that_cannot_be_written_is_the_machines_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"file/config\.json: cannot be written: "):
        models.save_hf(tmp_path / "file", CONFIG, make_params())


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640)])
def test_files_have_the_permissions_the_umask_grants(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        models.save_hf(tmp_path, CONFIG, make_params())
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {
        "config.json": mode,
        "model.safetensors": mode,
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": None}, "missing hidden_size"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"layer_types": ["full_attention"] * 4}, "layer_types"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok"),
        ({"rope_parameters": {"partial_rotary_factor": 2.0}}, "partial_rotary_factor"),
    ],
)
def test_configurations_that_cannot_be_built_are_refused(change: dict[str, Any], message: str) -> None:
    raw = {k: v for k, v in (CONFIG.to_hf() | change).items() if v is not None}
    with pytest.raises(SwerveError, match=message):
        models.Qwen35MoeConfig.from_hf(raw)
