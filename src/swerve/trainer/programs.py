"""The trainer's compiled programs, on one device or on a mesh.

    zeros(params)                                        -> gradients of nothing
    init_moments(params)                                 -> Adam's first state
    accumulate(params, reference, accumulated, batch)    -> accumulated, pairs dropped
    accumulate_dropless(...)                             -> likewise, with room for every pair
    update(params, moments, accumulated, learning_rate)  -> params, moments, numbers
    score(params, batch, temperature)                    -> log-probabilities, entropies

On a mesh those that run the model are one manual program: rows are split over `fsdp` and `expert`, a row over
`context`, and the objective, which needs whole rows, is computed from gathered log-probabilities by every device of a
row alike. With the plain head only the model is manual; head, objective and gradients are written for whole arrays.
A micro-batch in which a pair finds no place adds nothing at all; it is for the caller to compute it again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from swerve import models, parallel
from swerve.config import fitting_rows
from swerve.config.schema import Algorithm, TrainRecipe
from swerve.config.schema import Execution as ExecutionSection
from swerve.config.schema import Mesh as MeshSection
from swerve.config.schema import Remat as RematSection
from swerve.models.sharding import RULES
from swerve.parallel import ONE_DEVICE, ROW_AXES, MeshShape
from swerve.trainer.objective import Scored, Sums, micro_batch_objective
from swerve.trainer.optimizer import Adam, AdamState, Params, UpdateNumbers


class Accumulated(NamedTuple):
    """Unnormalised gradient of the batch so far, float32, and its sums."""

    gradients: Params
    sums: Sums


class DeviceBatch(NamedTuple):
    """A micro-batch on the devices; `[rows, time]`, and routing `[rows, time, layers, k]` or `None`."""

    tokens: jax.Array
    segment_ids: jax.Array
    positions: jax.Array
    loss_mask: jax.Array
    advantages: jax.Array
    behaviour_logprobs: jax.Array
    routing: jax.Array | None


BATCH_SPEC = PartitionSpec(ROW_AXES, "context")
"""Where a micro-batch lives on a mesh."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Objective:
    """What the programs compute.

    Attributes:
        config: Shape of the model.
        algorithm: Loss, corrections, filters, normaliser.
        temperature: The sampler's.
        context_length: Tokens one episode can hold.
        freeze_router: Keep the experts' router as it is.
        router_aux_coefficient: Weight of the router's balance term; 0 adds none.
        execution: How the model is computed; its mesh is that of the programs.
        activation_dtype: Type of the activations.
    """

    config: models.Qwen35MoeConfig
    algorithm: Algorithm
    temperature: float
    context_length: int
    freeze_router: bool
    router_aux_coefficient: float
    execution: models.Execution
    activation_dtype: str = "float32"


