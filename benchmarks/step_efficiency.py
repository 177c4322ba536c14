"""How much reward a step buys for how much change of the policy, by the rule that turns the gradient into a step.

    python benchmarks/step_efficiency.py [--recipe recipes/demo.toml] [--batches 14]

Collects batches of training episodes with the starting policy and takes the policy gradient of each. A rule makes a
direction of one batch's gradient; how much reward that direction buys is its product with the mean gradient of the
*other* batches, so noise of the batch itself earns nothing. What it costs is the root mean square change of the sampled
tokens' log-probabilities. The ratio, in reward per episode for a change of one nat per token, says how far a budget of
change goes; absolute sizes do not matter, since the learning rate sets them.
"""

import argparse
import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swerve.cli.composition import episode_roles, load_policy, make_engine, prepare_jax, read_tasks
from swerve.cli.training import TrainingInputs, make_trainer
from swerve.config import TrainRecipe, read_recipe_as
from swerve.orchestrator.loop import training_settings
from swerve.rollout import collect
from swerve.trainer import make_group
from swerve.types import Group, Trajectory

Leaves = list[np.ndarray]
Rule = Callable[[Leaves, Leaves], Leaves]
PROBE_NORM = 0.02
"""Norm of the step whose change of log-probabilities is measured: small enough to be linear."""


def epsilon_rule(multiple: float) -> Rule:
    """Adam's second moment with an epsilon of so many times its root mean square over all parameters."""

    def direction(gradient: Leaves, second: Leaves) -> Leaves:
        size = np.sqrt(np.mean(np.concatenate([v.ravel() for v in second])))
        return [g / (np.sqrt(v) + multiple * size + 1e-12) for g, v in zip(gradient, second, strict=True)]

    return direction


RULES: dict[str, Rule] = {
    "sign (Adam's first step)": lambda gradient, second: [np.sign(g) for g in gradient],
    "Adam, epsilon 0": epsilon_rule(0.0),
    "Adam, epsilon 1 rms": epsilon_rule(1.0),
    "Adam, epsilon 10 rms": epsilon_rule(10.0),
    "Adam, epsilon 100 rms": epsilon_rule(100.0),
    "the gradient itself": lambda gradient, second: gradient,
}


async def sample(inputs: TrainingInputs, num_batches: int) -> list[list[Group]]:
    """Batches of groups, all sampled by the starting policy, each of tasks of its own."""
    recipe, policy = inputs.recipe, inputs.policy
    prompts = recipe.rollout.prompts_per_step
    tasks = inputs.tasks.train[: num_batches * prompts]
    batches = []
    async with episode_roles(recipe, tasks, policy.tokenizer, make_engine(policy, recipe)) as roles:
        for step in range(num_batches):
            attempts = await collect(
                tasks[step * prompts : (step + 1) * prompts],
                recipe.rollout.generations_per_prompt,
                roles=roles,
                settings=training_settings(recipe),
                seed=recipe.run.seed,
                step=step,
            )
            batches.append([make_group(group, "rloo") for group in attempts])
            print(f"batch {step + 1} of {num_batches}: reward {_reward(attempts):.3f}", flush=True)
    return batches


def _reward(attempts: Sequence[Sequence[Trajectory]]) -> float:
    return float(np.mean([one.reward for group in attempts for one in group if one.reward is not None]))


def gradient(trainer: Any, groups: Sequence[Group]) -> Leaves:
    """Gradient of the reward per episode, ascending."""
    trainer._accumulated = None
    batch = trainer.prepare(groups)
    for micro_batch in batch.packed.micro_batches:
        trainer.accumulate(micro_batch)
    accumulated = jax.device_get(trainer._accumulated)
    trainer._accumulated = None
    return [-leaf / batch.stats.num_sequences for leaf in jax.tree.leaves(accumulated.gradients)]


def change_along(trainer: Any, probe: Sequence[Trajectory]) -> Callable[[Leaves], float]:
    """A measure of directions: how much the log-probabilities of a probe's sampled tokens change per unit along one.

    Args:
        trainer: At the starting weights; left at others.
        probe: Trajectories.

    Returns:
        Maps a direction to a root mean square, in nats.
    """
    start, tree = jax.device_get(jax.tree.leaves(trainer.params)), jax.tree.structure(trainer.params)
    before = trainer.trajectory_logprobs(probe)

    def measure(direction: Leaves) -> float:
        size = PROBE_NORM / np.sqrt(sum(float(np.vdot(d, d)) for d in direction))
        moved = [jnp.asarray(p + size * d, jnp.float32) for p, d in zip(start, direction, strict=True)]
        trainer.restore_weights(jax.tree.unflatten(tree, moved), 0)
        after = trainer.trajectory_logprobs(probe)
        moves = [(new - old)[one.sampled] for one, old, new in zip(probe, before, after, strict=True)]
        return float(np.sqrt(np.mean(np.concatenate(moves) ** 2))) / size

    return measure


def main() -> None:
    """Collect, differentiate, tabulate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", type=Path, default=Path("recipes/demo.toml"))
    parser.add_argument("--batches", type=int, default=14)
    arguments = parser.parse_args()
    prepare_jax()
    recipe = read_recipe_as(TrainRecipe, arguments.recipe)
    inputs = TrainingInputs(
        recipe=recipe,
        tasks=read_tasks(recipe.tasks, 1),
        policy=load_policy(recipe.policy, recipe.run.seed),
    )
    most = len(inputs.tasks.train) // recipe.rollout.prompts_per_step
    if not 3 <= arguments.batches <= most:
        parser.error(
            f"--batches {arguments.batches}: must be 3 to {most}, for no task of {inputs.tasks.files[0]} is asked twice"
        )
    batches = asyncio.run(sample(inputs, arguments.batches))
    trainer = make_trainer(inputs.recipe, inputs.policy.config, inputs.policy.params)
    gradients = [gradient(trainer, batch) for batch in batches]
    second = [np.mean([g**2 for g in leaf], axis=0) for leaf in zip(*gradients, strict=True)]
    total = [np.sum(leaf, axis=0) for leaf in zip(*gradients, strict=True)]
    measure = change_along(trainer, [one for group in batches[-1] for one in group.trajectories])
    print(f"\n| rule | reward per episode for a change of 1 nat per token |\n|{'---|' * 2}")
    for name, rule in RULES.items():
        bought, paid = [], []
        for i, own in enumerate(gradients[:-1]):
            direction = rule(own, second)
            others = [(all_ - g) / (len(gradients) - 1) for all_, g in zip(total, own, strict=True)]
            bought.append(sum(float(np.vdot(d, g)) for d, g in zip(direction, others, strict=True)))
            if i < 3:
                paid.append(measure(direction))
        ratios = np.array(bought) / np.mean(paid)
        error = ratios.std(ddof=1) / np.sqrt(len(ratios))
        print(f"| {name} | {ratios.mean():.3f} ± {error:.3f} |", flush=True)


if __name__ == "__main__":
    main()
