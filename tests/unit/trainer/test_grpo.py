"""The step: its gradient, its invariances, its refusals."""

import dataclasses

import jax
import numpy as np
import pytest

from swerve import models
from swerve.config.schema import Algorithm, Optimizer
from swerve.trainer import GrpoTrainer, NonFiniteGradientError, TrainerState, check_gap
from swerve.trainer.grpo import _to_device
from swerve.types import EpisodeStatus, Group, PackedMicroBatch, SwerveError

from .samples import CONFIG, CONTEXT, OPEN, make_groups, make_trainer, make_trajectory, with_trainer_logprobs

RATE = 1e-2


def leaves(tree: object) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def assert_same(a: object, b: object, **tolerance: float) -> None:
    left, right = leaves(a), leaves(b)
    assert left.keys() == right.keys()
    for name in left:
        if tolerance:
            np.testing.assert_allclose(left[name], right[name], err_msg=name, **tolerance)
        else:
            np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 1e-4) -> None:
    """Equal up to float noise, measured against the largest entry of each array."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error = np.abs(found[name] - value).max()
        assert error <= tolerance * np.abs(value).max() + 1e-7, (name, error, np.abs(value).max())


def gradient(trainer: GrpoTrainer, micro_batches: list[PackedMicroBatch]) -> tuple[dict[str, np.ndarray], int]:
    """What the update will use: the accumulated gradient divided by the count."""
    trainer._accumulated = None
    for micro_batch in micro_batches:
        trainer.accumulate(micro_batch)
    accumulated = trainer._accumulated
    assert accumulated is not None
    count = accumulated.sums.denominator
    return {k: v / np.asarray(count) for k, v in leaves(accumulated.gradients).items()}, int(count)


@pytest.fixture(scope="module")
def one() -> GrpoTrainer:
    """A trainer whose parameters no test changes."""
    return make_trainer()


def test_the_gradient_is_that_of_the_formula(one: GrpoTrainer) -> None:
    """One unpacked sequence at a time, with the loss written out."""
    groups = make_groups()
    algorithm = dataclasses.replace(OPEN, importance="sequence_mask", sequence_gate_low=0.0, sequence_gate_high=100.0)
    trainer = make_trainer(algorithm)
    found, count = gradient(trainer, list(trainer.prepare(groups).packed.micro_batches))

    pairs = [pair for g in groups for pair in zip(g.trajectories, g.advantages, strict=True)]
    total = sum(t.num_sampled_tokens for t, _ in pairs)
    assert count == total

    @jax.jit
    def numerator(params: object, tokens: jax.Array, mask: jax.Array, behaviour: jax.Array) -> jax.Array:
        n = tokens.shape[0]
        ones = jax.numpy.ones((1, n), jax.numpy.int32)
        positions = jax.numpy.arange(n, dtype=jax.numpy.int32)[None]
        hidden = models.forward(params, CONFIG, tokens[None], ones, positions).hidden
        log_softmax = jax.nn.log_softmax(models.logits(params, CONFIG, hidden)[0])
        lp = jax.numpy.take_along_axis(log_softmax[:-1], tokens[1:, None], 1)[:, 0]
        held = jax.lax.stop_gradient(lp)
        weight = jax.numpy.exp(held - behaviour[1:])
        return -(mask[1:] * weight * jax.numpy.exp(lp - held)).sum()

    grad = jax.jit(jax.grad(numerator))
    expected = jax.tree.map(np.zeros_like, one.state().params)
    for trajectory, advantage in pairs:
        padded = np.zeros(CONTEXT, np.int32)
        length = len(trajectory.tokens)
        padded[:length] = trajectory.tokens
        mask, behaviour = np.zeros(CONTEXT, np.float32), np.zeros(CONTEXT, np.float32)
        mask[:length], behaviour[:length] = trajectory.sampled, trajectory.behaviour_logprobs
        piece = grad(one.params, padded, mask, behaviour)
        expected = jax.tree.map(lambda e, g, a=advantage: e + a * np.asarray(g) / total, expected, piece)
    written_out = leaves(expected)
    for name in written_out:
        if "router" in name:
            assert not found[name].any()
            written_out[name] = found[name]
    assert_close(found, written_out)


@pytest.mark.parametrize("normaliser", ["token", "sequence", "constant"])
def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(normaliser: str) -> None:
    algorithm = dataclasses.replace(OPEN, normaliser=normaliser)
    groups = make_groups(3)
    results = []
    for rows in (1, 2, 4):
        trainer = make_trainer(algorithm, rows_per_micro_batch=rows)
        micro_batches = list(trainer.prepare(groups).packed.micro_batches)
        results.append((len(micro_batches), *gradient(trainer, micro_batches)))
        if rows == 2:
            results.append((len(micro_batches), *gradient(trainer, micro_batches[::-1])))
    assert sorted({num for num, _, _ in results}) == [2, 3, 5]
    for _, found, count in results[1:]:
        assert count == results[0][2]
        assert_close(found, results[0][1])
    assert max(np.abs(value).max() for value in results[0][1].values()) > 1e-4


def test_the_gradient_does_not_depend_on_the_order_of_rows_and_segments(one: GrpoTrainer) -> None:
    groups = make_groups(2)
    micro_batches = list(one.prepare(groups).packed.micro_batches)
    expected, _ = gradient(one, micro_batches)
    flipped = [
        dataclasses.replace(
            micro_batch, **{f.name: getattr(micro_batch, f.name)[::-1] for f in dataclasses.fields(micro_batch)[:-1]}
        )
        for micro_batch in micro_batches
    ]
    backwards = list(one.prepare(groups[::-1]).packed.micro_batches)
    for other in (flipped, backwards):
        found, _ = gradient(one, other)
        assert_close(found, expected)


def test_a_micro_batch_of_padding_changes_nothing(one: GrpoTrainer) -> None:
    micro_batches = list(one.prepare(make_groups(1)).packed.micro_batches)
    expected, count = gradient(one, micro_batches)
    first = micro_batches[0]
    zeros = {f.name: np.zeros_like(getattr(first, f.name)) for f in dataclasses.fields(first)[:-1]}
    padding = PackedMicroBatch(**(zeros | {"sequence_ids": np.full_like(first.sequence_ids, -1)}))
    found, with_padding = gradient(one, [padding, *micro_batches, padding])
    assert with_padding == count
    assert_same(found, expected)
    lp, entropy = one.logprobs(padding)
    assert not lp.any()
    assert not entropy.any()


def test_masked_sequences_leave_numerator_and_denominator() -> None:
    """A sequence that fills the context counts for nothing, but stays in its group's baseline."""
    full = make_trajectory("t0", 9, CONTEXT, reward=1.0)
    others = [make_trajectory("t0", i, 12, reward=float(i == 0)) for i in range(3)]
    from swerve.trainer import make_group

    group = make_group([*others, full])
    np.testing.assert_allclose(group.advantages, [1.1547, -1.1547, -1.1547, 1.1547], atol=1e-3)
    filtered = make_trainer(dataclasses.replace(OPEN, overlong_filter=True))
    found, count = gradient(filtered, list(filtered.prepare([group]).packed.micro_batches))
    assert count == sum(t.num_sampled_tokens for t in others)
    without = Group(task_id="t0", trajectories=tuple(others), advantages=group.advantages[:3])
    expected, _ = gradient(filtered, list(filtered.prepare([without]).packed.micro_batches))
    assert_close(found, expected)
    stats = filtered.step(filtered.prepare([group]), learning_rate=RATE)
    assert stats.batch.kept_overlong_share == 0.75
    assert stats.global_valid_seqs == 3
    assert stats.global_valid_tokens == count
    assert stats.batch.length_mean == (3 * 12 + CONTEXT) / 4  # masked is not length 0


