"""The reinforcement-learning loop.

    tasks in order --> collect (engine + sandboxes) --> groups --> train --> hand over --> metrics --> checkpoint
          ^                                                                                               |
          +------------------------------------------ next step <-----------------------------------------+

With `training.max_trajectory_age` 0 every trajectory is sampled by the weights it trains. With 1 the episodes of the
next step are played while this step trains, by the weights before its update; the update is handed over when they are
done, so every trajectory is of one version, and one update old when it is trained on:

    engine    episodes of k+1 by weights k-1         | episodes of k+2 by weights k           |
    trainer   train k ................. -> weights k | train k+1 ............ -> weights k+1  |
                                                     ^ hand-over

What a step draws follows from the recipe's seed and the step's number alone, so a run that was stopped anywhere goes
on from its last checkpoint as if it had not been: a checkpoint holds the episodes that were played ahead, and an
evaluation that is done is not done again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from swerve.config import TrainRecipe
from swerve.evaluation import EvalReport, evaluate
from swerve.orchestrator.roles import LoopRoles
from swerve.orchestrator.state import Attempts, LoopState
from swerve.orchestrator.stepper import Stepper
from swerve.rollout import (
    EpisodeSettings,
    ProgressCallback,
    collect,
    guard_notes,
    rollout_metrics,
    tool_call_warning,
)
from swerve.rollout import Progress as RolloutProgress
from swerve.telemetry import PhaseTimer, ThroughputMeter
from swerve.trainer import StepStats, TrainingBatch, check_gap, learning_rate_at, make_group
from swerve.types import EpisodeStatus, Limits, MachineError, SamplingParams, Trajectory

EVALUATION_SEED = 20_260_101
"""Seeds every evaluation of every run alike, so that two evaluations differ by the policies alone."""


class TrainingLoop:
    """Trains one policy by one recipe.

    Args:
        recipe: What to do.
        roles: Whom to do it with.
        state: Where to begin; a fresh one, or that of a checkpoint.
        save: Keeps the state after a step, and what it is worth if that is known: called with the trainer at rest.
        started: `time.perf_counter()` when the run, or its resumption, began; now by default.
    """

    def __init__(
        self,
        recipe: TrainRecipe,
        roles: LoopRoles,
        state: LoopState,
        save: Callable[[LoopState, float | None], None],
        started: float | None = None,
    ) -> None:
        self._recipe = recipe
        self._roles = roles
        self._state = state
        self._save = save
        profiler = roles.profiler
        self._phases = PhaseTimer(annotate=profiler.annotate) if profiler else PhaseTimer()
        self._throughput = ThroughputMeter()
        settings = recipe.training
        self._stepper = Stepper(
            roles.trainer,
            self._phases,
            pipelined=settings.pipelined,
            staged=settings.staged,
            say=roles.progress.say,
        )
        self._ahead: asyncio.Future[Attempts] | None = None
        self._notes: list[str] = []
        self._saved: LoopState | None = None
        self._last_reward: float | None = None
        self._row_began = time.perf_counter()
        self._started = time.perf_counter() if started is None else started
        self._seconds_before = state.seconds
        self._rewarded = asyncio.Event()

    @property
    def state(self) -> LoopState:
        """Everything that a resumed run goes on from, but for weights and moments."""
        return self._state

    async def run(self) -> LoopState:
        """Train from the state given to the recipe's end.

        Returns:
            The final state.

        Raises:
            SwerveError: Sampler and trainer disagree, or an update was refused.
            MachineError: No episode of a task, or of a step or an evaluation, could be played.
        """
        recipe = self._recipe
        compiling = asyncio.create_task(self._compile_ahead(), name="compile the trainer")
        try:
            if recipe.evaluation.before and self._state.step == 0:
                await self._evaluate()
            self._rewarded.set()
            await compiling
        finally:
            compiling.cancel()
            await asyncio.wait([compiling])
        record = self._roles.record
        if record:
            record.run_starts()
        self._begin_row()
        try:
            await self._train()
            if record:
                record.block_ends()
        finally:
            self._tell_notes()
            self._stepper.stop()
            if self._ahead:
                self._ahead.cancel()
                await asyncio.wait([self._ahead])
        if recipe.evaluation.after:
            await self._evaluate()
        if self._saved is None or dataclasses.replace(self._saved, seconds=self._state.seconds) != self._state:
            self._checkpoint()
        return self._state

    async def _train(self) -> None:
        recipe, last = self._recipe, self._recipe.training.num_steps
        while self._state.step < last and self._seconds() < recipe.training.time_limit_s:
            await self._step()
            every = recipe.evaluation.every
            if every and self._state.step % every == 0 and self._state.step < last:
                await self._evaluate()
            if self._checkpoint_follows(self._state.step):
                self._checkpoint()

    def _checkpoint_follows(self, step: int) -> bool:
        if self._recipe.mlperf.enabled:
            return step >= self._recipe.first_evaluation_step
        every = self._recipe.checkpoint.every
        return bool(every) and step % every == 0

    async def _compile_ahead(self) -> None:
        """Have the trainer's programs ready when the first step is, without delaying the first reward."""
        await self._rewarded.wait()
        if self._state.step < self._recipe.training.num_steps:
            await asyncio.to_thread(self._roles.trainer.warm_up)

    # ------------------------------------------------------------------------------------------------- one step

    async def _step(self) -> None:
        number, trainer = self._state.step + 1, self._roles.trainer
        if self._roles.profiler:
            with self._phases.phase("profile"):
                self._roles.profiler.begin_step(number)
        attempts = self._state.queue or await self._play(number)
        self._play_ahead(number + 1)
        batch = self._stepper.prepared or self._prepare(attempts)
        self._stepper.begin(batch)
        self._tell_notes()  # of the step before: the devices are busy now
        trajectories = [one for group in attempts for one in group]
        with self._phases.phase("log"):
            self._log_trajectories(number, "train", trajectories)
        stats = await self._finish(number)
        if self._roles.record:
            self._roles.record.updated(number)
        queue = await self._played_ahead(number + 1)
        with self._phases.phase("hand_over"):
            self._roles.publisher.publish(trainer.params, trainer.version)
        _, position = self._state.position.take(self._recipe.rollout.prompts_per_step)
        self._state = dataclasses.replace(self._state, step=number, position=position, queue=queue)
        self._last_reward = stats.batch.reward_mean
        self._report(stats, batch, trajectories)

    async def _finish(self, number: int) -> StepStats:
        """The rest of a step's training, in a thread of its own where episodes are played meanwhile."""
        finish = functools.partial(
            self._stepper.finish,
            learning_rate_at(self._recipe.optimizer, self._state.step),
            self._following,
            checkpoint_is_timed=not self._recipe.checkpoint.full and self._checkpoint_follows(number),
        )
        return await asyncio.to_thread(finish) if self._ahead else finish()

    def _following(self) -> TrainingBatch | None:
        """The next step's batch, if its episodes have all been played."""
        if self._ahead is None or not self._ahead.done() or self._ahead.cancelled() or self._ahead.exception():
            return None
        groups = [make_group(group, self._recipe.algorithm.advantage) for group in self._ahead.result()]
        if not any(one.status.is_valid_sample for group in groups for one in group.trajectories):
            return None  # told when they are to be trained on
        return self._roles.trainer.prepare(groups, ahead=1)

    def _prepare(self, attempts: Attempts) -> TrainingBatch:
        with self._phases.phase("pack"):
            groups = [make_group(group, self._recipe.algorithm.advantage) for group in attempts]
            batch = self._roles.trainer.prepare(groups)
        if not self._state.gap_checked:
            with self._phases.phase("compare"):
                self._compare([one for group in attempts for one in group])
        return batch

    # ---------------------------------------------------------------------------------------------------- episodes

    async def _play(self, number: int) -> Attempts:
        """Play the episodes of a step now.

        Raises:
            MachineError: They could not be played.
        """
        self._tell_notes()
        with self._phases.phase("collect"):
            return self._checked(number, await self._episodes(number))

    def _play_ahead(self, number: int) -> None:
        """Begin to play the episodes of the next step, where they may be one update old."""
        if self._recipe.training.max_trajectory_age and number <= self._recipe.training.num_steps:
            self._ahead = asyncio.ensure_future(self._episodes(number))

    async def _played_ahead(self, number: int) -> Attempts:
        """Wait for the episodes of the next step, if they are being played; raises as `_play` does."""
        ahead, self._ahead = self._ahead, None
        if ahead is None:
            return ()
        with self._phases.phase("collect"):
            return self._checked(number, await ahead)

    def _checked(self, number: int, attempts: Attempts) -> Attempts:
        try:
            check_played(f"step {number}", attempts)
        except MachineError:
            self._log_trajectories(number, "train", [one for group in attempts for one in group])
            raise
        return attempts

    def _episodes(self, number: int) -> Awaitable[Attempts]:
        if self._roles.replay:
            return self._roles.replay(number)
        settings, position = self._recipe.rollout, self._state.position
        indices: Sequence[int] = ()
        for _ in range(number - self._state.step):
            indices, position = position.take(settings.prompts_per_step)
        return collect(
            [self._roles.train_tasks[index] for index in indices],
            settings.generations_per_prompt,
            roles=self._roles.episode,
            settings=training_settings(self._recipe),
            seed=self._recipe.run.seed,
            step=number,
            retries=settings.retries,
            on_progress=self._progress(f"episodes of step {number}"),
        )

    # --------------------------------------------------------------------------------------------------- reporting

    def _compare(self, trajectories: Sequence[Trajectory]) -> None:
        """Before the first update: the sampler's log-probabilities are the trainer's, or the run stops."""
        gap = self._roles.trainer.sampler_trainer_gap(trajectories)
        check_gap(gap, self._recipe.algorithm.max_logprob_gap)
        self._state = dataclasses.replace(self._state, gap_checked=True)
        self._roles.progress.say(
            f"sampler and trainer agree to {gap.mean:.1e} nats per token over {gap.num_tokens} tokens "
            f"(largest {gap.max:.1e})"
        )

    def _report(self, stats: StepStats, batch: TrainingBatch, trajectories: Sequence[Trajectory]) -> None:
        """Log a step's numbers: its time is all that has passed since the row before, evaluations apart."""
        self._throughput.add("tokens", sum(one.tokens.size for one in trajectories))
        self._throughput.add("slots_with_padding", batch.packed.stats.num_slots)
        numbers: dict[str, Any] = {
            **{name: value for name, value in stats.scalars().items() if name != "step"},
            "reward": stats.batch.reward_mean,
            "num_failed_episodes": stats.batch.num_invalid,
            **_guard_metrics(trajectories),
            **self._throughput.interval(),
            "step_s": time.perf_counter() - self._row_began,
        }
        numbers.update({f"phase_s/{name}": value for name, value in self._begin_row().items()})
        with self._phases.phase("log"):
            self._roles.metrics.log(stats.step, numbers)
            if self._roles.record:
                self._roles.record.step_done(stats.step, numbers)
        if warning := tool_call_warning(trajectories):
            self._notes.append(f"warning: {warning}")
        if any(one.requests is not None for one in trajectories) and (notes := guard_notes(trajectories)):
            self._notes.append(f"outside agents in step {stats.step}: {', '.join(notes)}")

    def _begin_row(self) -> dict[str, float]:
        """Start the clocks of a row of metrics; returns the seconds of each phase of the row that ends."""
        self._row_began = time.perf_counter()
        self._throughput.interval()
        return self._phases.lap()

    def _tell_notes(self) -> None:
        notes, self._notes = self._notes, []
        for note in notes:
            self._roles.progress.say(note)

    # ------------------------------------------------------------------------------------------------ evaluation

    async def _evaluate(self) -> None:
        """Measure the policy, unless that is done already."""
        step, setting = self._state.step, self._recipe.evaluation
        if step in self._state.evaluations:
            return
        tasks = self._roles.validation_tasks
        kept: dict[tuple[str, int], Trajectory] = {}
        with self._phases.phase("evaluate"):
            report = await evaluate(
                tasks,
                setting.attempts,
                roles=self._roles.episode,
                settings=evaluation_settings(self._recipe),
                seed=EVALUATION_SEED,
                retries=self._recipe.rollout.retries,
                checkpoint_step=step,
                samples_count=step * self._recipe.rollout.global_batch_size,
                on_progress=self._progress(f"episodes of the evaluation after step {step}", kept),
            )
        order = {task.id: place for place, task in enumerate(tasks)}
        kept_in_order = sorted(kept.values(), key=lambda one: (order[one.task_id], one.sample_index))
        self._log_trajectories(step, "evaluation", kept_in_order)
        check_played(f"evaluation after step {step}", [kept_in_order])
        summary = report.summary()
        self._state = dataclasses.replace(self._state, evaluations={**self._state.evaluations, step: summary})
        seconds = self._begin_row()["evaluate"]
        self._roles.metrics.log(step, evaluation_metrics(report) | {"evaluation_s": seconds})
        if not report.complete:
            self._roles.progress.say(
                f"warning: {report.error_attempts + report.missing_attempts} of {report.expected_attempts} attempts "
                f"have no verdict; the evaluation after step {step} is incomplete and no accuracy"
            )

    # --------------------------------------------------------------------------------------------------- helpers

    def _progress(self, what: str, kept: dict[tuple[str, int], Trajectory] | None = None) -> ProgressCallback:
        def done(progress: RolloutProgress) -> None:
            one = progress.trajectory
            if kept is not None and not progress.will_retry:
                kept[one.task_id, one.sample_index] = one
            if one.reward is not None:
                self._rewarded.set()
                if self._state.first_reward_s is None:
                    self._state = dataclasses.replace(self._state, first_reward_s=self._seconds())
                    self._roles.progress.say(f"first reward: {one.reward:g} for {one.task_id}")
            self._roles.progress.waiting(what, progress.num_done, progress.num_total)

        return done

    def _log_trajectories(self, step: int, purpose: str, trajectories: Sequence[Trajectory]) -> None:
        if self._roles.trajectories is not None:
            self._roles.trajectories.append(step, purpose, trajectories)

    def _checkpoint(self) -> None:
        self._state = dataclasses.replace(self._state, seconds=self._seconds())
        with self._phases.phase("checkpoint"):
            self._save(self._state, self._worth())
        self._saved = self._state

    def _worth(self) -> float | None:
        """What `checkpoint.best_by` says of the present weights; `None` where it is not known."""
        if self._recipe.checkpoint.best_by == "reward":
            return self._last_reward
        evaluation = self._state.evaluations.get(self._state.step)
        return evaluation["pass_at_k"].get("1") if evaluation else None

    def _seconds(self) -> float:
        """Seconds of this run, those before a resume included."""
        return self._seconds_before + time.perf_counter() - self._started


