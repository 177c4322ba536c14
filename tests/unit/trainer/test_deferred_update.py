"""An update that is held back: what the trainer still does, what it refuses, and that nothing comes out differently."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from swerve.trainer import GrpoTrainer, StagingRefusedError, UpdateDeferredError
from swerve.types import PackedMicroBatch, SwerveError

from .samples import make_groups, make_trainer


@pytest.fixture(scope="module")
def start() -> tuple[GrpoTrainer, Any]:
    trainer = make_trainer()
    return trainer, trainer.state()


@pytest.fixture
def trainer(start: tuple[GrpoTrainer, Any]) -> GrpoTrainer:
    trainer, state = start
    trainer._due = None  # as a new one
    trainer.restore(state)
    return trainer


def begun(trainer: GrpoTrainer) -> tuple[Any, list[PackedMicroBatch]]:
    """A batch that is trained on but not applied."""
    batch = trainer.prepare(make_groups())
    trainer.begin(batch)
    micro_batches = list(batch.packed.micro_batches)
    for micro_batch in micro_batches:
        trainer.accumulate(micro_batch)
    return batch, micro_batches


REFUSED: dict[str, Callable[[GrpoTrainer, Any, PackedMicroBatch], object]] = {
    "another micro-batch": lambda trainer, batch, micro_batch: trainer.accumulate(micro_batch),
    "another batch": lambda trainer, batch, micro_batch: trainer.begin(batch),
    "a second update": lambda trainer, batch, micro_batch: trainer.update(1e-2, batch.stats, time.perf_counter()),
    "a second deferral": lambda trainer, batch, micro_batch: trainer.defer_update(1e-2, batch.stats, 0.0),
    "a whole step": lambda trainer, batch, micro_batch: trainer.step(batch, learning_rate=1e-2),
    "weights to hand over": lambda trainer, batch, micro_batch: trainer.params,
    "weights to save": lambda trainer, batch, micro_batch: trainer.weights(),
    "a checkpoint": lambda trainer, batch, micro_batch: trainer.state(),
    "log-probabilities": lambda trainer, batch, micro_batch: trainer.logprobs(micro_batch),
    "an evaluation": lambda trainer, batch, micro_batch: trainer.trajectory_logprobs(make_groups()[0].trajectories),
    "a probe": lambda trainer, batch, micro_batch: trainer.token_logprobs([1, 2, 3]),
    "a comparison": lambda trainer, batch, micro_batch: trainer.sampler_trainer_gap(make_groups()[0].trajectories),
    "a rehearsal": lambda trainer, batch, micro_batch: trainer.warm_up(),
    "other weights": lambda trainer, batch, micro_batch: trainer.restore_weights({}, 3),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_see_or_change_the_weights_is_refused(trainer: GrpoTrainer, what: str) -> None:
    batch, micro_batches = begun(trainer)
    trainer.defer_update(1e-2, batch.stats, time.perf_counter())
    with pytest.raises(UpdateDeferredError, match="holds the update to version 1 back"):
        REFUSED[what](trainer, batch, micro_batches[0])
    assert trainer.finish_update().step == 1  # and the update is still to be had


def test_a_deferred_update_with_a_staged_micro_batch_equals_a_plain_one(trainer: GrpoTrainer) -> None:
    def run(staged: bool) -> Any:
        batch, _ = begun(trainer)
        following = trainer.prepare(make_groups(3), ahead=1)
        trainer.defer_update(1e-2, batch.stats, time.perf_counter())
        placed = trainer.stage(following.packed.micro_batches[0]) if staged else None
        trainer.finish_update()
        trainer.begin(following)
        for index, micro_batch in enumerate(following.packed.micro_batches):
            trainer.accumulate(placed if placed and index == 0 else micro_batch)
        trainer.update(1e-2, following.stats, time.perf_counter())
        return trainer.state()

    before = trainer.state()
    staged = run(staged=True)
    trainer.restore(before)
    jax.tree.map(np.testing.assert_array_equal, staged.params, run(staged=False).params)


def test_nothing_is_staged_but_between_a_batch_and_its_update(trainer: GrpoTrainer) -> None:
    batch, micro_batches = begun(trainer)
    with pytest.raises(StagingRefusedError, match="no update is held back"):
        trainer.stage(micro_batches[0])
    trainer.defer_update(1e-2, batch.stats, time.perf_counter())
    other = make_trainer(rows_per_micro_batch=1).prepare(make_groups()).packed.micro_batches[0]
    with pytest.raises(StagingRefusedError, match="shape"):
        trainer.stage(other)
    trainer.finish_update()
    with pytest.raises(SwerveError, match="no update is held back"):
        trainer.finish_update()


def test_a_batch_is_prepared_for_the_weights_that_will_be_there(trainer: GrpoTrainer) -> None:
    ahead = trainer.prepare(make_groups(), ahead=1)
    assert ahead.stats.staleness_max == 1  # sampled by version 0, trained on at version 1
    with pytest.raises(SwerveError, match="made for weights version 1, the trainer is at 0"):
        trainer.begin(ahead)


def test_an_update_without_a_micro_batch_is_refused(trainer: GrpoTrainer) -> None:
    with pytest.raises(SwerveError, match="nothing to update with"):
        trainer.defer_update(1e-2, trainer.prepare(make_groups()).stats, 0.0)
