"""Builds the roles of a run from its recipe: policy, tasks, environment, engine, sandboxes.

The one place that knows every layer. Whatever can be wrong with the input is found here, before anything expensive.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swerve.agents import STYLES, PlainStyle
from swerve.agents.outside import OutsideAgents
from swerve.cli.minting import FAMILIES
from swerve.config import TrainRecipe, cache_directory, policy_directory
from swerve.config.schema import TEMPLATE_STYLES, Agent, Sandbox, Tasks
from swerve.config.schema import Policy as PolicySection
from swerve.environments import Environment, Grader, load_split, load_tasks, shipped_file
from swerve.environments.identity import identity_path, verify_identity
from swerve.rendering import ConversationRenderer, Template, Tokenizer
from swerve.rollout import EpisodeRoles, OraclePolicy
from swerve.sandboxes import Backend, SandboxLimits, SandboxPool, make_backend
from swerve.telemetry import write_atomic
from swerve.types import SwerveError, Task, WeightsVersion

if TYPE_CHECKING:
    from swerve.engine import EmbeddedEngine, VllmEngine
    from swerve.models import Qwen35MoeConfig

MIB = 1 << 20
_PROBE_TOKENS = 48
"""Tokens that engine and trainer both score after every refit."""
_SAMPLE = "def add(a, b):\n    return a + b\n"
"""What servers are tried with."""


@dataclass(frozen=True, kw_only=True)
class LoadedPolicy:
    """A policy, read from its directory.

    Attributes:
        directory: Where it was read from.
        config: Shape of the model.
        params: Its weights.
        tokenizer: Its tokenizer.
    """

    directory: Path
    config: Qwen35MoeConfig
    params: Any
    tokenizer: Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskSets:
    """The tasks of a run.

    Attributes:
        train: In training order.
        validation: Held out.
        files: The files read, training first.
    """

    train: list[Task]
    validation: list[Task]
    files: tuple[Path, Path]


def load_policy(section: PolicySection, seed: int) -> LoadedPolicy:
    """Read the policy that a recipe names.

    Raises:
        SwerveError: A file is missing or does not fit the others.
    """
    from swerve import models

    directory = policy_directory(section.checkpoint)
    tokenizer = Tokenizer.load(directory)
    config, params = models.load_hf(directory)
    if tokenizer.vocab_size > config.vocab_size:
        raise SwerveError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} entries, the model {config.vocab_size}: "
            "they belong to different policies"
        )
    if section.model != "checkpoint" and models.PUBLISHED[section.model] != config:
        raise SwerveError(
            f'policy.model = "{section.model}": {directory} holds a model of another shape: set it to "checkpoint", or '
            "policy.checkpoint to the published files"
        )
    if section.random_weights:
        import jax

        params = models.initialise(config, jax.random.key(seed))
    return LoadedPolicy(directory=directory, config=config, params=params, tokenizer=tokenizer)


def save_policy(path: Path, policy: LoadedPolicy, params: Any) -> None:
    """Write weights as Hugging Face files, with the tokenizer of the policy they began as."""
    from swerve.models import save_hf

    save_hf(path, policy.config, params)
    copy_tokenizer(policy.directory, path)


def copy_tokenizer(source: Path, target: Path) -> None:
    """Copy a policy's tokenizer, as far as it has both files, beside weights."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        if (source / name).is_file():
            write_atomic(target / name, (source / name).read_bytes())


def read_tasks(section: Tasks, num_validation: int = 0) -> TaskSets:
    """Read the tasks that a recipe names.

    Args:
        section: Which.
        num_validation: Held-out tasks used, from the start of the file; 0 uses all.

    Raises:
        SwerveError: A file is at fault, is not what its identity says, or holds fewer tasks than are asked for.
    """
    if section.family == "files":
        files = (Path(section.train_file), Path(section.validation_file))
        for file in files:
            if identity_path(file).is_file():
                verify_identity(file)
    else:
        files = (shipped_file(section.family, "train"), shipped_file(section.family, "validation"))
    train, validation = load_split(*files)
    for key, tasks, wanted, file in (
        ("tasks.num_train", train, section.num_train, files[0]),
        ("evaluation.num_tasks", validation, num_validation, files[1]),
    ):
        if wanted > len(tasks):
            raise SwerveError(f"{key} = {wanted}: {file} holds only {len(tasks)} tasks")
    return TaskSets(
        train=train[: section.num_train or None], validation=validation[: num_validation or None], files=files
    )