class Programs:
    """Compiled once each; see the module.

    Args:
        objective: What they compute.
        adam: The optimizer.
        mesh: Devices, of the shape in `objective.execution`; `None` is the default device.
    """

    def __init__(self, objective: Objective, adam: Adam, mesh: Mesh | None = None) -> None:
        execution = objective.execution
        if execution.buffer_factor is not None and execution.buffer_factor >= execution.mesh.expert:
            objective = replace(objective, execution=replace(execution, buffer_factor=None))  # room for every pair
        self._objective = objective
        self._adam = adam
        self._mesh = mesh
        self._plain = objective.execution.head == "plain"
        # The mesh as the loss sees it: arrays are this device's, or whole.
        self._shape: MeshShape = ONE_DEVICE if self._plain else objective.execution.mesh
        self._declared = parallel.flatten_names(models.parameters(objective.config))
        self.num_traced = 0
        dropless = replace(objective.execution, buffer_factor=None)
        shardings = self.parameter_shardings
        self.zeros = jax.jit(_zeros, out_shardings=shardings)
        self.init_moments = jax.jit(
            adam.init, out_shardings=None if shardings is None else _like_moments(None, shardings)
        )
        self.accumulate = self._accumulating(objective.execution)
        self.accumulate_dropless = self._accumulating(dropless)
        self.update = jax.jit(self._update, donate_argnums=(0, 1))
        self.score = self._compiled(self._score, (self._params_spec, BATCH_SPEC, None), (BATCH_SPEC, BATCH_SPEC))

    # ------------------------------------------------------------------------------------------------ placement

    @property
    def parameter_shardings(self) -> Any:
        """Where parameters, gradients and moments live: a tree of shardings, or `None` without a mesh."""
        if self._mesh is None:
            return None
        return models.parameter_shardings(self._objective.config, self._mesh)

    @property
    def batch_sharding(self) -> NamedSharding | None:
        """Where a micro-batch lives."""
        return None if self._mesh is None else NamedSharding(self._mesh, BATCH_SPEC)

    @property
    def _head_layout(self) -> models.HeadLayout | None:
        if self._mesh is None:
            return None
        config = self._objective.config
        if config.tie_word_embeddings:
            spec = PartitionSpec(*reversed(self._params_spec["embedding"]))
        else:
            spec = self._params_spec["head"]
        return models.HeadLayout(self._mesh, BATCH_SPEC, spec)

    @property
    def may_drop(self) -> bool:
        """Whether `accumulate` can find no place for a pair."""
        return self._objective.execution.buffer_factor is not None

    # ------------------------------------------------------------------------------------------------- programs

    def _accumulating(self, execution: models.Execution) -> Any:
        def accumulate(
            params: Params, reference: Params | None, accumulated: Accumulated, batch: DeviceBatch
        ) -> tuple[Accumulated, jax.Array]:
            return self._accumulate(execution, params, reference, accumulated, batch)

        sums: Any = PartitionSpec()
        spec = Accumulated(self._params_spec, sums)
        inputs = (self._params_spec, self._params_spec, spec, BATCH_SPEC)
        return self._compiled(accumulate, inputs, (spec, PartitionSpec()), donate_argnums=2)

    @property
    def _params_spec(self) -> Any:
        return None if self._mesh is None else models.parameter_specs(self._objective.config, self._mesh)

    def _compiled(self, function: Callable[..., Any], inputs: Any, outputs: Any, **options: Any) -> Any:
        """The function, jitted: as every device runs it or, around a plain head, as it is written."""
        if self._mesh is None or not self._plain:
            return jax.jit(self._manual(function, inputs, outputs), **options)
        mesh = self._mesh
        return jax.jit(function, out_shardings=jax.tree.map(lambda s: NamedSharding(mesh, s), outputs), **options)

    def _manual(self, function: Callable[..., Any], inputs: tuple[Any, ...], outputs: Any) -> Callable[..., Any]:
        """The function as every device of the mesh runs it; itself where there is no mesh."""
        if self._mesh is None:
            return function
        mesh = self._mesh

        def spread(*arguments: Any) -> Any:
            given = tuple(
                PartitionSpec() if spec is None or argument is None else spec
                for spec, argument in zip(inputs, arguments, strict=True)
            )
            return jax.shard_map(function, mesh=mesh, in_specs=given, out_specs=outputs, check_vma=False)(*arguments)

        return spread

    def _forward(
        self,
        execution: models.Execution,
        params: Params,
        batch: DeviceBatch,
        temperature: jax.Array | float,
        used: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array, models.ForwardOutput]:
        """Log-probabilities and entropies `[rows, time]`, and the model's own output.

        The plain head leaves out tokens that are not used, if that is said; the other need not be told.
        """
        config = self._objective.config

        def forward(params: Params, batch: DeviceBatch) -> models.ForwardOutput:
            return models.forward(
                params,
                config,
                batch.tokens,
                batch.segment_ids,
                batch.positions,
                routing=batch.routing,
                execution=execution,
                dtype=self._objective.activation_dtype,
            )

        if not self._plain:
            out = forward(params, batch)
            inputs = out.hidden, batch.tokens, batch.segment_ids, temperature
            return *models.token_logprobs(params, config, *inputs, execution=execution), out
        rows: Any = BATCH_SPEC
        whole: Any = PartitionSpec()
        model = self._manual(forward, (self._params_spec, BATCH_SPEC), models.ForwardOutput(rows, whole, whole))
        out = model(params, batch)
        lp, entropy = models.plain_token_logprobs(
            out.hidden,
            models.head_weight(params, config),
            batch.tokens,
            batch.segment_ids,
            temperature,
            chunk=execution.logprob_chunk,
            used=used,
            layout=self._head_layout,
        )
        return lp, entropy, out

    def _loss(
        self, params: Params, execution: models.Execution, reference: Params | None, batch: DeviceBatch
    ) -> tuple[jax.Array, tuple[Sums, jax.Array]]:
        """This device's share of the numerator; the sums and the pairs dropped are those of all devices."""
        objective, shape = self._objective, self._shape
        if objective.freeze_router:
            params = freeze_routers(params)
        given = batch, objective.temperature, batch.loss_mask > 0
        lp, entropy, out = self._forward(execution, params, *given)
        reference_lp = None
        if reference is not None:
            reference_lp = jax.lax.stop_gradient(self._forward(execution, reference, *given)[0])
        scored = Scored(
            logprobs=lp,
            entropy=jax.lax.stop_gradient(entropy),
            reference_logprobs=reference_lp,
            behaviour_logprobs=batch.behaviour_logprobs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            segment_ids=batch.segment_ids,
        )
        whole_rows = jax.tree.map(lambda x: shape.gather(x, ("context",), 1), scored)
        numerator, sums = micro_batch_objective(objective.algorithm, whole_rows, objective.context_length)
        largest = shape.max(sums.logprob_error_max, ROW_AXES)
        sums = shape.sum(sums, ROW_AXES)._replace(logprob_error_max=largest)
        share = numerator / shape.size("context", "tensor")
        if objective.router_aux_coefficient:
            # Weighed by the micro-batch's share of the count, so that the term has this coefficient in the whole loss.
            balance = objective.router_aux_coefficient * out.router_aux * sums.denominator
            share = share + balance / shape.size()
        return share, (sums, out.dropped)

    def _accumulate(
        self,
        execution: models.Execution,
        params: Params,
        reference: Params | None,
        accumulated: Accumulated,
        batch: DeviceBatch,
    ) -> tuple[Accumulated, jax.Array]:
        self.num_traced += 1
        gradients, (sums, dropped) = jax.grad(self._loss, has_aux=True)(params, execution, reference, batch)
        gradients = self._summed(gradients)
        total = jax.tree.map(lambda a, g: a + g.astype(jnp.float32), accumulated.gradients, gradients)
        after = Accumulated(total, accumulated.sums.add(sums))
        if execution.buffer_factor is not None:
            used = dropped == 0
            after = jax.tree.map(lambda new, old: jnp.where(used, new, old), after, accumulated)
        else:
            after = after._replace(sums=after.sums._replace(dropped_used=after.sums.dropped_used + dropped))
        return after, dropped

    def _summed(self, gradients: Params) -> Params:
        """The gradients, added up over the devices that hold a parameter alike."""
        if self._mesh is None:
            return gradients
        named = parallel.flatten_names(gradients)
        if self._objective.execution.sum_in_float32:
            named = {name: g.astype(jnp.float32) for name, g in named.items()}
        return parallel.unflatten_names(
            {n: self._shape.sum(g, RULES.held_alike(self._declared[n], self._shape)) for n, g in named.items()}
        )

    def _update(
        self, params: Params, moments: AdamState, accumulated: Accumulated, learning_rate: jax.Array
    ) -> tuple[Params, AdamState, UpdateNumbers]:
        self.num_traced += 1
        # A batch without a token has the denominator 0, and one with a pair left out gets a NaN: Adam refuses both.
        sums = accumulated.sums
        denominator = jnp.where(sums.dropped_used > 0, jnp.nan, sums.denominator)
        gradients = jax.tree.map(lambda g: g / denominator, accumulated.gradients)
        return self._adam.apply(params, moments, gradients, learning_rate)

    def _score(self, params: Params, batch: DeviceBatch, temperature: jax.Array) -> tuple[jax.Array, jax.Array]:
        dropless = replace(self._objective.execution, buffer_factor=None)
        return self._forward(dropless, params, batch, temperature)[:2]


