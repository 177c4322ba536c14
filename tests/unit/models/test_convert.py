"""Conversion between layouts keeps every bit in little memory; loading reads what a mesh's devices hold."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from swerve import models, parallel
from swerve.checkpoint import tensor_files
from swerve.checkpoint.storage import Directory
from swerve.cli.main import main
from swerve.models import hf
from swerve.models.hf import writer
from swerve.types import SwerveError
from swerve.weights import digest

from .large_checkpoint import make_config, round_trip, same_files, write_random
from .samples import CONFIG, make_params

SHARD_BYTES = 300_000
HERE = Path(__file__).resolve().parent


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes small tensors be cut as large ones are."""
    monkeypatch.setattr(writer, "_CHUNK_BYTES", 20_000)
    monkeypatch.setattr(tensor_files, "_BLOCK_BYTES", 30_000)
    monkeypatch.setattr(tensor_files, "_RUN_BYTES", 1000)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    models.save_hf(tmp_path / "m", CONFIG, make_params())
    return tmp_path / "m"


@pytest.fixture
def memory() -> Iterator[str]:
    yield "memory://bucket"
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.parametrize(("prefix", "experts"), [("model.", "fused"), ("model.language_model.", "each")])
def test_there_and_back_every_byte_is_the_same(tmp_path: Path, prefix: str, experts: hf.Experts) -> None:
    write_random(tmp_path / "hf", make_config(1), max_shard_bytes=SHARD_BYTES, prefix=prefix, experts=experts)
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    round_trip(tmp_path, SHARD_BYTES)
    assert same_files(tmp_path / "hf", tmp_path / "again")


@pytest.mark.slow
def test_a_gigabyte_is_converted_in_the_memory_of_two_tensors(tmp_path: Path) -> None:
    program = [sys.executable, str(HERE / "large_checkpoint.py"), str(tmp_path), "16", "300000000"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=1800, check=True)
    found = json.loads(done.stdout)
    print(found)
    assert found["same"]
    assert found["bytes"] > 1e9
    assert found["peak"] < 2 * found["largest"]


def test_the_forms_are_those_of_the_parameters(saved: Path, tmp_path: Path) -> None:
    config, params = models.load_hf(saved, dtype="checkpoint")
    files = hf.open_model(saved)
    for form in ("scanned", "unscanned"):
        hf.convert(files, tmp_path / form, to=form)
    scanned = hf.open_model(tmp_path / "scanned")
    assert {name: tensor.shape for name, tensor in scanned.stored.items()} == {
        name: value.shape for name, value in writer.parallel.flatten_names(params).items()
    }
    assert scanned.form == "scanned"
    blocks = models.unstack_blocks(params)["blocks"]
    unscanned = hf.open_model(tmp_path / "unscanned").stored
    assert unscanned["blocks.1.delta.0.mixer.q"].shape == blocks[1]["delta"][0]["mixer"]["q"].shape
    assert unscanned["blocks.1.attention.mixer.q"].shape == blocks[1]["attention"]["mixer"]["q"].shape
    for path in (tmp_path / "scanned", tmp_path / "unscanned"):
        again = models.load_hf(path, dtype="checkpoint")
        assert (again[0], digest(again[1])) == (config, digest(params))


def test_layouts_are_chosen_and_remembered(saved: Path, tmp_path: Path) -> None:
    (saved / "tokenizer.json").write_text("{}")
    hf.convert(hf.open_model(saved), tmp_path / "a", experts="each", prefix="language_model.model.")
    found = hf.open_model(tmp_path / "a")
    assert (found.experts, found.prefix) == ("each", "language_model.model.")
    raw = json.loads((tmp_path / "a" / "config.json").read_text()) | {"kept": 1}
    (tmp_path / "a" / "config.json").write_text(json.dumps(raw))
    hf.convert(hf.open_model(tmp_path / "a"), tmp_path / "b", to="scanned")
    hf.convert(hf.open_model(tmp_path / "b"), tmp_path / "c")
    assert same_files(tmp_path / "a", tmp_path / "c")
    assert (tmp_path / "c" / "tokenizer.json").read_text() == "{}"
    hf.convert(hf.open_model(tmp_path / "c"), tmp_path / "d", experts="fused", prefix="model.")
    assert (tmp_path / "d" / "model.safetensors").read_bytes() == (saved / "model.safetensors").read_bytes()
    assert models.load_hf(tmp_path / "d")[0] == CONFIG


