"""The step on a real model: its gradient, its invariances, its refusals."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swerve import models
from swerve.algorithms import NORMALISERS
from swerve.config import TrainRecipe, settings
from swerve.config.schema import Algorithm, Optimizer
from swerve.trainer import GrpoTrainer, NonFiniteGradientError, StepStats, TrainerState, check_gap, make_group
from swerve.types import EpisodeStatus, Group, PackedMicroBatch, SwerveError

from .samples import CONFIG, CONTEXT, OPEN, make_groups, make_trainer, make_trajectory, with_trainer_logprobs

RATE = 1e-2
Trainers = Callable[[], GrpoTrainer]


def leaves(tree: Any) -> dict[str, np.ndarray]:
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def assert_same(a: Any, b: Any) -> None:
    left, right = leaves(a), leaves(b)
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)


def assert_close(found: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float = 1e-4) -> None:
    """Equal up to float noise, measured against the largest entry of each array."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        error, size = np.abs(found[name] - value).max(), np.abs(value).max()
        assert error <= tolerance * size + 1e-7, (name, error, size)


def gradient(trainer: GrpoTrainer, micro_batches: list[PackedMicroBatch]) -> tuple[dict[str, np.ndarray], int]:
    """What the update would use: the accumulated gradient divided by the denominator, and the denominator."""
    trainer._accumulated = None
    for micro_batch in micro_batches:
        trainer.accumulate(micro_batch)
    accumulated, trainer._accumulated = trainer._accumulated, None
    assert accumulated is not None
    denominator = np.asarray(accumulated.sums.denominator)
    return {k: v / denominator for k, v in leaves(accumulated.gradients).items()}, int(denominator)


def rewound(trainer: GrpoTrainer) -> Trainers:
    """One compiled trainer that every test finds as it began."""
    start = trainer.state()

    def get() -> GrpoTrainer:
        trainer.restore(start)
        return trainer

    return get


@pytest.fixture(scope="module")
def open_trainers() -> Trainers:
    return rewound(make_trainer())


@pytest.fixture(scope="module")
def gated_trainers() -> Trainers:
    return rewound(make_trainer(Algorithm()))


@pytest.fixture
def one(open_trainers: Trainers) -> GrpoTrainer:
    """A trainer without filters and gates, at version 0."""
    return open_trainers()


@pytest.fixture
def gated(gated_trainers: Trainers) -> GrpoTrainer:
    """A trainer with the benchmark's filters and gates, at version 0."""
    return gated_trainers()


@jax.jit
def oracle(params: Any, tokens: jax.Array) -> jax.Array:
    """Logits of one unpacked row, `[1, CONTEXT, vocabulary]`."""
    positions = jnp.arange(CONTEXT, dtype=jnp.int32)[None]
    hidden = models.forward(params, CONFIG, tokens, jnp.ones((1, CONTEXT), jnp.int32), positions).hidden
    return models.logits(params, CONFIG, hidden)


# ------------------------------------------------------------------------------------------------ the gradient


def test_the_gradient_is_that_of_the_formula(one: GrpoTrainer) -> None:
    """One unpacked sequence at a time, with the loss written out."""
    groups = make_groups()
    found, count = gradient(one, list(one.prepare(groups).packed.micro_batches))
    pairs = [pair for g in groups for pair in zip(g.trajectories, g.advantages, strict=True)]
    total = sum(t.num_sampled_tokens for t, _ in pairs)
    assert count == total

    @jax.jit
    @jax.grad
    def grad(params: Any, tokens: jax.Array, mask: jax.Array) -> jax.Array:
        log_softmax = jax.nn.log_softmax(oracle(params, tokens[None])[0])
        lp = jnp.take_along_axis(log_softmax[:-1], tokens[1:, None], 1)[:, 0]
        return -(mask[1:] * jnp.exp(lp - jax.lax.stop_gradient(lp))).sum()

    expected = jax.tree.map(np.zeros_like, one.state().params)
    for trajectory, advantage in pairs:
        tokens, mask = np.zeros(CONTEXT, np.int32), np.zeros(CONTEXT, np.float32)
        tokens[: len(trajectory.tokens)] = trajectory.tokens
        mask[: len(trajectory.tokens)] = trajectory.sampled
        piece = grad(one.params, tokens, mask)
        expected = jax.tree.map(lambda e, g, a=advantage: e + a * np.asarray(g) / total, expected, piece)
    written_out = leaves(expected)
    for name in written_out:
        if "router" in name:
            assert not found[name].any()
            written_out[name] = found[name]
    assert_close(found, written_out)