def test_the_benchmarks_gates_reject_by_cause() -> None:
    trainer = make_trainer(Algorithm())
    group = with_trainer_logprobs(trainer, make_groups(1))[0]
    shifts = [0.0, 0.01, 2.0, 0.0]  # exact; outside the gate; mean error e^2; exact
    trajectories = tuple(
        dataclasses.replace(one, behaviour_logprobs=(one.behaviour_logprobs - shift * one.sampled).astype(np.float32))
        for one, shift in zip(group.trajectories, shifts, strict=True)
    )
    stats = trainer.step(trainer.prepare([dataclasses.replace(group, trajectories=trajectories)]), learning_rate=RATE)
    assert stats.kept_logprob_error_share == 0.75
    assert stats.kept_sequence_gate_share == pytest.approx(2 / 3)
    assert stats.kept_share == 0.5
    assert stats.global_valid_seqs == 3
    valid = [trajectories[i].num_sampled_tokens for i in (0, 1, 3)]
    assert stats.global_valid_tokens == sum(valid)
    assert stats.logprob_error_max == pytest.approx(np.exp(2.0), rel=1e-3)
    assert stats.token_logdiff_absmean == pytest.approx(0.01 * valid[1] / sum(valid), rel=1e-2)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_trainer_and_sampler_agree_at_any_temperature(temperature: float) -> None:
    """The sampler here is a softmax of the scaled logits, token by token."""
    trainer = make_trainer(Algorithm(), temperature=temperature)
    group = make_groups(1)[0]
    sampled = []
    for one in group.trajectories:
        row = one.tokens[None]
        hidden = models.forward(
            trainer.params, CONFIG, row, np.ones_like(row), np.arange(row.size, dtype=np.int32)[None]
        ).hidden
        scaled = np.asarray(models.logits(trainer.params, CONFIG, hidden)[0], np.float64) / temperature
        table = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
        lp = np.concatenate([[0.0], table[np.arange(row.size - 1), one.tokens[1:]]])
        sampled.append(dataclasses.replace(one, behaviour_logprobs=np.where(one.sampled, lp, 0).astype(np.float32)))
    gap = trainer.sampler_trainer_gap(sampled)
    assert gap.max < 1e-4
    assert gap.num_tokens == sum(one.num_sampled_tokens for one in sampled)
    check_gap(gap, 1e-3)
    stats = trainer.step(trainer.prepare([dataclasses.replace(group, trajectories=tuple(sampled))]), learning_rate=RATE)
    assert stats.importance_weight_mean == pytest.approx(1.0, abs=1e-4)
    assert stats.kept_share == 1.0


