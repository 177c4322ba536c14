"""Play one episode of a task and print it readably.

Shows the problem, every turn with its tool calls and what came of them, and the verdict of the hidden tests. The task
is looked for among the training and the held-out tasks of the recipe, or in a task file. With --oracle the gold patch
is played: whatever lies between a policy and its reward works if that earns 1.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from swerve.cli.recipe_arguments import add_setting_arguments, overrides_from
from swerve.config import TrainRecipe, read_recipe_as
from swerve.types import SwerveError

if TYPE_CHECKING:
    from swerve.types import Task, Trajectory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the task, the recipe and its settings."""
    parser.add_argument("task", metavar="TASK_ID", help="id of the task, or `first` for the first held-out one")
    parser.add_argument(
        "--recipe", type=Path, default=Path("recipes/demo.toml"), metavar="RECIPE", help="recipe file (%(default)s)"
    )
    parser.add_argument("--tasks", default="", metavar="FILE", help="look for it here: a task file or a family")
    parser.add_argument(
        "--oracle",
        action="store_true",
        help="play the gold patch in place of the policy, within the task's own limits",
    )
    parser.add_argument("--sample", type=int, default=0, metavar="INT", help="attempt; another number, another seed")
    parser.add_argument("--json", action="store_true", help="print the trajectory as JSON")
    add_setting_arguments(parser, [TrainRecipe])


def run(arguments: argparse.Namespace) -> int:
    """Plays it; exits with 0 whether or not the repair was right, and with 1 if the episode failed."""
    from swerve.telemetry import trajectory_to_json

    recipe = read_recipe_as(TrainRecipe, arguments.recipe, overrides_from(arguments))
    if arguments.oracle and recipe.agent.command:
        raise SwerveError(
            "--oracle plays in place of a policy, but agent.command names a program of its own: choose one"
        )
    task = _task(recipe, arguments.task, arguments.tasks)
    trajectory = asyncio.run(play(recipe, task, arguments.sample, oracle=arguments.oracle))
    if arguments.json:
        print(json.dumps(trajectory_to_json(trajectory)))
    else:
        print(describe(task, trajectory))
    return int(not trajectory.status.is_valid_sample)


def _task(recipe: TrainRecipe, wanted: str, source: str) -> Task:
    from swerve.cli.composition import read_tasks, tasks_named
    from swerve.environments import find_task

    if source:
        tasks, first, where = tasks_named(source), 0, f"--tasks {source}"
    else:
        sets = read_tasks(recipe.tasks)
        tasks, first = [*sets.train, *sets.validation], len(sets.train)
        where = " or ".join(map(str, sets.files))
    return tasks[first] if wanted == "first" else find_task(tasks, wanted, where)


async def play(recipe: TrainRecipe, task: Task, sample_index: int, *, oracle: bool = False) -> Trajectory:
    """One episode of a task with the recipe's policy, at the sampling of its training, or with one that knows."""
    from swerve.cli.composition import (
        environment_of,
        episode_roles,
        load_policy,
        make_engine,
        make_renderer,
        prepare_jax,
        prove_weights,
    )
    from swerve.orchestrator import training_settings
    from swerve.rollout import OraclePolicy, derive_seed, gold_calls, run_episode

    prepare_jax()
    policy = load_policy(recipe.policy, recipe.run.seed)
    settings = training_settings(recipe)
    if oracle:
        turns = gold_calls(environment_of([task]).gold_work(task))
        engine = OraclePolicy(make_renderer(recipe.agent, policy.tokenizer), turns)
        limits = dataclasses.replace(task.limits, max_turns=max(task.limits.max_turns, len(turns)))
        settings = dataclasses.replace(settings, limits=limits)
    else:
        alone = dataclasses.replace(recipe, rollout=dataclasses.replace(recipe.rollout, num_slots=1))
        engine = make_engine(policy, alone)
    async with episode_roles(recipe, [task], policy.tokenizer, engine) as roles:
        prove_weights(engine, policy, None, recipe, task)
        return await run_episode(
            task,
            sample_index,
            roles=roles,
            settings=settings,
            seed=derive_seed(recipe.run.seed, 0, task.id, sample_index),
        )


def describe(task: Task, trajectory: Trajectory) -> str:
    """An episode in words."""
    from swerve.rollout import guard_notes

    blocks = [f"task {task.id}", f"user\n{_indent(task.problem_statement)}"]
    for number, turn in enumerate(trajectory.turns, start=1):
        blocks.append(f"turn {number}\n{_indent(turn.text)}")
        blocks += [f"result\n{_indent(observation)}" for observation in turn.observations]
    if notes := guard_notes([trajectory]):
        blocks.append("guards: " + ", ".join(notes))
    verdict = "no verdict" if trajectory.reward is None else f"reward {trajectory.reward:g}"
    statuses = list(trajectory.test_statuses.values())
    ran = len(statuses) - statuses.count("not_run")
    left = f" (not run: the other {len(statuses) - ran}, after the first failure)" if ran < len(statuses) else ""
    blocks.append(
        f"{trajectory.status.value}: {verdict}; {statuses.count('passed')} of {ran} tests passed{left}; "
        f"{trajectory.tokens.size} tokens, {trajectory.num_sampled_tokens} of them sampled"
        + (f"; {trajectory.error}" if trajectory.error else "")
    )
    return "\n\n".join(blocks)


def _indent(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())
