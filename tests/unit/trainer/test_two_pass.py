"""One pass gives the gradient that two passes give, however a batch is cut and ordered, whatever the loss."""

import dataclasses
import itertools
import typing
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swerve import models
from swerve.config.schema import Algorithm, Optimizer
from swerve.trainer import Adam, TrainingBatch, make_batch, make_group
from swerve.trainer.objective import Scored, Sums, micro_batch_objective
from swerve.trainer.programs import Accumulated, Objective, Programs
from swerve.trainer.two_pass import TwoPasses, on_device, slopes
from swerve.types import Group, PackedMicroBatch, Trajectory

from .samples import CONFIG, CONTEXT, make_trajectory

# Trainer less sampler, nats per token: exact, within the gate, below it, above it, beyond the error filter.
SHIFTS = (0.0, 0.0004, -0.02, 0.01, 1.5, -0.0003)

Slopes = dict[tuple[str, int], np.ndarray]
"""Of each attempt, by task and index, for each of its tokens."""


def groups_of(num_groups: int = 3, size: int = 4) -> list[Group]:
    """Attempts of 8 to 17 tokens, and one in each group that fills the context."""
    lengths = (8, 11, 17, CONTEXT)
    return [
        make_group([make_trajectory(f"t{g}", i, lengths[(g + i) % 4]) for i in range(size)]) for g in range(num_groups)
    ]


def batch_of(groups: Sequence[Group], algorithm: Algorithm, rows: int) -> TrainingBatch:
    return make_batch(
        groups,
        algorithm=algorithm,
        context_length=CONTEXT,
        row_length=CONTEXT,
        rows_per_micro_batch=rows,
        weights_version=0,
    )


def trainer_logprobs(groups: Sequence[Group], micro: PackedMicroBatch, spread: float) -> np.ndarray:
    """As a trainer would score the rows: the sampler's values, shifted for each attempt, and noise for each token."""
    found = np.zeros(micro.tokens.shape, np.float32)
    for index, one in enumerate([one for group in groups for one in group.trajectories]):
        where = micro.sequence_ids == index
        rng = np.random.default_rng([one.sample_index, int(one.task_id[1:])])
        noise = rng.permuted(np.linspace(-spread, spread, one.num_sampled_tokens))
        shift = np.zeros(len(one.tokens))
        shift[one.sampled] = shift_of(one) + noise
        found[where] = (one.behaviour_logprobs + shift)[micro.positions[where]]
    return found


def shift_of(one: Trajectory) -> float:
    return SHIFTS[(one.sample_index + 5 * int(one.task_id[1:])) % len(SHIFTS)]


def by_attempt(groups: Sequence[Group], micro_batches: Sequence[PackedMicroBatch], values: list[Any]) -> Slopes:
    flat = [one for group in groups for one in group.trajectories]
    return {
        (one.task_id, one.sample_index): np.asarray(value)[micro.sequence_ids == index]
        for micro, value in zip(micro_batches, values, strict=True)
        for index, one in enumerate(flat)
        if (micro.sequence_ids == index).any()
    }


def in_one_pass(
    algorithm: Algorithm, groups: Sequence[Group], rows: int, spread: float, order: int = 1
) -> tuple[Slopes, Sums]:
    """Numerators differentiated micro-batch by micro-batch, and one division."""
    micro_batches = list(batch_of(groups, algorithm, rows).packed.micro_batches)[::order]

    def of(lp: jax.Array, reference: jax.Array | None, scored: Scored) -> tuple[jax.Array, Sums]:
        def numerator(lp: jax.Array) -> tuple[jax.Array, Sums]:
            full = scored._replace(logprobs=lp, reference_logprobs=reference)
            return micro_batch_objective(algorithm, full, CONTEXT)

        return jax.grad(numerator, has_aux=True)(lp)

    total, gradients = Sums.zero(), []
    for micro in micro_batches:
        lp = jnp.asarray(trainer_logprobs(groups, micro, spread))
        masked, segments = jnp.asarray(micro.loss_mask), jnp.asarray(micro.segment_ids)
        behaviour, advantages = jnp.asarray(micro.behaviour_logprobs), jnp.asarray(micro.advantages)
        scored = Scored(lp, jnp.zeros_like(lp), None, behaviour, advantages, masked, segments)
        gradient, sums = of(lp, lp - 0.3 * masked if algorithm.kl_coefficient else None, scored)
        gradients.append(gradient)
        total = total.add(sums)
    divided = [gradient / total.denominator for gradient in gradients]
    return by_attempt(groups, micro_batches, divided), total


def in_two_passes(algorithm: Algorithm, groups: Sequence[Group], rows: int, spread: float) -> Slopes:
    micro_batches = list(batch_of(groups, algorithm, rows).packed.micro_batches)
    lp = [trainer_logprobs(groups, micro, spread) for micro in micro_batches]
    references = [one - np.float32(0.3) * micro.loss_mask for one, micro in zip(lp, micro_batches, strict=True)]
    found = slopes(algorithm, micro_batches, lp, references if algorithm.kl_coefficient else None, CONTEXT)
    return by_attempt(groups, micro_batches, found)


