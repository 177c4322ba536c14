"""Imitation learns, resumes bit for bit, and refuses what is not its checkpoint."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from swerve import models
from swerve.trainer import pretrain as module
from swerve.trainer.pretrain import Pretrainer, PretrainSettings, Rows, pack_rows, pretrain
from swerve.types import SwerveError

CONFIG = models.Qwen35MoeConfig(
    vocab_size=24,
    hidden_size=16,
    num_hidden_layers=2,
    full_attention_interval=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=8,
    num_experts=2,
    num_experts_per_tok=1,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=8,
)
SETTINGS = PretrainSettings(
    num_tokens=8 * 128,
    row_length=64,
    rows_per_micro_batch=2,
    micro_batches=((0, 1), (256, 2)),
    learning_rate=0.02,
    warmup_tokens=128,
    log_every=1,
    evaluate_every=2,
    checkpoint_seconds=1e9,
    export_tokens=0,
)


@dataclasses.dataclass(frozen=True)
class Sequence:
    tokens: np.ndarray
    weights: np.ndarray
    right_edits: np.ndarray


class Counting:
    """Sequences that count upwards from a position-dependent start."""

    def sequence(self, position):
        rng = np.random.default_rng(position)
        length = int(rng.integers(8, 40))
        tokens = ((np.arange(length) + rng.integers(24)) % 24).astype(np.int32)
        return Sequence(tokens, np.full(length, 0.5, np.float32), np.arange(length) > length // 2)


@pytest.fixture(scope="module")
def make():
    """Trainers with one optimizer share compiled programs; only their state is anew."""
    programs = {}

    def anew(**changes):
        trainer = Pretrainer(CONFIG, dataclasses.replace(SETTINGS, **changes), Counting())
        shared = programs.setdefault(trainer.settings.optimizer, trainer)
        for name in ("_accumulate", "_update", "_score", "_zeros"):
            setattr(trainer, name, getattr(shared, name))
        return trainer

    return anew


def digest(trainer):
    return b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves((trainer.params, trainer.opt_state)))


def test_it_learns_and_a_stopped_run_resumes_bit_for_bit(make, tmp_path):
    whole = make()
    lines = list(pretrain(whole, tmp_path / "whole", [Counting().sequence(i) for i in range(900, 904)]))
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert {"eval_call_nll", "eval_exact"} <= lines[-1].keys()
    assert [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()] == lines

    first = make()
    list(pretrain(first, tmp_path / "parts", stop=lambda: first.num_steps == 3))
    second = make()
    list(pretrain(second, tmp_path / "parts"))
    assert second.num_steps == whole.num_steps > 3
    assert digest(second) == digest(whole)

    torn = tmp_path / "parts" / "state.safetensors"
    torn.write_bytes(torn.read_bytes()[:200])
    with pytest.raises(SwerveError, match="not a checkpoint"):
        first.restore(torn)
    whole.save(torn)
    other = make(optimizer="adamw")
    with pytest.raises(SwerveError, match="another model or optimizer"):
        other.restore(torn)


def test_an_export_is_written_at_the_end(make, tmp_path):
    written = []
    list(pretrain(make(num_tokens=128), tmp_path, export=lambda path, params: written.append(path.name)))
    assert written == ["hf-final"]


def test_the_learning_rate_rises_stays_and_falls():
    settings = PretrainSettings(num_tokens=1_000_000, warmup_tokens=100_000, decay_share=0.2, final_share=0.1)
    rates = [settings.learning_rate_at(tokens) for tokens in (0, 200_000, 799_999, 900_000, 1_000_000)]
    assert rates[0] < rates[1] == settings.learning_rate
    assert rates[2] == pytest.approx(settings.learning_rate, rel=1e-3)
    assert rates[3] == pytest.approx(0.55 * settings.learning_rate)
    assert rates[4] == pytest.approx(0.1 * settings.learning_rate)


def test_packing_loses_and_repeats_nothing():
    rows = Rows(source=Counting(), settings=SETTINGS)
    seen = []
    for _ in range(20):
        batch = rows.next()
        assert batch["tokens"].shape == (2, 64)
        for row in range(2):
            seen += [int((batch["segment_ids"][row] == s).sum()) for s in range(1, batch["segment_ids"][row].max() + 1)]
    lengths = [len(Counting().sequence(i).tokens) for i in range(rows.next_position)]
    waiting = [lengths[i] for i in rows.waiting]
    assert sorted(seen + waiting) == sorted(lengths)


def test_a_row_holds_positions_and_segments():
    batch = pack_rows([[Counting().sequence(0), Counting().sequence(1)]], 2, 96)
    first = len(Counting().sequence(0).tokens)
    assert batch["positions"][0, first] == 0 and batch["segment_ids"][0, first] == 2
    assert batch["segment_ids"][1].max() == 0 == batch["weights"][1].max()


def test_an_unknown_optimizer_is_named():
    with pytest.raises(SwerveError, match="'sgd' is neither"):
        module.make_optimizer(dataclasses.replace(SETTINGS, optimizer="sgd"), {})
