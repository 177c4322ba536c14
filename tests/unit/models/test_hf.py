"""Hugging Face files: bit-exact there and back, every published layout, refusals by name."""

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from swerve import models, parallel
from swerve.checkpoint.tensor_files import file_order, header_bytes
from swerve.models import hf
from swerve.models.hf import read_dtypes
from swerve.models.hf.layout import hf_layout
from swerve.models.hf.writer import index_json, plan_files
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
    again = hf.from_hf_tensors(CONFIG, hf.to_hf_tensors(CONFIG, params))
    jax.tree.map(np.testing.assert_array_equal, again, make_params())


def test_bfloat16_files_are_written_back_bit_for_bit(saved: Path, tmp_path: Path) -> None:
    config, params = models.load_hf(saved)
    models.save_hf(tmp_path / "again", config, params, dtypes=read_dtypes(saved))
    for name in ("config.json", "model.safetensors"):
        assert (saved / name).read_bytes() == (tmp_path / "again" / name).read_bytes()
    assert {read_dtypes(saved)[f"model.layers.0.linear_attn.{n}"] for n in ("A_log", "dt_bias")} == {
        "float32",
        "bfloat16",
    }


@pytest.mark.parametrize("experts", ["fused", "each"])
@pytest.mark.parametrize("prefix", ["model.", "model.language_model.", "language_model.model."])
def test_every_layout_that_is_read_is_written(saved: Path, tmp_path: Path, experts: hf.Experts, prefix: str) -> None:
    config, params = models.load_hf(saved)
    layout: dict[str, Any] = {"experts": experts, "prefix": prefix, "max_shard_bytes": 8_000}
    models.save_hf(tmp_path / "a", config, params, **layout)
    index = json.loads((tmp_path / "a" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))
    assert len(files) > 3
    assert sorted(set(index["weight_map"].values())) == files
    assert {name for name in index["weight_map"] if "experts.3.up_proj" in name} == (
        {f"{prefix}layers.{layer}.mlp.experts.3.up_proj.weight" for layer in range(4)} if experts == "each" else set()
    )
    jax.tree.map(np.testing.assert_array_equal, models.load_hf(tmp_path / "a")[1], params)
    found = hf.open_model(tmp_path / "a")
    assert (found.form, found.experts, found.prefix) == ("hf", experts, prefix)
    assert all(size < 8_000 + 12_000 for size in found.sizes.values())
    models.save_hf(tmp_path / "a", config, params)  # the files of the model that it replaces go
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["config.json", "model.safetensors"]
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()


def test_types_are_those_asked_for(saved: Path) -> None:
    expected = models.load_hf(saved)[1]
    asked: dict[Any, str] = {"float32": "float32", "bfloat16": "bfloat16", "checkpoint": "bfloat16"}
    for dtype, others in asked.items():
        params = models.load_hf(saved, dtype=dtype)[1]
        types = {name: str(value.dtype) for name, value in parallel.flatten_names(params).items()}
        kept = ("A_log",) if dtype == "checkpoint" else ("A_log", "router")
        assert types == {name: "float32" if name.endswith(kept) else others for name in types}
        jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.float32(x), y), params, expected)
    rewrite(saved, lambda t: t | {NORM: t[NORM].astype(np.float16)})
    models.load_hf(saved)
    with pytest.raises(SwerveError, match=rf"{NORM} \(float16\) and .* \(bfloat16\) have different types"):
        models.load_hf(saved, dtype="checkpoint")


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
        return renamed | {
            "mtp.layers.0.mlp.experts.0.x": np.zeros(3, np.int8),
            "model.visual.y": np.zeros(2, np.float32),
        }

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


@pytest.mark.parametrize(
    ("name", "cast", "shown"),
    [(NORM, "float8_e4m3fn", "F8_E4M3"), (f"{EXPERTS}gate_up_proj", "int32", "I32")],
)
def test_types_that_are_not_read_are_refused_by_name(saved: Path, name: str, cast: str, shown: str) -> None:
    rewrite(saved, lambda t: t | {name: t[name].astype(cast), f"{name}_scale_inv": np.ones(1, np.float32)})
    with pytest.raises(SwerveError, match=f"tensor {name} is {shown}, and only BF16, F16, F32 are read"):
        models.load_hf(saved)