def test_the_gradient_does_not_depend_on_how_the_batch_is_cut(one: GrpoTrainer) -> None:
    groups = make_groups(2)
    results = []
    for trainer in (one, make_trainer(rows_per_micro_batch=4)):
        micro_batches = list(trainer.prepare(groups).packed.micro_batches)
        results.append((len(micro_batches), *gradient(trainer, micro_batches)))
        results.append((len(micro_batches), *gradient(trainer, micro_batches[::-1])))
    assert [num for num, _, _ in results] == [2, 2, 1, 1]
    for _, found, count in results[1:]:
        assert count == results[0][2]
        assert_close(found, results[0][1])
    assert max(np.abs(value).max() for value in results[0][1].values()) > 1e-3


def test_the_gradient_does_not_depend_on_the_order_of_rows_and_segments(one: GrpoTrainer) -> None:
    groups = make_groups(2)
    micro_batches = list(one.prepare(groups).packed.micro_batches)
    expected, _ = gradient(one, micro_batches)
    names = [field.name for field in dataclasses.fields(PackedMicroBatch) if field.name != "routing"]
    flipped = [dataclasses.replace(m, **{name: getattr(m, name)[::-1] for name in names}) for m in micro_batches]
    backwards = list(one.prepare(groups[::-1]).packed.micro_batches)
    for other in (flipped, backwards):
        assert_close(gradient(one, other)[0], expected)


def test_a_micro_batch_of_padding_changes_nothing(one: GrpoTrainer) -> None:
    micro_batches = list(one.prepare(make_groups(1)).packed.micro_batches)
    expected, count = gradient(one, micro_batches)
    integers, floats = np.zeros((2, CONTEXT), np.int32), np.zeros((2, CONTEXT), np.float32)
    padding = PackedMicroBatch(
        tokens=integers,
        segment_ids=integers,
        positions=integers,
        loss_mask=floats,
        advantages=floats,
        behaviour_logprobs=floats,
        sequence_ids=integers - 1,
    )
    found, with_padding = gradient(one, [padding, *micro_batches, padding])
    assert with_padding == count
    assert_same(found, expected)
    lp, entropy = one.logprobs(padding)
    assert not lp.any()
    assert not entropy.any()


def test_a_router_that_is_not_frozen_learns_and_balances() -> None:
    trainer = make_trainer(freeze_router=False, router_aux_coefficient=10.0)
    found, _ = gradient(trainer, list(trainer.prepare(make_groups(1)).packed.micro_batches))
    routers = [name for name in found if "router" in name]
    assert routers
    assert all(np.abs(found[name]).max() > 1e-3 for name in routers)


# ------------------------------------------------------------------------------------------- filters and gates


def test_masked_sequences_leave_numerator_and_denominator(gated: GrpoTrainer) -> None:
    """A sequence that fills the context counts for nothing, but stays in its group's baseline."""
    full = make_trajectory("t0", 9, CONTEXT, reward=1.0)
    others = [make_trajectory("t0", i, 12, reward=float(i == 0)) for i in range(3)]
    group = with_trainer_logprobs(gated, [make_group([*others, full])])[0]
    np.testing.assert_allclose(group.advantages, [1.1547, -1.1547, -1.1547, 1.1547], atol=1e-3)
    found, count = gradient(gated, list(gated.prepare([group]).packed.micro_batches))
    assert count == sum(t.num_sampled_tokens for t in others)
    without = Group(task_id="t0", trajectories=group.trajectories[:3], advantages=group.advantages[:3])
    expected, _ = gradient(gated, list(gated.prepare([without]).packed.micro_batches))
    assert_close(found, expected)
    stats = gated.step(gated.prepare([group]), learning_rate=RATE)
    assert stats.batch.kept_overlong_share == 0.75
    assert stats.global_valid_seqs == 3
    assert stats.global_valid_tokens == count
    assert stats.batch.length_mean == (3 * 12 + CONTEXT) / 4  # masked is not length 0


