"""The training forward pass: packed rows of tokens in, hidden states out."""

from __future__ import annotations

import functools
from typing import NamedTuple

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

    def block(x: jax.Array, inputs: tuple[Params, jax.Array | None]) -> tuple[jax.Array, jax.Array]:
        return _block(inputs[0], x, segment_ids, positions, inputs[1], config, execution)

    if execution.remat:
        block = jax.checkpoint(block)
    replay = None
    if routing is not None:
        per_block = (config.num_blocks, config.full_attention_interval)
        replay = jnp.moveaxis(routing.reshape(*tokens.shape, *per_block, -1), (2, 3), (0, 1))
    if execution.scan_blocks:
        x, aux = lax.scan(block, x, (stack_blocks(params)["blocks"], replay))
        router_aux = aux.mean()
    else:
        terms = []
        for i, block_params in enumerate(unstack_blocks(params)["blocks"]):
            x, aux = block(x, (block_params, None if replay is None else replay[i]))
            terms.append(aux)
        router_aux = functools.reduce(jnp.add, terms) / len(terms)
    return ForwardOutput(layers.rms_norm(x, params["final_norm"], config.rms_norm_eps), router_aux)


def _block(
    params: Params,
    x: jax.Array,
    segment_ids: jax.Array,
    positions: jax.Array,
    replay: jax.Array | None,
    config: Qwen35MoeConfig,
    execution: Execution,
) -> tuple[jax.Array, jax.Array]:
    """One block of layers; the last of them has softmax attention."""
    valid, aux = segment_ids > 0, jnp.float32(0)
    for i in range(config.full_attention_interval):
        layer = params[f"layer_{i}"]
        normed = layers.rms_norm(x, layer["input_norm"], config.rms_norm_eps)
        if config.is_attention_layer(i):
            x = x + layers.attention(layer["mixer"], normed, positions, segment_ids, config, execution)
        else:
            x = x + layers.delta_net(layer["mixer"], normed, segment_ids, config, execution)
        normed = layers.rms_norm(x, layer["post_norm"], config.rms_norm_eps)
        out, balance = layers.moe(layer["moe"], normed, valid, config, execution, None if replay is None else replay[i])
        x, aux = x + out, aux + balance
    return x, aux / config.full_attention_interval