def tasks_named(name: str) -> list[Task]:
    """The tasks of a file, or of a shipped family: `functions` or `functions:validation`, `functions:train`.

    Raises:
        SwerveError: There is no such file or split, or the file is at fault.
    """
    family, _, split = name.partition(":")
    if family in FAMILIES:
        if split not in ("", "train", "validation"):
            raise SwerveError(f"{name}: a family's tasks are {family}:train or {family}:validation")
        return load_tasks(shipped_file(family, split or "validation"))
    return load_tasks(name)


def environment_of(tasks: Sequence[Task]) -> Environment:
    """The environment of some tasks, which are all of one family.

    Raises:
        SwerveError: They are of several families, or of one there is no environment for.
    """
    families = sorted({task.family for task in tasks})
    if len(families) != 1:
        raise SwerveError(f"the tasks are of several families ({', '.join(families)}): a run has one environment")
    known = ", ".join(sorted(_ENVIRONMENTS))
    if families[0] not in _ENVIRONMENTS:
        raise SwerveError(f"tasks of family {families[0]}: there is no such environment; there are {known}")
    return _ENVIRONMENTS[families[0]](tasks)


def _functions(tasks: Sequence[Task]) -> Environment:
    from swerve.environments.functions import FunctionsEnvironment

    return FunctionsEnvironment(tasks)


def _mini(tasks: Sequence[Task]) -> Environment:
    from swerve.environments.mini import MiniEnvironment

    return MiniEnvironment()


def _repository(tasks: Sequence[Task]) -> Environment:
    from swerve.environments.repository import RepositoryEnvironment

    return RepositoryEnvironment(tasks)


def _r2egym(tasks: Sequence[Task]) -> Environment:
    from swerve.environments.r2egym import R2EGymEnvironment

    return R2EGymEnvironment(tasks)


_ENVIRONMENTS: dict[str, Callable[[Sequence[Task]], Environment]] = {
    "functions": _functions,
    "mini": _mini,
    "repository": _repository,
    "r2egym": _r2egym,
}


def make_engine(
    policy: LoadedPolicy,
    recipe: TrainRecipe,
    version: int = 0,
    params: Any = None,
    batch_sizes: Sequence[int] | None = None,
) -> EmbeddedEngine | VllmEngine:
    """The engine of a recipe, for a policy.

    Args:
        policy: Sampled from.
        recipe: Which engine, slots and context.
        version: Number of the weights.
        params: Weights in place of the policy's own.
        batch_sizes: As for the embedded engine.
    """
    from swerve.engine import EmbeddedEngine, VllmEngine

    rollout, weights = recipe.rollout, policy.params if params is None else params
    if recipe.engine.kind == "vllm":
        return VllmEngine(
            recipe.engine,
            lambda path, params: save_policy(path, policy, params),
            weights,
            num_slots=rollout.num_slots,
            context_length=rollout.context_length,
            end_of_turn_id=policy.tokenizer.end_of_turn_id,
            sample_tokens=policy.tokenizer.encode_content(_SAMPLE),
            weights_version=version,
        )
    return EmbeddedEngine(
        policy.config,
        weights,
        num_slots=rollout.num_slots,
        context_length=rollout.context_length,
        end_of_turn_id=policy.tokenizer.end_of_turn_id,
        pad_id=policy.tokenizer.pad_id,
        weights_version=version,
        batch_sizes=batch_sizes,
    )


def engine_words(recipe: TrainRecipe) -> str:
    """What samples from a recipe's policy, for people."""
    engine, rollout = recipe.engine, recipe.rollout
    places = f"{rollout.num_slots} slots of {rollout.context_length} tokens"
    if engine.kind == "embedded":
        return f"in this process, JAX, {places}"
    begun = "started here" if engine.command else "that run already"
    weights = f"weights by {engine.refit} from {engine.weights_directory}"
    return f"vLLM at {', '.join(engine.urls)}, {begun}, {places}; {weights}"


def probe_tokens(policy: LoadedPolicy, task: Task) -> Sequence[int]:
    """Tokens to probe an engine with: the beginning of a task's own code."""
    text = "\n".join([task.problem_statement, *task.workspace.values()])
    return policy.tokenizer.encode_content(text)[:_PROBE_TOKENS]