def test_other_parts_are_skipped_with_one_line(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    models.load_hf(saved)
    assert caplog.messages == []
    rewrite(saved, with_prefix("model."))
    models.load_hf(saved)
    assert caplog.messages == [
        f"{saved}: skipped 2 tensors that the text model does not use, for example model.visual.y"
    ]


def shard(path: Path) -> dict[str, Any]:
    """Write a model anew as several files; their index."""
    config, params = models.load_hf(path)
    models.save_hf(path, config, params, max_shard_bytes=10_000)
    return json.loads((path / "model.safetensors.index.json").read_text())


def test_an_index_is_honoured(saved: Path) -> None:
    index = shard(saved)
    files = sorted(set(index["weight_map"].values()))
    own = {name for name, file in index["weight_map"].items() if file == files[1]}
    kept = load_file(saved / files[1])

    def refused(message: str) -> None:
        with pytest.raises(SwerveError, match=f"^{saved}[^ ]*: {message}"):
            models.load_hf(saved)

    (saved / files[1]).unlink()
    refused(f"missing file {files[1]}, in which the index has tensor {min(own)}")
    save_file({name: value for name, value in kept.items() if name != max(own)}, saved / files[1])
    refused(f"missing tensor {max(own)}, which the index has in {files[1]}")
    save_file(kept | {"model.odd": np.zeros(1, np.float32)}, saved / files[1])
    refused(f"{files[1]} holds tensor model.odd, which the index does not have there")
    save_file(kept, saved / files[1])
    models.load_hf(saved)
    save_file({NORM: np.zeros(16, np.float32)}, saved / "stray.safetensors")
    refused(f"stray.safetensors holds tensor {NORM}, which the index does not have there")
    (saved / "stray.safetensors").unlink()
    for weight_map, message in (({}, "it has no weight_map"), ({NORM: "../x"}, "weight_map has '../x' for tensor")):
        (saved / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
        refused(message)


def test_tensors_that_are_there_twice_are_refused(saved: Path) -> None:
    save_file({NORM: np.zeros(16, np.float32)}, saved / "other.safetensors")
    with pytest.raises(SwerveError, match=f"tensor {NORM} is in model.safetensors and in other.safetensors"):
        models.load_hf(saved)
    (saved / "other.safetensors").unlink()
    rewrite(saved, lambda t: t | {NORM.replace("model.", "model.language_model."): t[NORM]})
    with pytest.raises(SwerveError, match=f"{NORM.removeprefix('model.')} is there twice, with different prefixes"):
        models.load_hf(saved)


def test_eight_hundred_gigabytes_are_refused_at_once(tmp_path: Path) -> None:
    """Files of the size of the 397B model's, all holes, with one tensor that is a row short."""
    config = dataclasses.replace(
        CONFIG,
        **{"vocab_size": 248_320, "hidden_size": 4096, "num_hidden_layers": 60, "full_attention_interval": 4},
        **{"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 1024},
        **{"head_dim": 256, "num_attention_heads": 32, "linear_key_head_dim": 128, "linear_num_key_heads": 16},
        **{"linear_value_head_dim": 128, "linear_num_value_heads": 64, "shared_expert_intermediate_size": 1024},
    )
    layout = dict(hf_layout(config))
    short = "model.layers.59.mlp.experts.down_proj"
    layout[short] = layout[short]._replace(shape=(512, 4096, 1023))
    files = plan_files("model", layout, dict.fromkeys(layout, "BF16"), 5_000_000_000)
    for file in files:
        head = header_bytes(file_order(file.tensors))
        (tmp_path / file.name).write_bytes(head)
        os.truncate(tmp_path / file.name, len(head) + file.num_bytes)
    (tmp_path / "model.safetensors.index.json").write_text(index_json(files))
    (tmp_path / "config.json").write_text(json.dumps(config.to_hf()))
    before = time.process_time()
    with pytest.raises(SwerveError, match=rf"tensor {short} has shape \(512, 4096, 1023\), the config asks for"):
        models.load_hf(tmp_path)
    facts = hf.describe(hf.open_model(tmp_path))
    assert facts["bytes"] > 790e9
    assert facts["dtypes"]["BF16"]["tensors"] == len(layout)
    assert short in facts["fault"]
    assert time.process_time() - before < 5


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


def test_a_model_that_is_half_replaced_is_none(saved: Path) -> None:
    index = shard(saved)
    config, params = models.load_hf(saved)
    blocked = saved / max(index["weight_map"].values())
    blocked.unlink()
    blocked.mkdir()
    with pytest.raises(MachineError, match=f"{blocked.name}: cannot be written"):
        models.save_hf(saved, config, jax.tree.map(np.zeros_like, params), max_shard_bytes=10_000)
    assert (saved / min(index["weight_map"].values())).is_file()
    with pytest.raises(SwerveError, match=r"config\.json: cannot be read"):
        models.load_hf(saved)
    blocked.rmdir()
    models.save_hf(saved, config, params, max_shard_bytes=10_000)
    jax.tree.map(np.testing.assert_array_equal, models.load_hf(saved)[1], params)


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
