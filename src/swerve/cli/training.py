"""Runs a training recipe: from its settings to the last line on the screen."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swerve.checkpoint import BackgroundWriter, CheckpointStore, DataPosition
from swerve.cli.composition import (
    LoadedPolicy,
    TaskSets,
    engine_words,
    episode_roles,
    load_policy,
    make_engine,
    probe_tokens,
    read_tasks,
    sandbox_backend,
    save_policy,
)
from swerve.config import TrainRecipe, policy_directory
from swerve.config.schema import Execution, Remat
from swerve.mlperf.log import MLPerfLog, require_package
from swerve.mlperf.training import TrainingRecord, clear_caches
from swerve.mlperf.values import logged_values
from swerve.telemetry import (
    EVAL_CHECKPOINTS,
    Metrics,
    PeakMemory,
    RunDirectory,
    Sink,
    TensorBoardSink,
    TrajectoryLog,
    file_digest,
    identity_digest,
    open_progress,
    trajectory_from_json,
    trajectory_to_json,
    write_json,
)
from swerve.types import SwerveError, WeightsVersion

if TYPE_CHECKING:
    from swerve.models import Qwen35MoeConfig
    from swerve.orchestrator import LoopState
    from swerve.trainer import GrpoTrainer, Put


@dataclass(frozen=True, kw_only=True)
class TrainingInputs:
    """What a run starts from, read and checked.

    Attributes:
        recipe: What to do.
        tasks: The repairs.
        policy: Trained.
        began_ms: Unix time in milliseconds when reading began.
        caches_cleared: Whether the kernel had dropped its caches before.
    """

    recipe: TrainRecipe
    tasks: TaskSets
    policy: LoadedPolicy
    began_ms: int = 0
    caches_cleared: bool = False


def read_inputs(recipe: TrainRecipe) -> TrainingInputs:
    """Read everything a run starts from.

    Raises:
        SwerveError: Something of it is at fault.
    """
    check_computable(recipe)
    sandbox_backend(recipe.sandbox)
    began_ms, cleared = _begin_initialisation(recipe)
    tasks = read_tasks(recipe.tasks, recipe.evaluation.num_tasks)
    if recipe.rollout.prompts_per_step > len(tasks.train):
        raise SwerveError(
            f"rollout.prompts_per_step = {recipe.rollout.prompts_per_step}: {tasks.files[0]} holds only "
            f"{len(tasks.train)} tasks, and none is asked twice in one step: lower it"
        )
    policy = load_policy(recipe.policy, recipe.run.seed)
    return TrainingInputs(recipe=recipe, tasks=tasks, policy=policy, began_ms=began_ms, caches_cleared=cleared)


def _begin_initialisation(recipe: TrainRecipe) -> tuple[int, bool]:
    """The moment before anything is loaded, and whether the kernel's caches were cleared by then."""
    began_ms, cleared = time.time_ns() // 1_000_000, False
    if recipe.mlperf.enabled:
        require_package()
        cleared = recipe.mlperf.clear_cache and clear_caches()
    return began_ms, cleared


def check_computable(recipe: TrainRecipe) -> None:
    """Refuse what the trainer cannot compute on this machine.

    Raises:
        SwerveError: A setting asks for it.
    """
    _check_kernels(recipe.execution)
    _check_offload(recipe.remat)


def _check_kernels(section: Execution) -> None:
    """Refuse kernels of another kind of machine."""
    import jax

    for key, value, elsewhere in (("attention", "splash", "blocked"), ("experts", "grouped", "sorted")):
        if getattr(section, key) == value and jax.default_backend() != "tpu":
            raise SwerveError(
                f'execution.{key} = "{value}" runs on TPUs; this machine has {jax.default_backend()}: set it to '
                f'"{elsewhere}"'
            )


def _check_offload(section: Remat) -> None:
    """Refuse what a CPU gains nothing by, and computes wrongly once JAX has its program from the compilation cache."""
    import jax

    offloaded = [field.name for field in dataclasses.fields(section) if getattr(section, field.name) == "offload"]
    if section.enabled and offloaded and jax.default_backend() == "cpu":
        raise SwerveError(
            f'remat.{offloaded[0]} = "offload": a CPU has no memory but the host\'s: set it to "keep" or "recompute"'
        )


