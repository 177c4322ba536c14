"""Checkpoints: whole or absent, of this run or refused."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from swerve.checkpoint import CheckpointError, CheckpointStore, ForeignCheckpointError, TornCheckpointError
from swerve.types import MachineError

PARAMS = {
    "embedding": np.arange(6, dtype=np.float32).reshape(2, 3),
    "blocks": {"w": np.array([1.5, -2.0], ml_dtypes.bfloat16)},
}
OPTIMIZER = {"count": np.int32(3), "mu": {"embedding": np.full((2, 3), np.nextafter(1, 2), np.float32)}}
HOST = {"data": {"num_taken": 12}, "rng": {"state": 2**127 + 1}, "weights_version": 3}
DATASETS = {"train": "aa" * 32, "validation": "bb" * 32}


def make_store(directory: Path, **changes: object) -> CheckpointStore:
    options: dict[str, object] = {"recipe_digest": "cc" * 32, "datasets": DATASETS}
    return CheckpointStore(directory, **(options | changes))  # pyright: ignore[reportArgumentType]


def save(store: CheckpointStore, step: int, metric: float | None = None) -> Path:
    return store.save(step, params=PARAMS, optimizer=OPTIMIZER, host=HOST | {"step": step}, metric=metric)


def test_what_is_saved_is_loaded_bit_for_bit(tmp_path: Path) -> None:
    store = make_store(tmp_path / "checkpoints")
    assert store.latest() is None
    path = save(store, 12)
    assert sorted(p.name for p in path.iterdir()) == [
        "host.json",
        "manifest.json",
        "optimizer.safetensors",
        "params.safetensors",
    ]
    loaded = make_store(tmp_path / "checkpoints").load(like=(PARAMS, OPTIMIZER))
    assert (loaded.step, loaded.host, loaded.path) == (12, HOST | {"step": 12}, path)
    for found, expected in (
        (loaded.params["embedding"], PARAMS["embedding"]),
        (loaded.params["blocks"]["w"], PARAMS["blocks"]["w"]),
        (loaded.optimizer["count"], OPTIMIZER["count"]),
        (loaded.optimizer["mu"]["embedding"], OPTIMIZER["mu"]["embedding"]),
    ):
        assert found.dtype == expected.dtype
        assert found.shape == expected.shape
        assert found.tobytes() == expected.tobytes()


def test_the_last_ones_and_the_best_are_kept(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep_last=2, keep_best=1)
    for step, metric in enumerate((0.1, 0.9, 0.3, None, 0.2), start=1):
        save(store, step, metric)
    assert store.steps() == [2, 4, 5]
    everything = make_store(tmp_path / "all")
    for step in range(1, 6):
        save(everything, step)
    assert everything.steps() == [1, 2, 3, 4, 5]
    assert everything.latest() == 5


def test_an_earlier_step_saved_after_a_resume_is_not_deleted_at_once(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep_last=1)
    save(store, 9)
    save(store, 4)
    assert store.load(4).step == 4


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, 1)
    store.save(1, params=PARAMS, optimizer=OPTIMIZER, host={"again": True})
    assert store.load(1).host == {"again": True}
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


def tear(path: Path, how: str) -> None:
    match how:
        case "missing":
            path.unlink()
        case "short":
            path.write_bytes(path.read_bytes()[:-1])
        case "altered":
            content = bytearray(path.read_bytes())
            content[-1] ^= 1
            path.write_bytes(content)


@pytest.mark.parametrize("how", ["missing", "short", "altered"])
@pytest.mark.parametrize("name", ["params.safetensors", "optimizer.safetensors", "host.json", "manifest.json"])
def test_a_torn_checkpoint_is_refused_and_the_last_good_one_taken_only_where_told(
    tmp_path: Path, name: str, how: str
) -> None:
    store = make_store(tmp_path)
    save(store, 1)
    tear(save(store, 2) / name, how)
    with pytest.raises(TornCheckpointError, match=rf"step_00000002/{name}: .*resume from an earlier") as caught:
        store.load()
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
    assert store.load(fall_back=True).step == 1
    assert store.load(1).step == 1


def test_where_all_are_torn_nothing_is_taken(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for step in (1, 2):
        tear(save(store, step) / "params.safetensors", "short")
    with pytest.raises(TornCheckpointError, match="step_00000001"):
        store.load(fall_back=True)


def test_a_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, 1).rename(tmp_path / "step_00000005")
    with pytest.raises(TornCheckpointError, match="the manifest says step 1"):
        store.load()


def test_a_checkpoint_of_another_layout_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    manifest = save(store, 1) / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 99}))
    with pytest.raises(CheckpointError, match="layout 99 is not 1"):
        store.load()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"recipe_digest": "dd" * 32}, r"another recipe \(cccccccccccc, this one is dddddddddddd\)"),
        ({"datasets": DATASETS | {"train": "ee" * 32}}, r"another data set train \(aaaaaaaaaaaa, this one is eeeeeee"),
        ({"datasets": {"train": DATASETS["train"]}}, r"data set validation \(bbbbbbbbbbbb, this one is none\)"),
    ],
)
def test_a_foreign_checkpoint_is_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    save(make_store(tmp_path), 1)
    other = make_store(tmp_path, **changes)
    with pytest.raises(ForeignCheckpointError, match=words):
        other.load()
    with pytest.raises(ForeignCheckpointError):
        other.load(fall_back=True)


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, 1)
    wider = PARAMS | {"embedding": np.zeros((2, 4), np.float32)}
    with pytest.raises(ForeignCheckpointError, match=r"embedding is float32\[2, 3\], this one's is float32\[2, 4\]"):
        store.load(like=(wider, OPTIMIZER))
    with pytest.raises(ForeignCheckpointError, match=r"head is absent, this one's is float32\[1\]"):
        store.load(like=(PARAMS | {"head": np.zeros(1, np.float32)}, OPTIMIZER))
    with pytest.raises(ForeignCheckpointError, match=r"mu\.embedding is float32"):
        store.load(like=(PARAMS, {"count": OPTIMIZER["count"]}))


def test_no_checkpoint_is_said_so(tmp_path: Path) -> None:
    store = make_store(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no checkpoint \(there: none\)"):
        store.load()
    save(store, 3)
    with pytest.raises(CheckpointError, match=r"no checkpoint of step 2 \(there: 3\)"):
        store.load(2)


def test_weights_alone_are_written_by_their_writer_and_verified(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep_last=2)

    def write(directory: Path) -> None:
        (directory / "config.json").write_text("{}")
        (directory / "shards").mkdir()
        (directory / "shards" / "model.safetensors").write_bytes(b"weights")

    for step in (1, 2, 3):
        store.save_weights(step, write)
    assert store.weights_steps() == [2, 3]
    assert store.steps() == []
    directory = store.verify_weights(3)
    tear(directory / "shards" / "model.safetensors", "altered")
    with pytest.raises(TornCheckpointError, match="another SHA-256"):
        store.verify_weights(3)


def test_a_writer_that_fails_leaves_nothing(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    save(store, 1)

    def write(directory: Path) -> None:
        (directory / "half").write_text("x")
        raise RuntimeError("stopped")

    with pytest.raises(RuntimeError, match="stopped"):
        store.save_weights(2, write)
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]


SAVE_BIG = """
    import sys
    from pathlib import Path
    import numpy as np
    from swerve.checkpoint import CheckpointStore
    store = CheckpointStore(Path(sys.argv[1]), recipe_digest="r", datasets={})
    big = {"w": np.zeros(1 << 19, np.float32)}
