"""Small models and trajectories for the trainer's tests."""

import dataclasses

import jax
import numpy as np

from swerve import models
from swerve.config.schema import Algorithm, Optimizer
from swerve.trainer import GrpoTrainer, make_group
from swerve.types import EpisodeStatus, Group, Trajectory, Turn
from tiny import CONFIG

CONTEXT = 32

# Of everything: no gate, no filter, so that random behaviour log-probabilities are trained on.
OPEN = Algorithm(importance="none", logprob_error_threshold=float("inf"), overlong_filter=False)


def make_trainer(algorithm: Algorithm = OPEN, seed: int = 0, **options: object) -> GrpoTrainer:
    settings: dict[str, object] = {
        "algorithm": algorithm,
        "optimizer": Optimizer(),
        "context_length": CONTEXT,
        "row_length": CONTEXT,
        "rows_per_micro_batch": 2,
    }
    params = models.initialise(CONFIG, jax.random.key(seed))
    return GrpoTrainer(CONFIG, params, **(settings | options))  # pyright: ignore[reportArgumentType]


def make_trajectory(
    task: str, index: int, length: int, reward: float | None = None, *, reward_is_none: bool = False, **changes: object
) -> Trajectory:
    rng = np.random.default_rng([index, length, len(task)])
    sampled = np.zeros(length, bool)
    sampled[length // 3 : length // 2] = True
    sampled[-length // 4 :] = True
    base = Trajectory(
        task_id=task,
        sample_index=index,
        tokens=rng.integers(0, CONFIG.vocab_size, length).astype(np.int32),
        sampled=sampled,
        behaviour_logprobs=np.where(sampled, -3.0 + rng.normal(size=length), 0.0).astype(np.float32),
        weights_versions=np.where(sampled, 0, -1).astype(np.int32),
        status=EpisodeStatus.SUCCEEDED,
        reward=None if reward_is_none else float(index % 2) if reward is None else reward,
        turns=(Turn(text="", tool_names=("finish",), num_malformed_calls=0, observations=()),),
    )
    return dataclasses.replace(base, **changes)  # pyright: ignore[reportArgumentType]


def make_groups(num_groups: int = 2, size: int = 4, advantage: str = "leave_one_out") -> list[Group]:
    return [
        make_group([make_trajectory(f"t{g}", i, 8 + 3 * ((g + i) % 4)) for i in range(size)], advantage)
        for g in range(num_groups)
    ]


def with_trainer_logprobs(trainer: GrpoTrainer, groups: list[Group]) -> list[Group]:
    """The groups as if the trainer's own weights had sampled them."""
    made = []
    for group in groups:
        scored = trainer.trajectory_logprobs(group.trajectories)
        trajectories = tuple(
            dataclasses.replace(one, behaviour_logprobs=np.where(one.sampled, lp, 0).astype(np.float32))
            for one, lp in zip(group.trajectories, scored, strict=True)
        )
        made.append(dataclasses.replace(group, trajectories=trajectories))
    return made