async def train(
    inputs: TrainingInputs,
    directory: RunDirectory,
    *,
    resume: bool,
    config_name: str,
    profiled: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Run a recipe to its end.

    Args:
        inputs: From `read_inputs`.
        directory: Of the run, held.
        resume: Go on from the directory's last checkpoint, where it has one.
        config_name: What the run's recipe is called.
        profiled: First and last step to record a profile of; `None` for none.

    Returns:
        The summary, which has been written too.
    """
    from swerve.cli.profiling import StepProfiler
    from swerve.orchestrator import LoopRoles, TrainingLoop
    from swerve.weights import WeightsPublisher

    started = time.perf_counter()
    recipe, policy = inputs.recipe, inputs.policy
    if resume and not recipe.checkpoint.full:
        raise SwerveError("checkpoint.full = false keeps weights only, from which a run cannot go on: start a new one")
    record = _open_record(inputs, directory, config_name) if recipe.mlperf.enabled else None
    trainer = make_trainer(recipe, policy.config, policy.params)
    store = CheckpointStore(
        directory.checkpoints,
        recipe_digest=identity_digest(recipe),
        datasets={path.name: file_digest(path) for path in inputs.tasks.files},
        keep_last=recipe.checkpoint.keep,
        keep_best=recipe.checkpoint.keep_best,
    )
    state = _restore(store, trainer, inputs) if resume else _fresh_state(inputs)
    progress = open_progress(recipe.telemetry.progress, recipe.training.num_steps, sys.stderr)
    resume_step = state.step if resume else None
    sinks: list[Sink] = [progress]
    if recipe.telemetry.tensorboard:
        sinks.append(TensorBoardSink(directory.tensorboard, resume_step))
    metrics = Metrics(directory.metrics, sinks=sinks, durable=recipe.telemetry.durable, resume_step=resume_step)
    log = None
    if recipe.telemetry.trajectories:
        log = TrajectoryLog(directory.trajectories, durable=recipe.telemetry.durable, resume_step=resume_step)
    engine = make_engine(policy, recipe, version=trainer.version, params=trainer.params)
    publisher = WeightsPublisher(
        engine,
        score=trainer.token_logprobs,
        probe_tokens=probe_tokens(policy, inputs.tasks.train[0]),
        tolerance=recipe.engine.probe_tolerance,
        digests=False,
    )

    writer = BackgroundWriter()
    profiler = StepProfiler(directory.profile, *profiled) if profiled else None

    def save(state: LoopState, worth: float | None) -> None:
        if recipe.checkpoint.full:
            whole, host = trainer.state(), state.to_json()
            queue = [trajectory_to_json(one) for group in state.queue for one in group]
            writer.submit(
                lambda: store.save(
                    state.step, params=whole.params, optimizer=whole.optimizer, host=host, queue=queue, metric=worth
                )
            )
        else:
            weights = trainer.weights()

            def write() -> None:
                path = store.save_weights(state.step, lambda path: save_policy(path, policy, weights), metric=worth)
                if record:
                    record.saved(state.step, path)

            writer.submit(write)

    tasks = [*inputs.tasks.train, *inputs.tasks.validation]
    with PeakMemory() as memory:
        try:
            async with episode_roles(recipe, tasks, policy.tokenizer, engine) as roles:
                if recipe.engine.kind != "embedded":
                    publisher.check(WeightsVersion(number=trainer.version))
                loop = TrainingLoop(
                    recipe,
                    LoopRoles(
                        episode=roles,
                        trainer=trainer,
                        publisher=publisher,
                        metrics=metrics,
                        progress=progress,
                        trajectories=log,
                        train_tasks=inputs.tasks.train,
                        validation_tasks=inputs.tasks.validation,
                        record=record,
                        profiler=profiler,
                    ),
                    state,
                    save,
                    started,
                )
                final = await loop.run()
                writer.wait()
        finally:
            writer.close()
            if profiler:
                profiler.close()
            metrics.close()
            for file in (log, record):
                if file is not None:
                    file.close()
        result = summary(final, memory.peak_bytes)
    write_json(directory.summary, result)
    return result


def _open_record(inputs: TrainingInputs, directory: RunDirectory, config_name: str) -> TrainingRecord:
    """The record of a scored run, with all that it says of itself."""
    recipe = inputs.recipe
    path = Path(recipe.mlperf.log) if recipe.mlperf.log else directory.mlperf_log
    if path.exists() and path.stat().st_size:
        raise SwerveError(f"mlperf.log: {path} holds the log of another run: name a new file")
    path.parent.mkdir(parents=True, exist_ok=True)
    seed = recipe.run.seed
    record = TrainingRecord(MLPerfLog(path), directory.eval_checkpoints, recipe, seed)
    record.initialise(inputs.began_ms, cleared=inputs.caches_cleared)
    tasks = inputs.tasks
    record.describe(
        logged_values(
            recipe,
            seed=seed,
            num_train_tasks=len(tasks.train),
            num_evaluation_tasks=len(tasks.validation),
            config_name=config_name,
        )
    )
    return record


def make_trainer(recipe: TrainRecipe, config: Qwen35MoeConfig, params: Any, put: Put | None = None) -> GrpoTrainer:
    """The trainer of a recipe.

    Args:
        recipe: How to train.
        config: Shape of the policy.
        params: Its weights.
        put: Copies micro-batches to the devices; JAX's own way by default.
    """
    import jax

    from swerve.trainer import GrpoTrainer, execution_of, mesh_shape

    return GrpoTrainer(
        config,
        params,
        algorithm=recipe.algorithm,
        optimizer=recipe.optimizer,
        temperature=recipe.rollout.temperature,
        context_length=recipe.rollout.context_length,
        row_length=recipe.packing.row_length,
        rows_per_micro_batch=recipe.packing.rows_per_micro_batch,
        freeze_router=recipe.policy.freeze_router,
        execution=execution_of(recipe.execution, recipe.remat, mesh_shape(recipe.mesh)),
        parameter_dtype=recipe.execution.parameter_dtype,
        activation_dtype=recipe.execution.activation_dtype,
        put=put or jax.device_put,
    )


def _fresh_state(inputs: TrainingInputs) -> LoopState:
    from swerve.orchestrator import LoopState

    shuffled = inputs.recipe.tasks.order == "shuffled"
    position = DataPosition(
        num_tasks=len(inputs.tasks.train), shuffle_seed=inputs.recipe.run.seed if shuffled else None
    )
    return LoopState(position=position)


def _restore(store: CheckpointStore, trainer: GrpoTrainer, inputs: TrainingInputs) -> LoopState:
    """The state of the last checkpoint, its weights and moments given to the trainer; a fresh one if there is none."""
    from swerve.orchestrator import LoopState
    from swerve.trainer import TrainerState

    if store.latest() is None:
        return _fresh_state(inputs)
    present = trainer.state()
    checkpoint = store.load(like=(present.params, present.optimizer))
    trainer.restore(TrainerState(params=checkpoint.params, optimizer=checkpoint.optimizer, version=checkpoint.step))
    return LoopState.from_json(checkpoint.host, map(trajectory_from_json, checkpoint.queue))


def dry_run_facts(recipe: TrainRecipe) -> dict[str, float | str]:
    """What a training run will hold in memory, in bytes, and who does what."""
    from swerve import models, parallel
    from swerve.models.hf import read_config

    directory = policy_directory(recipe.policy.checkpoint)
    config = read_config(directory)
    num_parameters = parallel.num_parameters(models.parameters(config))
    return {
        "parameters": num_parameters,
        "active_parameters": models.num_active_parameters(config),
        "bytes_of_weights_gradient_and_moments": 4 * 4 * num_parameters,
        "bytes_of_engine_weights": 4 * num_parameters if recipe.engine.kind == "embedded" else 0,
        "policy": str(directory),
        "trainer": "in this process, JAX",
        "engine": engine_words(recipe),
        "sandboxes": f"on this machine, {recipe.sandbox.backend}",
    }


def summary(state: LoopState, peak_rss_bytes: int) -> dict[str, Any]:
    """What `summary.json` says of a run that is complete."""
    before = state.evaluations.get(0)
    after = state.evaluations.get(state.step) if state.step else None
    return {
        "seconds": state.seconds,
        "first_reward_s": state.first_reward_s,
        "num_steps": state.step,
        **{
            f"pass_at_{k}_{when}": evaluation["pass_at_k"].get(str(k)) if evaluation else None
            for k in (1, 4)
            for when, evaluation in (("before", before), ("after", after))
        },
        "peak_rss_bytes": peak_rss_bytes,
        "evaluations": {str(step): dict(evaluation) for step, evaluation in state.evaluations.items()},
    }


def closing_lines(result: Mapping[str, Any], directory: Path, recipe_path: Path) -> list[str]:
    """Five lines: what happened, and what to try next."""

    def change(k: int) -> str:
        before, after = result[f"pass_at_{k}_before"], result[f"pass_at_{k}_after"]
        shown = [f"{value:.3f}" if value is not None else "not measured" for value in (before, after)]
        return f"pass@{k} {shown[0]} -> {shown[1]}"

    minutes, seconds = divmod(round(result["seconds"]), 60)
    first = result["first_reward_s"]
    first_text = f", first reward after {first:.0f} s" if first is not None else ""
    scored = directory / EVAL_CHECKPOINTS
    if scored.exists():
        measured = f"held-out tasks come next: swerve eval {directory / 'recipe.toml'} --manifest {scored}"
    else:
        measured = f"held-out tasks: {change(1)}, {change(4)}"
    return [
        f"{result['num_steps']} steps in {minutes} min {seconds:02d} s{first_text}, "
        f"peak memory {result['peak_rss_bytes'] / 2**30:.1f} GiB",
        measured,
        f"everything is in {directory}: metrics.jsonl, trajectories.jsonl, tensorboard/, checkpoints/, summary.json",
        f"watch an episode:  swerve rollout first --recipe {recipe_path}",
        f"try next:          swerve train {recipe_path} --run.seed 1 --training.num_steps {2 * result['num_steps']}",
    ]