def prove_weights(
    engine: EmbeddedEngine | VllmEngine | OraclePolicy,
    policy: LoadedPolicy,
    params: Any,
    recipe: TrainRecipe,
    task: Task,
) -> None:
    """See that servers answer with the weights that they were given; an engine in this process has no others.

    Raises:
        WeightsError: They do not.
    """
    from swerve.engine import VllmEngine
    from swerve.models import score_tokens
    from swerve.weights import WeightsPublisher

    if isinstance(engine, VllmEngine):
        WeightsPublisher(
            engine,
            score=lambda tokens: score_tokens(policy.params if params is None else params, policy.config, tokens),
            probe_tokens=probe_tokens(policy, task),
            tolerance=recipe.engine.probe_tolerance,
        ).check(WeightsVersion(number=engine.weights_version))


def sandbox_limits(section: Sandbox) -> SandboxLimits:
    """What a recipe lets one sandbox use."""
    return SandboxLimits(
        memory_bytes=section.memory_mib * MIB,
        disk_bytes=section.disk_mib * MIB,
        file_bytes=section.disk_mib * MIB,
        num_processes=section.num_processes,
        cpus=section.cpus,
        cpu_s=section.cpu_s,
        output_bytes=section.output_kib << 10,
    )


def sandbox_backend(section: Sandbox) -> Backend:
    """What isolates episodes.

    Raises:
        MachineError: This machine cannot do what the recipe asks for.
    """
    return make_backend(section.backend, section.images)


@contextlib.asynccontextmanager
async def episode_roles(
    recipe: TrainRecipe,
    tasks: Sequence[Task],
    tokenizer: Tokenizer,
    engine: EmbeddedEngine | VllmEngine | OraclePolicy,
) -> AsyncIterator[EpisodeRoles]:
    """Those an episode works with, containers and servers started, programs compiled; gone at the end of the block.

    Args:
        recipe: Template and limits.
        tasks: All that may be attempted.
        tokenizer: Of the policy.
        engine: Samples; shut down at the end.
    """
    environment = environment_of(tasks)
    backend = sandbox_backend(recipe.sandbox)
    renderer = make_renderer(recipe.agent, tokenizer)
    outside = OutsideAgents(recipe.agent.command, tokenizer, renderer.template) if recipe.agent.command else None
    try:
        async with (
            SandboxPool(environment.images(), sandbox_limits(recipe.sandbox), backend=backend) as pool,
            outside or contextlib.nullcontext(),
        ):
            truncated = recipe.evaluation.top_p < 1.0
            compiling = [asyncio.to_thread(engine.warmup)]
            compiling += [asyncio.to_thread(engine.warmup, truncated=True)] if truncated else []
            await asyncio.gather(pool.warm_up(), *compiling)
            yield EpisodeRoles(
                policy=engine,
                pool=pool,
                environment=environment,
                grader=Grader(pool, environment),
                renderer=renderer,
                style=style_of(recipe.agent),
                outside=outside,
            )
    finally:
        engine.shutdown()


def make_renderer(section: Agent, tokenizer: Tokenizer) -> ConversationRenderer:
    """The built-in agent's conversations: a recipe's template with what belongs to it."""
    template = load_template(section.template)
    tools = tuple(style_of(section).tools.values())
    return ConversationRenderer(tokenizer, template, system_prompt=template.system_prompt or None, tools=tools)


def style_of(section: Agent) -> PlainStyle:
    """What the built-in agent's tools take and say."""
    belongs = TEMPLATE_STYLES.get(section.template, "plain")
    return STYLES[belongs if section.observations == "template" else section.observations]


def load_template(name: str) -> Template:
    """A template by its name among those shipped, or by its path."""
    return Template.from_file(name) if "/" in name or name.endswith(".jinja") else Template.load(name)


def prepare_jax(num_devices: int = 1) -> None:
    """Set JAX up for this process: memory as CPUs like it, and a compilation cache under the user's cache directory.

    There is no such cache for simulated devices: programs of several devices that XLA has from it give wrong numbers or
    end the process (JAX 0.10.2: `swerve ab recipes/ab/boundary.toml` with the cache on).

    Args:
        num_devices: Devices that a CPU is to simulate.
    """
    importlib.import_module("swerve.parallel").tune_cpu()
    jax = importlib.import_module("jax")
    if num_devices > 1:
        jax.config.update("jax_num_cpu_devices", num_devices)
        if jax.default_backend() == "cpu":
            jax.config.update("jax_enable_compilation_cache", False)
    jax.config.update("jax_compilation_cache_dir", str(cache_directory() / "jax"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