def test_a_gap_is_refused(one: GrpoTrainer) -> None:
    gap = one.sampler_trainer_gap(make_groups(1)[0].trajectories)
    assert gap.mean > 0.1
    with pytest.raises(SwerveError, match="disagree by"):
        check_gap(gap, 1e-3)
    nothing = dataclasses.replace(make_trajectory("t", 0, 8), status=EpisodeStatus.ERROR, reward=None)
    with pytest.raises(SwerveError, match="no sampled token"):
        check_gap(one.sampler_trainer_gap([nothing]), 1e-3)
    broken = make_trajectory("t", 0, 8, behaviour_logprobs=np.full(8, np.nan, np.float32))
    with pytest.raises(SwerveError, match="disagree by inf"):
        check_gap(one.sampler_trainer_gap([broken]), 1e-3)


def test_a_step_moves_the_policy_towards_rewarded_tokens_and_leaves_the_router() -> None:
    trainer = make_trainer(Algorithm(logprob_error_threshold=float("inf"), sequence_gate_low=0, sequence_gate_high=1e6))
    before = trainer.state()
    groups = with_trainer_logprobs(trainer, make_groups(2))

    def objective() -> float:
        scored = [trainer.trajectory_logprobs(g.trajectories) for g in groups]
        return sum(
            float(a * lp[t.sampled].sum())
            for g, lps in zip(groups, scored, strict=True)
            for t, a, lp in zip(g.trajectories, g.advantages, lps, strict=True)
        )

    start = objective()
    stats = trainer.step(trainer.prepare(groups), learning_rate=1e-3)
    assert objective() > start
    assert stats.step == trainer.version == 1
    assert stats.update_norm > 0
    after = leaves(trainer.params)
    for name, value in leaves(before.params).items():
        if "router" in name:
            np.testing.assert_array_equal(after[name], value)
    assert all(not m.any() for name, m in leaves(trainer.state().optimizer["mu"]).items() if "router" in name)


