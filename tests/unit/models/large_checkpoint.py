"""Checkpoints of any size made and converted as streams; run as a program, it measures the memory that this takes."""

import filecmp
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np

from swerve.checkpoint import open_directory, write_tensors
from swerve.models import Qwen35MoeConfig, hf
from swerve.models.hf.layout import hf_layout, renamed
from swerve.models.hf.writer import config_json, index_json, index_name, plan_files

CHUNK = 1 << 20


def make_config(scale: int) -> Qwen35MoeConfig:
    """A model whose tensors grow with the square of `scale`; 16 makes 1.1 GB of bfloat16."""
    return Qwen35MoeConfig(
        vocab_size=4096 * scale,
        hidden_size=64 * scale,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=8 * scale,
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=8 * scale,
        linear_value_head_dim=8 * scale,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=64 * scale,
        shared_expert_intermediate_size=64 * scale,
    )


def write_random(path: Path, config: Qwen35MoeConfig, *, max_shard_bytes: int, prefix: str, experts: hf.Experts) -> int:
    """Write random bits, not-a-numbers among them, shard by shard; the size of the largest tensor."""
    layout = renamed(hf_layout(config, experts), prefix)
    dtypes = {name: "F32" if name.endswith("A_log") else "BF16" for name in layout}
    files = plan_files("model", layout, dtypes, max_shard_bytes)
    rng = np.random.default_rng(0)

    def chunks(name: str) -> Iterator[np.ndarray]:
        left, dtype = int(np.prod(layout[name].shape)), np.float32 if dtypes[name] == "F32" else ml_dtypes.bfloat16
        while left:
            count = min(left, CHUNK)
            yield np.frombuffer(rng.bytes(count * np.dtype(dtype).itemsize), dtype)
            left -= count

    for file in files:
        with open_directory(path).create(file.name) as out:
            write_tensors(out, file.tensors, chunks)
    (path / index_name("model")).write_text(index_json(files))
    (path / "config.json").write_text(config_json(config, "bfloat16"))
    return max(tensor.num_bytes for file in files for tensor in file.tensors)


def same_files(left: Path, right: Path) -> bool:
    """Whether two directories hold the same files, byte for byte."""
    names = sorted(path.name for path in left.iterdir())
    return names == sorted(path.name for path in right.iterdir()) and not any(
        filecmp.cmpfiles(left, right, names, shallow=False)[1:]
    )


def round_trip(path: Path, max_shard_bytes: int) -> list[float]:
    """Convert `path/hf` to both of our layouts and back, into `path/again`; the seconds that each took."""
    steps: list[tuple[str, str, hf.Form]] = [
        ("hf", "scanned", "scanned"),
        ("scanned", "unscanned", "unscanned"),
        ("unscanned", "again", "hf"),
    ]
    seconds = []
    for source, target, form in steps:
        before = time.perf_counter()
        hf.convert(hf.open_model(path / source), path / target, to=form, max_shard_bytes=max_shard_bytes)
        seconds.append(time.perf_counter() - before)
        if source != "hf":
            shutil.rmtree(path / source)
    return seconds


def memory(field: str) -> int:
    """A number of bytes from the kernel's account of this process."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def main(path: Path, scale: int, max_shard_bytes: int) -> None:
    """Print what a round trip takes."""
    largest = write_random(
        path / "hf", make_config(scale), max_shard_bytes=max_shard_bytes, prefix="model.", experts="fused"
    )
    size = sum(file.stat().st_size for file in (path / "hf").iterdir())
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    baseline = memory("VmRSS")
    seconds = round_trip(path, max_shard_bytes)
    peak = memory("VmHWM") - baseline
    same = same_files(path / "hf", path / "again")
    print(json.dumps({"bytes": size, "largest": largest, "peak": peak, "same": same, "seconds": seconds}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