@pytest.mark.parametrize("normaliser", NORMALISERS)
def test_sequences_without_gradient_need_not_be_computed(normaliser: str) -> None:
    """The same update from fewer rows: a group without signal, and a full sequence that the overlong filter drops."""
    changes: dict[str, object] = {"normaliser": normaliser, "overlong_filter": True}
    every, skipping = (
        make_trainer(
            dataclasses.replace(OPEN, **changes, skip_zero_advantage=skip),  # pyright: ignore[reportArgumentType]
            optimizer=Optimizer(eps=1.0),  # so that the update is proportional to the gradient
        )
        for skip in (False, True)
    )
    before = leaves(every.params)
    solved = [make_trajectory("u", i, 9 + i, reward=1.0) for i in range(3)]
    groups = [*make_groups(2), make_group([*solved, make_trajectory("u", 3, CONTEXT, reward=1.0)])]
    expected = every.step(every.prepare(groups), learning_rate=1.0)
    batch = skipping.prepare(groups)
    found = skipping.step(batch, learning_rate=1.0)
    moved = [
        {name: after[name] - before[name] for name in before} for after in map(leaves, (skipping.params, every.params))
    ]
    assert_close(moved[0], moved[1])
    assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-5)
    assert found.loss == pytest.approx(expected.loss, abs=1e-6)
    for name in ("global_valid_tokens", "global_valid_seqs", "kept_share", "kept_logprob_error_share"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.batch.num_sequences == expected.batch.num_sequences == 12
    assert (found.batch.num_skipped_seqs, expected.batch.num_skipped_seqs) == (3, 0)
    assert found.batch.num_skipped_tokens == sum(one.num_sampled_tokens for one in solved)
    assert found.batch.num_real_tokens == expected.batch.num_real_tokens - sum(9 + i for i in range(3)) - CONTEXT
    assert found.entropy > 0


def test_a_step_without_signal_is_a_step_with_no_gradient() -> None:
    trainer = make_trainer(dataclasses.replace(OPEN, skip_zero_advantage=True))
    before = jax.device_get(trainer.params)
    stats = trainer.step(
        trainer.prepare([make_group([make_trajectory("u", i, 9, reward=0.0) for i in range(4)])]), learning_rate=RATE
    )
    assert (stats.grad_norm, stats.batch.num_micro_batches, stats.entropy, trainer.version) == (0, 0, 0, 1)
    assert stats.global_valid_seqs == stats.batch.num_skipped_seqs == 4
    assert_same(trainer.params, before)


def test_what_gives_every_sequence_a_gradient_lets_none_be_skipped() -> None:
    skipping = dataclasses.replace(OPEN, skip_zero_advantage=True)
    with pytest.raises(SwerveError, match=r"skip_zero_advantage = True would leave .* kl_coefficient = 0.1"):
        make_trainer(dataclasses.replace(skipping, kl_coefficient=0.1))
    with pytest.raises(SwerveError, match="balance term"):
        make_trainer(skipping, router_aux_coefficient=0.01)


def test_the_benchmarks_gates_reject_by_cause(gated: GrpoTrainer) -> None:
    group = with_trainer_logprobs(gated, make_groups(1))[0]
    shifts = [0.0, 0.01, 2.0, 0.0]  # exact; outside the gate; mean error e^2; exact
    trajectories = tuple(
        dataclasses.replace(one, behaviour_logprobs=(one.behaviour_logprobs - shift * one.sampled).astype(np.float32))
        for one, shift in zip(group.trajectories, shifts, strict=True)
    )
    stats = gated.step(gated.prepare([dataclasses.replace(group, trajectories=trajectories)]), learning_rate=RATE)
    assert stats.kept_logprob_error_share == 0.75
    assert stats.kept_sequence_gate_share == pytest.approx(2 / 3)
    assert stats.kept_share == 0.5
    assert stats.global_valid_seqs == 3
    valid = [trajectories[i].num_sampled_tokens for i in (0, 1, 3)]
    assert stats.global_valid_tokens == sum(valid)
    assert stats.logprob_error_max == pytest.approx(np.exp(2.0), rel=1e-3)
    assert stats.token_logdiff_absmean == pytest.approx(0.01 * valid[1] / sum(valid), rel=1e-2)


def test_a_batch_without_a_token_is_refused(gated: GrpoTrainer) -> None:
    group = make_groups(1)[0]
    far = tuple(dataclasses.replace(t, behaviour_logprobs=t.behaviour_logprobs - 20) for t in group.trajectories)
    with pytest.raises(SwerveError, match="the filters left no token to train on: of 4 sequences 100%"):
        gated.step(gated.prepare([dataclasses.replace(group, trajectories=far)]), learning_rate=RATE)
    assert gated.version == 0


# ----------------------------------------------------------------------------------------- sampler and trainer


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_trainer_and_sampler_agree_at_any_temperature(temperature: float, gated: GrpoTrainer) -> None:
    """The sampler here is a softmax of the scaled logits in float64."""
    trainer = gated if temperature == 1 else make_trainer(Algorithm(), temperature=temperature)
    group = make_groups(1)[0]
    sampled = []
    for one in group.trajectories:
        size = len(one.tokens)
        tokens = np.zeros((1, CONTEXT), np.int32)
        tokens[0, :size] = one.tokens
        scaled = np.asarray(oracle(trainer.params, tokens), np.float64)[0] / temperature
        table = scaled - np.log(np.exp(scaled).sum(-1, keepdims=True))
        lp = np.concatenate([[0.0], table[np.arange(size - 1), one.tokens[1:]]])
        sampled.append(dataclasses.replace(one, behaviour_logprobs=np.where(one.sampled, lp, 0).astype(np.float32)))
    gap = trainer.sampler_trainer_gap(sampled)
    assert gap.max < 1e-4
    assert gap.num_tokens == sum(one.num_sampled_tokens for one in sampled)
    check_gap(gap, 1e-3)
    if temperature == 1:
        batch = trainer.prepare([dataclasses.replace(group, trajectories=tuple(sampled))])
        stats = trainer.step(batch, learning_rate=RATE)
        assert stats.importance_weight_mean == pytest.approx(1.0, abs=1e-4)
        assert stats.kept_share == 1.0


def test_a_gap_is_refused(one: GrpoTrainer) -> None:
    gap = one.sampler_trainer_gap(make_groups(1)[0].trajectories)
    assert gap.mean > 0.1
    with pytest.raises(SwerveError, match=r"disagree by .* task t0, attempt \d, token \d+"):
        check_gap(gap, 1e-3)
    nothing = make_trajectory("t", 0, 8, status=EpisodeStatus.ERROR, reward_is_none=True)
    with pytest.raises(SwerveError, match="no sampled token"):
        check_gap(one.sampler_trainer_gap([nothing]), 1e-3)
    broken = make_trajectory("t", 0, 8, behaviour_logprobs=np.full(8, np.nan, np.float32))
    with pytest.raises(SwerveError, match="disagree by inf"):
        check_gap(one.sampler_trainer_gap([broken]), 1e-3)


def test_one_list_of_tokens_is_scored_as_in_a_row(one: GrpoTrainer) -> None:
    trajectory = make_trajectory("t", 0, 20)
    alone = one.token_logprobs(trajectory.tokens.tolist())
    np.testing.assert_allclose(alone, one.trajectory_logprobs([trajectory])[0], atol=1e-5)
    assert alone[0] == 0


# -------------------------------------------------------------------------------------------------- the update


def test_a_step_moves_the_policy_towards_rewarded_tokens_and_leaves_the_router(one: GrpoTrainer) -> None:
    before = one.state()
    groups = make_groups(2)

    def objective() -> float:
        return sum(
            float(advantage * lp[trajectory.sampled].sum())
            for group in groups
            for trajectory, advantage, lp in zip(
                group.trajectories, group.advantages, one.trajectory_logprobs(group.trajectories), strict=True
            )
        )

    start = objective()
    stats = one.step(one.prepare(groups), learning_rate=1e-3)
    assert objective() > start
    assert stats.step == one.version == 1
    assert stats.update_norm > 0
    after = one.state()
    for name, value in leaves(before.params).items():
        if "router" in name:
            np.testing.assert_array_equal(leaves(after.params)[name], value)
    assert all(not value.any() for name, value in leaves(after.optimizer).items() if "router" in name)


def test_a_run_compiles_each_program_once_and_ahead(one: GrpoTrainer) -> None:
    before = one.state()
    one.warm_up()
    after = one.state()
    assert after.version == before.version
    for tree in ("params", "optimizer"):
        jax.tree.map(np.testing.assert_array_equal, getattr(after, tree), getattr(before, tree))
    assert one.num_compiled == 2
    for step, num_groups in enumerate((1, 3, 2)):
        one.step(one.prepare(make_groups(num_groups)), learning_rate=RATE / (step + 1))
    assert one.num_compiled == 2  # whatever tests ran before


def test_rows_twice_as_long_where_a_sequence_needs_them_give_the_same_gradient(one: GrpoTrainer) -> None:
    groups = make_groups()
    short = make_trainer(row_length=CONTEXT // 2, rows_per_micro_batch=4)
    batch = short.prepare(groups)
    assert max(len(t.tokens) for g in groups for t in g.trajectories) > CONTEXT // 2
    assert batch.packed.micro_batches[0].tokens.shape == (2, CONTEXT)
    expected, _ = gradient(one, list(one.prepare(groups).packed.micro_batches))
    assert_close(gradient(short, list(batch.packed.micro_batches))[0], expected)
    scored, wanted = (trainer.trajectory_logprobs(groups[0].trajectories) for trainer in (short, one))
    for a, b in zip(scored, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


def test_a_gradient_that_is_not_finite_changes_nothing(one: GrpoTrainer) -> None:
    one.step(one.prepare(make_groups(1)), learning_rate=RATE)
    before = one.state()
    group = make_groups(1)[0]
    broken = dataclasses.replace(group, advantages=np.full(4, 3e38, np.float32))
    with pytest.raises(NonFiniteGradientError, match="step 2: the gradient's norm is"):
        one.step(one.prepare([broken]), learning_rate=RATE)
    after = one.state()
    assert after.version == before.version == 1
    assert_same(after.params, before.params)
    assert_same(after.optimizer, before.optimizer)
    one.step(one.prepare([group]), learning_rate=RATE)
    assert one.version == 2


def assert_refused(trainer: GrpoTrainer) -> None:
    """One sequence of a batch holds a token whose embedding is not finite: others are, and no filter hides it."""
    group = make_groups(1)[0]
    others = {token for other in group.trajectories[1:] for token in other.tokens.tolist()}
    token = next(token for token in group.trajectories[0].tokens.tolist() if token not in others)
    params = models.initialise(CONFIG, jax.random.key(0))
    trainer.restore_weights({**params, "embedding": params["embedding"].at[token].set(np.inf)}, version=0)
    with pytest.raises(NonFiniteGradientError, match="step 1"):
        trainer.step(trainer.prepare([group]), learning_rate=RATE)


def test_a_sequence_that_is_not_finite_refuses_the_update(one: GrpoTrainer) -> None:
    assert_refused(one)


def test_weights_that_are_no_numbers_are_named_as_the_cause_where_every_filter_acts(gated: GrpoTrainer) -> None:
    batch = gated.prepare(make_groups())
    params = models.initialise(CONFIG, jax.random.key(0))
    gated.restore_weights({**params, "final_norm": params["final_norm"] * np.nan}, version=0)
    with pytest.raises(NonFiniteGradientError, match="step 1: the trainer's log-probabilities are not a number"):
        gated.step(batch, learning_rate=RATE)
    assert gated.version == 0


@pytest.mark.slow
def test_a_sequence_that_is_not_finite_refuses_the_update_with_the_plain_head() -> None:
    assert_refused(make_trainer(execution=models.Execution(head="plain")))


def test_kl_to_the_starting_policy_is_zero_at_the_start_and_pulls_back_afterwards() -> None:
    trainer = make_trainer(dataclasses.replace(OPEN, kl_coefficient=0.5))
    flat = dataclasses.replace(make_groups(1)[0], advantages=np.zeros(4, np.float32))
    assert trainer.step(trainer.prepare([flat]), learning_rate=RATE).kl == pytest.approx(0.0, abs=1e-6)
    trainer.restore_weights(models.initialise(CONFIG, jax.random.key(1)), version=1)
    kls = [trainer.step(trainer.prepare([flat]), learning_rate=1e-3).kl for _ in range(6)]
    assert kls[0] > 1e-3
    assert kls[-1] < kls[0]


def test_state_restores_exactly(one: GrpoTrainer) -> None:
    groups = make_groups(2)

    def steps(count: int) -> TrainerState:
        for _ in range(count):
            one.step(one.prepare(groups), learning_rate=RATE)
        return one.state()

    first, straight = steps(1), steps(2)
    one.restore_weights(models.initialise(CONFIG, jax.random.key(7)), version=0)
    steps(1)
    one.restore(first)
    assert one.version == 1
    resumed = steps(2)
    assert resumed.version == straight.version == 3
    assert_same(resumed.params, straight.params)
    assert_same(resumed.optimizer, straight.optimizer)


def test_weights_alone_leave_the_moments_at_zero(one: GrpoTrainer) -> None:
    one.step(one.prepare(make_groups(1)), learning_rate=RATE)
    params = models.initialise(CONFIG, jax.random.key(3))
    one.restore_weights(params, version=5)
    state = one.state()
    assert one.version == 5
    assert_same(state.params, params)
    assert not any(leaf.any() for leaf in leaves(state.optimizer).values())


def test_the_callers_weights_survive(one: GrpoTrainer) -> None:
    params = models.initialise(CONFIG, jax.random.key(0))
    one.restore_weights(params, version=0)
    kept = one.params
    one.step(one.prepare(make_groups(1)), learning_rate=RATE)
    assert all(not leaf.is_deleted() for leaf in jax.tree.leaves(params))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(kept))  # donated


# ------------------------------------------------------------------------------------------------- the refusals


def test_a_batch_for_other_weights_is_refused(one: GrpoTrainer) -> None:
    batch = one.prepare(make_groups(1))
    one.step(batch, learning_rate=RATE)
    with pytest.raises(SwerveError, match="made for weights version 0, the trainer is at 1"):
        one.step(batch, learning_rate=RATE)


def test_a_micro_batch_of_another_shape_is_refused(one: GrpoTrainer) -> None:
    micro_batch = one.prepare(make_groups(1)).packed.micro_batches[0]
    other = make_trainer(rows_per_micro_batch=1)
    with pytest.raises(SwerveError, match=r"shape \(2, 32\) does not fit a trainer of shape \(1, 32\)"):
        other.accumulate(micro_batch)


def test_surrogates_that_carry_the_ratio_take_no_weight_per_token() -> None:
    with pytest.raises(SwerveError, match=r"algorithm\.importance"):
        make_trainer(Algorithm(loss="clip", importance="token"))


def test_another_models_state_is_refused(one: GrpoTrainer) -> None:
    state = one.state()
    wider = jax.tree.map(lambda x: np.concatenate([x, x]), state.params)
    with pytest.raises(SwerveError, match=r"params of another model: .* expected float32"):
        one.restore(TrainerState(params=wider, optimizer=state.optimizer, version=0))
    with pytest.raises(SwerveError, match="is in only one of the two"):
        one.restore(TrainerState(params={"w": np.zeros(2)}, optimizer=state.optimizer, version=0))


def test_no_setting_turns_the_drop_audit_off() -> None:
    """The trainer's numbers of a step cannot be made without it, and no recipe has a say in it."""
    assert {"dropped_assignments_used", "dropless_replays"} <= {
        one.name for one in dataclasses.fields(StepStats) if one.default is dataclasses.MISSING
    }
    for setting in settings(TrainRecipe):
        assert not {"audit", "drops", "dropped", "replays"} & set(re.split(r"[._]", setting.key)), setting.key