def check_played(what: str, groups: Sequence[Sequence[Trajectory]]) -> None:
    """End a run that waits for, or trains on, what cannot be played.

    Args:
        what: Named in the complaint.
        groups: Attempts, retried as often as the recipe allows, that belong together.

    Raises:
        MachineError: A whole group failed for reasons of infrastructure, or no attempt at all has a verdict. Names the
            most frequent cause.
    """
    for group in groups:
        if group and all(one.status is EpisodeStatus.ERROR for one in group):
            task = f" of task {group[0].task_id}" if len({one.task_id for one in group}) == 1 else ""
            raise MachineError(f"{what}: each of the {len(group)} episodes{task} failed: {_usual_cause(group)}")
    everything = [one for group in groups for one in group]
    if everything and not any(one.status.is_valid_sample for one in everything):
        raise MachineError(f"{what}: none of the {len(everything)} episodes has a verdict: {_usual_cause(everything)}")


def _guard_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """What the agents' guards counted."""
    return {
        name: value
        for name, value in rollout_metrics(trajectories).items()
        if name in ("no_call_rate", "repeated_failures_per_turn") or name.startswith("outside/")
    }


def _usual_cause(trajectories: Sequence[Trajectory]) -> str:
    ((cause, count),) = Counter(f"{one.status.value}: {one.error}" for one in trajectories).most_common(1)
    return cause if count == len(trajectories) else f"{count} times {cause}"