def freeze_routers(params: Params) -> Params:
    """Return the tree with no gradient through any parameter named `router`."""

    def freeze(path: tuple[Any, ...], value: jax.Array) -> jax.Array:
        return jax.lax.stop_gradient(value) if getattr(path[-1], "key", None) == "router" else value

    return jax.tree_util.tree_map_with_path(freeze, params)


def _like_moments(count: Any, each: Params) -> AdamState:
    return AdamState(count=count, mu=each, nu=each)


def _zeros(params: Params) -> Params:
    return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)


# ------------------------------------------------------------------------------------------------- from a recipe


def mesh_shape(section: MeshSection) -> MeshShape:
    """The mesh that a recipe asks for."""
    return MeshShape(fsdp=section.fsdp, context=section.context, expert=section.expert, tensor=section.tensor)


def execution_of(execution: ExecutionSection, remat: RematSection, mesh: MeshShape) -> models.Execution:
    """How a recipe has the model computed.

    Args:
        execution: Kernels and their sizes.
        remat: What layers keep.
        mesh: Devices.
    """
    choices = {name: getattr(remat, name) for name in models.REMAT_NAMES}
    factor = execution.buffer_factor
    return models.Execution(
        attention=execution.attention,
        attention_block=execution.attention_block,
        context_attention=execution.context_attention,
        delta_chunk=execution.delta_chunk,
        delta_precision=execution.delta_precision,
        experts=execution.experts,
        expert_block=execution.expert_block,
        expert_chunks=execution.expert_chunks,
        buffer_factor=None if isinstance(factor, str) else factor,
        layers=execution.layers,
        remat=models.Remat.from_settings(choices) if remat.enabled else None,
        head=execution.head,
        logprob_chunk=execution.logprob_chunk,
        gradient_sum_dtype=execution.gradient_sum_dtype,
        mesh=mesh,
    )


