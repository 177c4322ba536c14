"""The training forward pass: packed rows of tokens in, hidden states out.

With a mesh in `Execution` it is called inside a manual program, with this device's parts of parameters and batch; then
every layer first gathers its parameters, and drops them again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from swerve import kernels
from swerve.models import layers
from swerve.models.config import Qwen35MoeConfig
from swerve.models.execution import DEFAULT, Execution
from swerve.models.parameters import Params, layer_parameters, parameters, stack_blocks, unstack_blocks
from swerve.models.sharding import RULES, of_tensor_rank
from swerve.parallel import ROW_AXES


class ForwardOutput(NamedTuple):
    """What a forward pass gives.

    Attributes:
        hidden: `[B, T, M]`, final norm applied.
        router_aux: float32 scalar, mean over layers of the router's balance term, 1 when balanced.
        dropped: int32 scalar, (token, choice) pairs of all layers that found no place; a result with any is not used.
    """

    hidden: jax.Array
    router_aux: jax.Array
    dropped: jax.Array


def forward(
    params: Params,
    config: Qwen35MoeConfig,
    tokens: jax.Array,
    segment_ids: jax.Array,
    positions: jax.Array,
    *,
    routing: jax.Array | None = None,
    execution: Execution = DEFAULT,
    dtype: jnp.dtype | type | str = jnp.float32,
) -> ForwardOutput:
    """Run the model over packed rows.

    Args:
        params: Parameters, blocks stacked or not.
        config: The model's shape.
        tokens: int32 `[B, T]`.
        segment_ids: int32 `[B, T]`, 1.. for the sequences of a row, each contiguous; 0 for padding, which reaches no
            expert and no other token.
        positions: int32 `[B, T]`, position within the segment.
        routing: int `[B, T, num_hidden_layers, num_experts_per_tok]`, experts recorded by a sampler, negative for none;
            or `None`.
        execution: How to compute it.
        dtype: Type of the activations.

    Returns:
        Hidden states of this device's tokens; the router's balance and the dropped pairs of all devices.
    """
    mesh = execution.mesh
    wide = execution.sum_in_float32
    embedding = RULES.gather(params["embedding"], parameters(config)["embedding"], mesh, sum_in_float32=wide)
    x = _embedded(embedding, tokens).astype(dtype)
    run = _Run(of_tensor_rank(config, mesh), config, execution, segment_ids, layers.rotation(positions, config))
    if routing is not None:
        if routing.shape != (*tokens.shape, config.num_hidden_layers, config.num_experts_per_tok):
            raise ValueError(
                f"routing of shape {routing.shape} does not match {tokens.shape} tokens and the model's layers"
            )
        routing = jnp.moveaxis(routing, 2, 0).reshape(
            config.num_blocks, config.full_attention_interval, *tokens.shape, config.num_experts_per_tok
        )
    if execution.layers == "scan":
        x, stats = lax.scan(run.block, x, (stack_blocks(params)["blocks"], routing))
    else:
        x, stats = _each(run.block, x, unstack_blocks(params)["blocks"], routing)
    load = mesh.sum(stats.load, (*ROW_AXES, "context"))
    dropped = mesh.sum(stats.dropped.sum(), (*ROW_AXES, "context"))
    hidden = layers.rms_norm(x, params["final_norm"], config.rms_norm_eps)
    return ForwardOutput(hidden, load.balance(config.num_experts_per_tok).mean(), dropped)


@jax.custom_vjp
def _embedded(table: jax.Array, tokens: jax.Array) -> jax.Array:
    """Rows of the table; a token's gradients are added up in float32, whatever the table's type."""
    return jnp.take(table, tokens, axis=0)


def _embedded_forward(table: jax.Array, tokens: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _embedded(table, tokens), (table, tokens)


def _embedded_backward(saved: tuple[jax.Array, jax.Array], dout: jax.Array) -> tuple[jax.Array, None]:
    table, tokens = saved
    total = jnp.zeros(table.shape, jnp.float32).at[tokens].add(dout.astype(jnp.float32), mode="drop")
    return total.astype(table.dtype), None


_embedded.defvjp(_embedded_forward, _embedded_backward)


class _LayerStats(NamedTuple):
    """What a layer, or several stacked, says of its experts on this device."""

    load: kernels.Load
    dropped: jax.Array


class _Run(NamedTuple):
    """What all layers of one forward pass share; `config` has the heads of this device only."""

    config: Qwen35MoeConfig
    whole: Qwen35MoeConfig
    execution: Execution
    segment_ids: jax.Array
    rotation: layers.Rotation

    def block(self, x: jax.Array, inputs: tuple[Params, jax.Array | None]) -> tuple[jax.Array, _LayerStats]:
        """DeltaNet layers, then one with softmax attention; also what they say of their experts."""
        params, routing = inputs
        before, last = (None, None) if routing is None else (routing[:-1], routing[-1])
        delta = self.remembering(functools.partial(self.layer, False))
        attention = self.remembering(functools.partial(self.layer, True))
        if self.execution.layers == "scan":
            x, stats = lax.scan(delta, x, (params["delta"], before))
        else:
            x, stats = _each(delta, x, params["delta"], before)
        x, of_last = attention(x, (params["attention"], last))
        return x, jax.tree.map(lambda several, one: jnp.concatenate([several, one[None]]), stats, of_last)

    def remembering(self, layer: Callable[..., Any]) -> Callable[..., Any]:
        """The layer, keeping for its backward pass what `execution.remat` says."""
        remat = self.execution.remat
        if remat is None:
            return layer
        policy = jax.checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(remat.keep),
            names_which_can_be_offloaded=list(remat.offload),
            offload_src="device",
            offload_dst="pinned_host",
        )
        return jax.checkpoint(layer, policy=policy, prevent_cse=self.execution.layers != "scan")

    def layer(
        self, attends: bool, x: jax.Array, inputs: tuple[Params, jax.Array | None]
    ) -> tuple[jax.Array, _LayerStats]:
        """Mixer and experts, each added to the residual stream."""
        parts, routing = inputs
        config, execution, mesh = self.config, self.execution, self.execution.mesh
        declared, wide = layer_parameters(self.whole, attention=attends), execution.sum_in_float32
        params = RULES.gathered(parts, declared, mesh, sum_in_float32=wide)
        x = checkpoint_name(x, "layer_input")
        normed = layers.rms_norm(x, params["input_norm"], config.rms_norm_eps)
        if attends:
            mixed = layers.attention(params["mixer"], normed, self.rotation, self.segment_ids, config, execution)
        else:
            mixed = layers.delta_net(params["mixer"], normed, self.segment_ids, config, execution)
        x = x + checkpoint_name(mesh.sum(mixed, ("tensor",)), "mixer_output")
        normed = layers.rms_norm(x, params["post_norm"], config.rms_norm_eps)
        experts = layers.moe(params["moe"], normed, self.segment_ids > 0, config, execution, routing)
        return x + mesh.sum(experts.out, ("tensor",)), _LayerStats(experts.load, experts.dropped)


def _each(
    step: Callable[[jax.Array, Any], tuple[jax.Array, _LayerStats]],
    x: jax.Array,
    params: tuple[Params, ...],
    routing: jax.Array | None,
) -> tuple[jax.Array, _LayerStats]:
    """`lax.scan`, unrolled."""
    terms = []
    for i, one in enumerate(params):
        x, term = step(x, (one, None if routing is None else routing[i]))
        terms.append(term)
    return x, jax.tree.map(lambda *each: jnp.stack(each), *terms)
