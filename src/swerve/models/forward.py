"""The training forward pass: packed rows of tokens in, hidden states out."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from swerve.models import layers
from swerve.models.config import Qwen35MoeConfig
from swerve.models.execution import DEFAULT, Execution
from swerve.models.parameters import Params, stack_blocks, unstack_blocks


class ForwardOutput(NamedTuple):
    """What a forward pass gives.

    Attributes:
        hidden: `[B, T, M]`, final norm applied.
        router_aux: float32 scalar, mean over layers of the router's balance term, 1 when balanced.
    """

    hidden: jax.Array
    router_aux: jax.Array


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
        Hidden states and the router's balance.
    """
    x = jnp.take(params["embedding"], tokens, axis=0).astype(dtype)
    run = _Run(config, execution, segment_ids, layers.rotation(positions, config))
    if routing is not None:
        if routing.shape != (*tokens.shape, config.num_hidden_layers, config.num_experts_per_tok):
            raise ValueError(
                f"routing of shape {routing.shape} does not match {tokens.shape} tokens and the model's layers"
            )
        routing = jnp.moveaxis(routing, 2, 0).reshape(
            config.num_blocks, config.full_attention_interval, *tokens.shape, config.num_experts_per_tok
        )
    if execution.layers == "scan":
        x, balance = lax.scan(run.block, x, (stack_blocks(params)["blocks"], routing))
    else:
        x, balance = _each(run.block, x, unstack_blocks(params)["blocks"], routing)
    aux = balance.sum() / config.num_hidden_layers
    return ForwardOutput(layers.rms_norm(x, params["final_norm"], config.rms_norm_eps), aux)


class _Run(NamedTuple):
    """What all layers of one forward pass share."""

    config: Qwen35MoeConfig
    execution: Execution
    segment_ids: jax.Array
    rotation: layers.Rotation

    def block(self, x: jax.Array, inputs: tuple[Params, jax.Array | None]) -> tuple[jax.Array, jax.Array]:
        """DeltaNet layers, then one with softmax attention; also the sum of their balance terms."""
        params, routing = inputs
        before, last = (None, None) if routing is None else (routing[:-1], routing[-1])
        delta, attention = functools.partial(self.layer, False), functools.partial(self.layer, True)
        if self.execution.remat:
            delta, attention = jax.checkpoint(delta), jax.checkpoint(attention)
        if self.execution.layers == "scan":
            x, balance = lax.scan(delta, x, (params["delta"], before))
        else:
            x, balance = _each(delta, x, params["delta"], before)
        x, of_last = attention(x, (params["attention"], last))
        return x, balance.sum() + of_last

    def layer(
        self, attends: bool, x: jax.Array, inputs: tuple[Params, jax.Array | None]
    ) -> tuple[jax.Array, jax.Array]:
        """Mixer and experts, each added to the residual stream."""
        params, routing = inputs
        config, execution = self.config, self.execution
        normed = layers.rms_norm(x, params["input_norm"], config.rms_norm_eps)
        if attends:
            x = x + layers.attention(params["mixer"], normed, self.rotation, self.segment_ids, config, execution)
        else:
            x = x + layers.delta_net(params["mixer"], normed, self.segment_ids, config, execution)
        normed = layers.rms_norm(x, params["post_norm"], config.rms_norm_eps)
        out, balance = layers.moe(params["moe"], normed, self.segment_ids > 0, config, execution, routing)
        return x + out, balance


def _each(
    step: Callable[[jax.Array, Any], tuple[jax.Array, jax.Array]],
    x: jax.Array,
    params: tuple[Params, ...],
    routing: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
    """`lax.scan`, unrolled."""
    terms = []
    for i, one in enumerate(params):
        x, term = step(x, (one, None if routing is None else routing[i]))
        terms.append(term)
    return x, jnp.stack(terms)