def training_settings(recipe: TrainRecipe) -> EpisodeSettings:
    """How a recipe's training episodes are played."""
    return _episode_settings(recipe, recipe.rollout.temperature, recipe.rollout.top_p)


def evaluation_settings(recipe: TrainRecipe) -> EpisodeSettings:
    """How a recipe's evaluation episodes are played."""
    return _episode_settings(recipe, recipe.evaluation.temperature, recipe.evaluation.top_p)


def _episode_settings(recipe: TrainRecipe, temperature: float, top_p: float) -> EpisodeSettings:
    agent = recipe.agent
    limits = Limits(
        max_turns=agent.max_turns,
        episode_timeout_s=agent.episode_timeout_s,
        command_timeout_s=agent.command_timeout_s,
        test_timeout_s=agent.test_timeout_s,
    )
    sampling = SamplingParams(temperature=temperature, top_p=top_p, max_new_tokens=recipe.rollout.max_new_tokens)
    characters = agent.max_observation_characters or None
    return EpisodeSettings(sampling=sampling, limits=limits, max_observation_characters=characters)


def evaluation_metrics(report: EvalReport) -> dict[str, Any]:
    """An evaluation's numbers under the names of the metrics."""
    summary = report.summary()
    metrics = {f"pass_at_{k}": value for k, value in summary["pass_at_k"].items()}
    metrics |= {f"pass_at_{k}_standard_error": value for k, value in summary["pass_at_k_standard_error"].items()}
    return metrics | {
        "evaluation_complete": report.complete,
        "evaluation_attempts": report.expected_attempts,
        "evaluation_errors": report.error_attempts + report.missing_attempts,
    }