def test_types_that_differ_between_layers_are_not_stacked(saved: Path, tmp_path: Path) -> None:
    config, params = models.load_hf(saved)
    norm = "model.layers.0.input_layernorm.weight"
    models.save_hf(saved, config, params, dtypes={norm: "float32"})
    with pytest.raises(SwerveError, match=rf"{norm} \(float32\) and .* \(bfloat16\) have different types, and would"):
        hf.convert(hf.open_model(saved), tmp_path / "s", to="scanned")
    assert not (tmp_path / "s").exists()
    hf.convert(hf.open_model(saved), tmp_path / "u", to="unscanned")


class Stop(Exception):
    """Ends a conversion."""


def test_an_interrupted_conversion_is_no_model_and_goes_on(tmp_path: Path) -> None:
    config = make_config(1)
    write_random(tmp_path / "hf", config, max_shard_bytes=SHARD_BYTES, prefix="model.", experts="fused")
    source, target = hf.open_model(tmp_path / "hf"), tmp_path / "s"

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise Stop

    options: dict[str, Any] = {"to": "scanned", "max_shard_bytes": SHARD_BYTES}
    with pytest.raises(Stop):
        hf.convert(source, target, progress=stop, **options)
    with pytest.raises(SwerveError, match=r"config\.json: cannot be read"):
        models.load_hf(target)
    whole = list(target.glob("*.safetensors"))
    (target / ".params-00009-of-00009.safetensors.123.tmp").write_bytes(b"torn")
    with pytest.raises(SwerveError, match="holds an unfinished conversion of something else"):
        hf.convert(source, target, to="unscanned", max_shard_bytes=SHARD_BYTES)
    before = {path: path.stat().st_mtime_ns for path in whole}
    made = hf.convert(source, target, **options)
    assert 0 < made.kept == len(whole) < made.files
    assert {path: path.stat().st_mtime_ns for path in whole} == before
    hf.convert(source, tmp_path / "other", **options)
    assert same_files(target, tmp_path / "other")
    with pytest.raises(SwerveError, match=r"not empty \(it holds config.json\)"):
        hf.convert(source, target, **options)


def test_models_lie_behind_urls(saved: Path, memory: str) -> None:
    config, params = models.load_hf(saved)
    models.save_hf(f"{memory}/a", config, params, max_shard_bytes=10_000)
    found = hf.open_model(f"{memory}/a")
    assert len(found.sizes) > 3
    hf.convert(found, f"{memory}/b", to="scanned", max_shard_bytes=10_000)
    hf.convert(hf.open_model(f"{memory}/b"), f"{memory}/c")
    for place in "abc":
        again = models.load_hf(f"{memory}/{place}")
        assert (again[0], digest(again[1])) == (config, digest(params))
        assert hf.read_config(f"{memory}/{place}") == config
    content = MemoryFileSystem.store["/bucket/c/model.safetensors"].getvalue()
    assert content == (saved / "model.safetensors").read_bytes()
    with pytest.raises(SwerveError, match=rf"{memory}/none/config\.json: cannot be read: no such file"):
        models.load_hf(f"{memory}/none")


class Counted:
    """A directory that counts the bytes read of tensors."""

    def __init__(self, inner: Directory) -> None:
        self.inner, self.count = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        self.count += len(out)
        self.inner.read_into(name, start, out)