def test_a_router_that_is_not_frozen_learns_and_balances() -> None:
    free = make_trainer(freeze_router=False)
    found, _ = gradient(free, list(free.prepare(make_groups(1)).packed.micro_batches))
    routers = [name for name in found if "router" in name]
    assert routers
    assert all(found[name].any() for name in routers)
    balanced = make_trainer(freeze_router=False, router_aux_coefficient=10.0)
    other, _ = gradient(balanced, list(balanced.prepare(make_groups(1)).packed.micro_batches))
    assert all(np.abs(found[name] - other[name]).max() > 1e-4 for name in routers)


def test_a_run_compiles_each_program_once() -> None:
    trainer = make_trainer()
    for step, num_groups in enumerate((1, 3, 2)):
        trainer.step(trainer.prepare(make_groups(num_groups)), learning_rate=RATE / (step + 1))
    assert trainer.num_compiled == 2


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    trainer = make_trainer()
    trainer.step(trainer.prepare(make_groups(1)), learning_rate=RATE)
    before = trainer.state()
    group = make_groups(1)[0]
    broken = dataclasses.replace(group, advantages=np.array([1.0, np.inf, 1.0, 1.0], np.float32))
    with pytest.raises(NonFiniteGradientError, match="step 2: the gradient's norm is"):
        trainer.step(trainer.prepare([broken]), learning_rate=RATE)
    after = trainer.state()
    assert after.version == before.version == 1
    assert_same(after.params, before.params)
    assert_same(after.optimizer, before.optimizer)
    trainer.step(trainer.prepare([group]), learning_rate=RATE)
    assert trainer.version == 2


def test_a_batch_without_a_token_is_refused() -> None:
    trainer = make_trainer(Algorithm())  # the made-up behaviour log-probabilities fail the log-probability filter
    far = make_groups(1)[0]
    far = dataclasses.replace(
        far,
        trajectories=tuple(
            dataclasses.replace(one, behaviour_logprobs=one.behaviour_logprobs - 20) for one in far.trajectories
        ),
    )
    with pytest.raises(SwerveError, match="the filters left no token to train on: of 4 sequences 100%"):
        trainer.step(trainer.prepare([far]), learning_rate=RATE)
    assert trainer.version == 0


def test_a_batch_for_other_weights_is_refused() -> None:
    trainer = make_trainer()
    batch = trainer.prepare(make_groups(1))
    trainer.step(batch, learning_rate=RATE)
    with pytest.raises(SwerveError, match="made for weights version 0, the trainer is at 1"):
        trainer.step(batch, learning_rate=RATE)


def test_a_micro_batch_of_another_shape_is_refused(one: GrpoTrainer) -> None:
    other = make_trainer(rows_per_micro_batch=1)
    micro_batch = other.prepare(make_groups(1)).packed.micro_batches[0]
    with pytest.raises(SwerveError, match=r"shape \(1, 32\) does not fit a trainer of shape \(2, 32\)"):
        one.accumulate(micro_batch)


def test_surrogates_that_carry_the_ratio_take_no_weight_per_token() -> None:
    with pytest.raises(SwerveError, match=r"algorithm\.importance"):
        make_trainer(Algorithm(loss="clip", importance="token"))


@pytest.mark.parametrize("loss", ["clip", "dual_clip", "no_clip", "cispo", "gspo"])
def test_on_the_sampling_policy_every_surrogate_has_the_same_gradient(loss: str) -> None:
    base = make_trainer()
    groups = with_trainer_logprobs(base, make_groups(1))
    expected, _ = gradient(base, list(base.prepare(groups).packed.micro_batches))
    # Bounds wide enough for rounding: at a ratio of exactly 1 no surrogate clips.
    other = make_trainer(dataclasses.replace(OPEN, loss=loss))
    found, _ = gradient(other, list(other.prepare(groups).packed.micro_batches))
    assert_close(found, expected)