"""


def test_a_full_disk_is_the_machines_fault_and_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    """A limit on file size stands for the full disk: the write itself fails."""

    script = textwrap.dedent(SAVE_BIG) + textwrap.dedent(
        """
        import resource
        from swerve.types import MachineError
        store.save(1, params={}, optimizer={}, host={})
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        try:
            store.save(2, params=big, optimizer={}, host={})
        except MachineError as error:
            print(error)
            sys.exit(error.exit_code)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
        timeout=120,
    )
    assert done.returncode == 1, done.stderr
    assert "step_00000002: cannot be written: File too large: raise the limit of file sizes" in done.stdout
    assert done.stdout.count("\n") == 1
    assert [p.name for p in tmp_path.iterdir()] == ["step_00000001"]
    CheckpointStore(tmp_path, recipe_digest="r", datasets={}).load()


def test_a_directory_that_cannot_be_written_is_the_machines_fault(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(MachineError, match=r"cannot be written: (Not a directory|File exists)"):
        save(make_store(tmp_path / "file"), 1)


def test_a_killed_writer_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    """SIGKILL at an arbitrary moment of an endless series of saves."""
    script = textwrap.dedent(SAVE_BIG) + textwrap.dedent(
        """
        step = 0
        while True:
            step += 1
            store.save(step, params=big, optimizer={}, host={"step": step})
            print(step, flush=True)
        """
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert process.stdout is not None
    saved = [int(process.stdout.readline()) for _ in range(3)]
    process.send_signal(signal.SIGKILL)
    saved += [int(line) for line in process.stdout]
    process.stdout.close()
    process.wait()
    store = CheckpointStore(tmp_path, recipe_digest="r", datasets={}, keep_last=1)
    loaded = store.load()
    assert loaded.step in (saved[-1], saved[-1] + 1)
    assert loaded.host == {"step": loaded.step}
    store.save(loaded.step + 1, params={}, optimizer={}, host={})
    assert [p.name for p in tmp_path.iterdir()] == [f"step_{loaded.step + 1:08d}"]