class Program(NamedTuple):
    """A program and what it is called with, for planning.

    Attributes:
        jitted: From `jax.jit`.
        arguments: Abstract arrays with their shardings.
        kinds: What each argument is: `parameters`, `optimizer`, `gradients` or `batch`.
    """

    jitted: Any
    arguments: tuple[Any, ...]
    kinds: tuple[str, ...]


def longest_rows(recipe: TrainRecipe) -> tuple[int, int]:
    """Rows of a micro-batch that holds an episode as long as may be, and token slots of each."""
    packing, mesh = recipe.packing, recipe.mesh
    least = mesh.fsdp * mesh.expert
    return fitting_rows(recipe.rollout.context_length, packing.row_length, packing.rows_per_micro_batch, least)


def plan_programs(recipe: TrainRecipe, config: models.Qwen35MoeConfig, mesh: Mesh) -> dict[str, Program]:
    """The programs of an optimizer step, ready to be lowered for devices that need not be there.

    Args:
        recipe: A training recipe.
        config: Shape of its model.
        mesh: Devices of the shape that the recipe asks for.

    Returns:
        `micro_batch`: forward, head, loss and backward, gradients accumulated, of the longest rows there can be;
        `update`: clip and Adam.
    """
    shape = mesh_shape(recipe.mesh)
    execution = execution_of(recipe.execution, recipe.remat, shape)
    rows, row_length = longest_rows(recipe)
    models.check_mesh(config, shape, rows, row_length, execution.expert_chunks)
    objective = Objective(
        config=config,
        algorithm=recipe.algorithm,
        temperature=recipe.rollout.temperature,
        context_length=recipe.rollout.context_length,
        freeze_router=recipe.policy.freeze_router,
        router_aux_coefficient=0.0,
        execution=execution,
        activation_dtype=recipe.execution.activation_dtype,
    )
    programs = Programs(objective, Adam(settings=recipe.optimizer), mesh)
    replicated = NamedSharding(mesh, PartitionSpec())

    def whole(x: Any) -> Any:
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated)

    def like_parameters(dtype: str) -> Params:
        declared = parallel.abstract(models.parameters(config, dtype))
        return jax.tree.map(
            lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s), declared, programs.parameter_shardings
        )

    def batch(dtype: Any, *more: int) -> Any:
        size = (rows, row_length, *more)
        return jax.ShapeDtypeStruct(size, dtype, sharding=programs.batch_sharding)

    integers, floats = batch(jnp.int32), batch(jnp.float32)
    routing = batch(jnp.int16, config.num_hidden_layers, config.num_experts_per_tok)
    micro_batch = DeviceBatch(integers, integers, integers, floats, floats, floats, routing)
    params, wide = like_parameters(recipe.execution.parameter_dtype), like_parameters("float32")
    sums: Any = jax.tree.map(whole, Sums.zero())
    accumulated = Accumulated(wide, sums)
    moments = _like_moments(whole(np.int32(0)), wide)
    rate = whole(np.float32(0))
    return {
        "micro_batch": Program(
            programs.accumulate,
            (params, None, accumulated, micro_batch),
            ("parameters", "parameters", "gradients", "batch"),
        ),
        "update": Program(
            programs.update, (params, moments, accumulated, rate), ("parameters", "optimizer", "gradients", "batch")
        ),
    }