def test_kl_to_the_starting_policy_is_zero_at_the_start_and_pulls_back_afterwards() -> None:
    trainer = make_trainer(dataclasses.replace(OPEN, kl_coefficient=0.5))
    flat = dataclasses.replace(make_groups(1)[0], advantages=np.zeros(4, np.float32))
    stats = trainer.step(trainer.prepare([flat]), learning_rate=RATE)
    assert stats.kl == pytest.approx(0.0, abs=1e-6)
    trainer.restore_weights(models.initialise(CONFIG, jax.random.key(1)), version=1)
    first = trainer.step(trainer.prepare([flat]), learning_rate=RATE)
    assert first.kl > 0.01
    for _ in range(5):
        last = trainer.step(trainer.prepare([flat]), learning_rate=RATE)
    assert last.kl < first.kl


def test_state_restores_exactly() -> None:
    groups = make_groups(2)
    straight = make_trainer()
    for _ in range(3):
        straight.step(straight.prepare(groups), learning_rate=RATE)
    first = make_trainer()
    first.step(first.prepare(groups), learning_rate=RATE)
    state = first.state()
    first.step(first.prepare(groups), learning_rate=RATE)  # the state is a copy
    second = make_trainer(seed=7)
    second.restore(state)
    assert second.version == 1
    for _ in range(2):
        second.step(second.prepare(groups), learning_rate=RATE)
    assert_same(second.state().params, straight.state().params)
    assert_same(second.state().optimizer, straight.state().optimizer)


def test_weights_alone_leave_the_moments_at_zero() -> None:
    trainer = make_trainer()
    trainer.step(trainer.prepare(make_groups(1)), learning_rate=RATE)
    params = models.initialise(CONFIG, jax.random.key(3))
    trainer.restore_weights(params, version=5)
    state = trainer.state()
    assert trainer.version == 5
    assert_same(state.params, params)
    assert not any(leaf.any() for leaf in leaves(state.optimizer).values())


def test_the_callers_weights_survive() -> None:
    params = models.initialise(CONFIG, jax.random.key(0))
    trainer = GrpoTrainer(
        CONFIG,
        params,
        algorithm=OPEN,
        optimizer=Optimizer(),
        context_length=CONTEXT,
        row_length=CONTEXT,
        rows_per_micro_batch=2,
    )
    kept = trainer.params
    trainer.step(trainer.prepare(make_groups(1)), learning_rate=RATE)
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(params))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(kept))  # donated


def test_another_models_state_is_refused(one: GrpoTrainer) -> None:
    state = one.state()
    wider = jax.tree.map(lambda x: np.concatenate([x, x]), state.params)
    with pytest.raises(SwerveError, match=r"params of another model: .* expected float32"):
        one.restore(TrainerState(params=wider, optimizer=state.optimizer, version=0))
    with pytest.raises(SwerveError, match="is in only one of the two"):
        one.restore(TrainerState(params={"w": np.zeros(2)}, optimizer=state.optimizer, version=0))


def test_one_list_of_tokens_is_scored_as_in_a_row(one: GrpoTrainer) -> None:
    trajectory = make_trajectory("t", 0, 20)
    alone = one.token_logprobs(trajectory.tokens.tolist())
    np.testing.assert_allclose(alone, one.trajectory_logprobs([trajectory])[0], atol=1e-5)
    assert alone[0] == 0


def test_inputs_reach_the_device_with_their_types(one: GrpoTrainer) -> None:
    batch = _to_device(one.prepare(make_groups(1)).packed.micro_batches[0], (2, CONTEXT))
    assert {name: str(getattr(batch, name).dtype) for name in batch._fields if name != "routing"} == {
        "tokens": "int32",
        "segment_ids": "int32",
        "positions": "int32",
        "loss_mask": "float32",
        "advantages": "float32",
        "behaviour_logprobs": "float32",
    }