@pytest.mark.parametrize("experts", ["fused", "each"])
def test_a_part_of_the_experts_is_read_alone(tmp_path: Path, experts: hf.Experts) -> None:
    write_random(tmp_path, make_config(4), max_shard_bytes=10**9, prefix="model.", experts=experts)
    found = hf.open_model(tmp_path)
    directory = Counted(found.directory)
    source = dataclasses.replace(found, directory=directory).source()
    whole = source.read("blocks.1.attention.moe.gate_up")
    assert whole.shape == (16, 256, 2, 256)
    directory.count = 0
    part = source.read("blocks.1.attention.moe.gate_up", [(3, 5), (0, 256), (0, 2), (128, 256)])
    assert np.array_equal(tensor_files.bits(part), tensor_files.bits(whole[3:5, :, :, 128:]))
    assert directory.count == part.nbytes


@pytest.mark.parametrize("shape", [parallel.MeshShape(context=2, expert=2), parallel.MeshShape(fsdp=4)], ids=str)
def test_the_devices_of_a_mesh_get_the_same_bits(saved: Path, tmp_path: Path, shape: parallel.MeshShape) -> None:
    hf.convert(hf.open_model(saved), tmp_path / "each", experts="each", max_shard_bytes=10_000)
    hf.convert(hf.open_model(saved), tmp_path / "scanned", to="scanned")
    places = models.parameter_shardings(CONFIG, shape.make())
    for path in (saved, tmp_path / "each", tmp_path / "scanned"):
        for dtype in ("float32", "bfloat16", "checkpoint"):
            expected = parallel.flatten_names(models.load_hf(path, dtype=dtype)[1])
            found = parallel.flatten_names(models.load_hf(path, dtype=dtype, shardings=places)[1])
            for name, wanted in parallel.flatten_names(places).items():
                assert found[name].sharding == wanted
                assert found[name].dtype == expected[name].dtype
                assert np.asarray(found[name]).tobytes() == np.asarray(expected[name]).tobytes(), name
            assert len({str(shard.index) for shard in found["head"].addressable_shards}) == 4


def test_the_command_converts_inspects_and_tells_apart(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(*words: str) -> tuple[int, str, str]:
        code = main(["checkpoint", *words])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    digests = {run("digest", str(saved))[1].split()[0]}
    assert run("convert", str(saved), str(tmp_path / "s"), "--to", "scanned", "--max-shard-gb", "0.00001")[0] == 0
    code, out, _ = run("convert", str(tmp_path / "s"), f"file://{tmp_path}/h", "--experts", "each", "--json")
    assert (code, json.loads(out)["layout"], json.loads(out)["files"]) == (0, "hf", 1)
    digests |= {run("digest", str(tmp_path / name))[1].split()[0] for name in "sh"}
    assert len(digests) == 1

    code, out, _ = run("inspect", str(tmp_path / "h"), "--json")
    facts = json.loads(out)
    assert (code, facts["layout"], facts["experts"], facts["prefix"], facts["fault"]) == (0, "hf", "each", "model.", "")
    assert facts["parameters"] == sum(x.size for x in jax.tree.leaves(make_params()))
    assert facts["config"]["hidden_size"] == 16
    assert {kind: own["tensors"] for kind, own in facts["dtypes"].items()} == {"BF16": facts["tensors"] - 2, "F32": 2}
    assert run("inspect", str(tmp_path / "s"))[1].splitlines()[1] == "  layout      scanned"
    shutil.copy(tmp_path / "h" / "model.safetensors", tmp_path / "s" / "params-9.safetensors")
    assert run("inspect", str(tmp_path / "s"))[0] == 2

    for words, line in (
        (["convert", str(saved), str(tmp_path / "h")], "h: not empty"),
        (["convert", str(saved), "d", "--to", "scanned", "--experts", "each"], "--experts and --prefix are of --to hf"),
        (["convert", str(saved), "d", "--prefix", "model"], "prefix 'model': must be one of language_model., "),
        (["convert", str(saved), "d", "--max-shard-gb", "0"], "--max-shard-gb 0.0: must be above 0"),
        (["inspect", str(tmp_path / "none")], "no such directory"),
    ):
        code, _, err = run(*words)
        assert (code, len(err.splitlines())) == (2, 1)
        assert line in err
