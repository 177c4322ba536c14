"""Runs the arms of a comparison: the same weights, the same trajectories, real updates."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from swerve import parallel
from swerve.cli.composition import LoadedPolicy
from swerve.cli.training import make_trainer
from swerve.config import AbRecipe, TrainRecipe
from swerve.orchestrator import Stepper
from swerve.telemetry import PhaseTimer
from swerve.trainer import (
    GrpoTrainer,
    StepStats,
    SyntheticShape,
    TrainingBatch,
    learning_rate_at,
    synthetic_groups,
    with_random_advantages,
)
from swerve.types import Group, SwerveError

if TYPE_CHECKING:
    from swerve.trainer import TrainerState

Fault = Callable[[GrpoTrainer], AbstractContextManager[None]]
"""Spoils a trainer while the context lasts."""
Say = Callable[[str], None]

_SPREAD = 0.1
"""Standard deviation of the sampler's log-probabilities about the trainer's, nats."""


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step of an arm did.

    Attributes:
        stats: Its numbers.
        gradient: Of the batch, divided, before clipping, by parameter; as the optimizer got it.
        weights: After the step, by parameter.
    """

    stats: StepStats
    gradient: dict[str, np.ndarray]
    weights: dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What the candidate is held against.

    Attributes:
        start: Weights that all arms begin with, by parameter.
        groups: What all arms train on, step by step.
        records: Steps of the reference.
        repeat: The same again, which shows the noise.
    """

    start: dict[str, np.ndarray]
    groups: list[list[Group]]
    records: list[StepRecord]
    repeat: list[StepRecord]


def trainer_of(arm: TrainRecipe, policy: LoadedPolicy) -> GrpoTrainer:
    """The trainer of an arm, at its start."""
    return make_trainer(arm, policy.config, policy.params)


def run_reference(recipe: AbRecipe, arm: TrainRecipe, policy: LoadedPolicy, say: Say) -> Reference:
    """Draw what all arms train on, and run the reference twice.

    Args:
        recipe: The comparison.
        arm: The reference's training recipe.
        policy: Where all arms start.
        say: Told of each step.
    """
    trainer = trainer_of(arm, policy)
    first = trainer.state()
    seed = recipe.input.seed
    groups = sampled_by(trainer, drawn_steps(seed, arm, policy.config.vocab_size), seed)
    runs = []
    for name in ("reference", "reference again"):
        trainer.restore(first)
        runs.append(list(_run(trainer, arm, groups, lambda line, name=name: say(f"{name}, {line}"))))
    return Reference(start=parallel.flatten_names(first.params), groups=groups, records=runs[0], repeat=runs[1])


def run_candidate(
    reference: Reference, arm: TrainRecipe, trainer: GrpoTrainer, say: Say, fault: Fault | None = None
) -> list[StepRecord]:
    """Run the candidate on what the reference ran on, up to a step that its trainer refuses.

    Args:
        reference: From `run_reference`.
        arm: The candidate's training recipe.
        trainer: Its trainer, at its start.
        say: Told of each step.
        fault: Spoils it.
    """
    records: list[StepRecord] = []
    with fault(trainer) if fault else contextlib.nullcontext():
        try:
            for record in _run(trainer, arm, reference.groups, lambda line: say(f"candidate, {line}")):
                records.append(record)
        except SwerveError as error:
            say(f"candidate, {error}")
    return records


def drawn_steps(seed: int, recipe: TrainRecipe, vocab_size: int) -> list[list[Group]]:
    """Groups of each step: synthetic trajectories with random advantages."""
    rollout = recipe.rollout
    shape = SyntheticShape(context_length=rollout.context_length)
    return [
        with_random_advantages(
            synthetic_groups(
                shape,
                rollout.prompts_per_step,
                rollout.generations_per_prompt,
                vocab_size=vocab_size,
                seed=seed + 1000 * step,
            ),
            seed + 1000 * step,
        )
        for step in range(recipe.training.num_steps)
    ]


def sampled_by(trainer: GrpoTrainer, steps: list[list[Group]], seed: int) -> list[list[Group]]:
    """The steps as if a sampler had drawn them that almost agrees with the trainer's weights."""
    rng = np.random.default_rng([seed, 4])

    def sampled(group: Group) -> Group:
        scored = trainer.trajectory_logprobs(group.trajectories)
        noisy = [lp + rng.normal(0, _SPREAD, lp.size) for lp in scored]
        trajectories = tuple(
            replace(one, behaviour_logprobs=np.where(one.sampled, lp, 0.0).astype(np.float32))
            for one, lp in zip(group.trajectories, noisy, strict=True)
        )
        return replace(group, trajectories=trajectories)

    return [[sampled(group) for group in groups] for groups in steps]


def _run(trainer: GrpoTrainer, recipe: TrainRecipe, steps: Sequence[list[Group]], say: Say) -> Iterator[StepRecord]:
    """Train on all steps, from batch to batch as a run does."""
    stepper = Stepper(
        trainer, PhaseTimer(), pipelined=recipe.training.pipelined, staged=recipe.training.staged, say=say
    )
    before = trainer.state()
    for index, groups in enumerate(steps):
        stepper.begin(stepper.prepared or trainer.prepare(groups))

        def following(index: int = index) -> TrainingBatch | None:
            return trainer.prepare(steps[index + 1], ahead=1) if index + 1 < len(steps) else None

        stats = stepper.finish(learning_rate_at(recipe.optimizer, index + 1), following)
        after = trainer.state()
        gradient = _gradient(before, after, stats, recipe.optimizer.beta1)
        say(f"step {index + 1} of {len(steps)}: loss {stats.loss:.4f}, {stats.train_s:.1f} s")
        yield StepRecord(stats=stats, gradient=gradient, weights=parallel.flatten_names(after.params))
        before = after


def _gradient(before: TrainerState, after: TrainerState, stats: StepStats, decay: float) -> dict[str, np.ndarray]:
    """What the optimizer was given, from how it moved the mean of gradients."""
    moved: dict[str, Any] = parallel.flatten_names(after.optimizer["mu"])
    means: dict[str, Any] = parallel.flatten_names(before.optimizer["mu"])
    scale = (1 - decay) * (stats.clip_scale or 1.0)
    return {name: (moved[name] - np.float32(decay) * means[name]) / np.float32(scale) for name in moved}