def assert_alike(found: Slopes, expected: Slopes) -> None:
    assert found.keys() == expected.keys()
    largest = max(np.abs(value).max() for value in expected.values())
    assert largest > 1e-3
    for key, value in expected.items():
        np.testing.assert_allclose(found[key], value, rtol=2e-5, atol=1e-6 * largest, err_msg=str(key))


def variants() -> list[Algorithm]:
    """Every loss with every correction; normaliser and divergence stand beside it, and each is tried once."""
    found = [Algorithm(logprob_error_threshold=3.0, normaliser=each) for each in choices("normaliser")]
    for loss, importance in itertools.product(choices("loss"), choices("importance")):
        changes: dict[str, Any] = {"loss": loss, "importance": importance}
        if loss == "gspo" and importance == "sequence_mask":
            changes |= {"sequence_gate_low": 0.5, "sequence_gate_high": 3.0}
        found.append(Algorithm(logprob_error_threshold=3.0, normaliser="sequence", **changes))
    for estimator in choices("kl_estimator"):
        found.append(Algorithm(kl_coefficient=0.1, kl_estimator=estimator, normaliser="sequence"))
    return [one for one in found if not list(one.contradictions())]


def choices(key: str) -> tuple[Any, ...]:
    """What a setting of the algorithm may be."""
    return typing.get_args(typing.get_type_hints(Algorithm)[key])


def name_of(algorithm: Algorithm) -> str:
    divergence = algorithm.kl_estimator if algorithm.kl_coefficient else "no divergence"
    return f"{algorithm.loss}, {algorithm.importance}, {algorithm.normaliser}, {divergence}"


@pytest.mark.parametrize("algorithm", variants(), ids=name_of)
def test_every_loss_has_the_slopes_that_two_passes_find(algorithm: Algorithm) -> None:
    groups = groups_of()
    found, sums = in_one_pass(algorithm, groups, 2, spread=0.6)
    assert_alike(found, in_two_passes(algorithm, groups, 2, spread=0.6))
    assert 0 < sums.num_sequences < sums.num_candidates < 12


@pytest.mark.parametrize("normaliser", ["token", "sequence", "constant"])
def test_slopes_do_not_depend_on_the_cut_or_the_order_where_filters_and_gate_act(normaliser: str) -> None:
    algorithm = Algorithm(normaliser=normaliser)  # pyright: ignore[reportArgumentType]
    groups = groups_of()
    expected = in_two_passes(algorithm, groups, 1, spread=0.02)
    shuffled = [
        dataclasses.replace(g, trajectories=g.trajectories[::-1], advantages=g.advantages[::-1]) for g in groups
    ]
    for given, rows, order in [(groups, 1, 1), (groups, 2, -1), (shuffled[::-1], 2, 1), (groups, 4, 1)]:
        found, sums = in_one_pass(algorithm, given, rows, 0.02, order)
        assert_alike(found, expected)
        # The overlong filter left three of twelve out, the error filter some, the gate some.
        assert sums.num_candidates == 9
        assert 0 < sums.num_gate_passed < sums.num_sequences < sums.num_candidates


def test_the_gradient_of_a_model_is_that_of_two_passes_however_rows_are_cut() -> None:
    """The benchmark's algorithm, its filters and its gate at work."""
    algorithm, params = Algorithm(), models.initialise(CONFIG, jax.random.key(0))
    objective = Objective(
        config=CONFIG,
        algorithm=algorithm,
        temperature=1.0,
        context_length=CONTEXT,
        freeze_router=True,
        router_aux_coefficient=0.0,
        execution=models.Execution(),
    )
    two, groups = TwoPasses(objective), groups_of()
    micro_batches = list(batch_of(groups, algorithm, 2).packed.micro_batches)
    scored = by_attempt(groups, micro_batches, [two.score(params, on_device(one)) for one in micro_batches])
    groups = [
        dataclasses.replace(group, trajectories=tuple(map(sampled_like, group.trajectories, itertools.repeat(scored))))
        for group in groups
    ]
    expected = two.gradient(params, batch_of(groups, algorithm, 2).packed.micro_batches)
    programs = Programs(objective, Adam(settings=Optimizer()))
    for rows in (1, 4):
        accumulated = Accumulated(programs.zeros(params), Sums.zero())
        for micro_batch in batch_of(groups, algorithm, rows).packed.micro_batches:
            accumulated, _ = programs.accumulate(params, None, accumulated, on_device(micro_batch))
        assert 0 < accumulated.sums.num_gate_passed < accumulated.sums.num_sequences < 12
        for (path, wanted), found in zip(
            jax.tree_util.tree_leaves_with_path(expected), jax.tree.leaves(accumulated.gradients), strict=True
        ):
            wanted, found = np.asarray(wanted), np.asarray(found / accumulated.sums.denominator)
            allowed = 1e-4 * np.abs(wanted).max() + 1e-8
            np.testing.assert_allclose(found, wanted, rtol=0, atol=allowed, err_msg=f"{rows} {path}")


def sampled_like(one: Trajectory, scored: Slopes) -> Trajectory:
    """The attempt as if its tokens had been sampled with the given log-probabilities less its shift."""
    lp = scored[one.task_id, one.sample_index] - shift_of(one)
    return dataclasses.replace(one, behaviour_logprobs=np.where(one.sampled, lp, 0).astype(np.float32))
