"""Decoding with state: rows of different lengths, extended by chunks of any size.

A row keeps the keys and values of its attention layers, the last inputs of its convolutions, its DeltaNet states, and
its length. A row that is given no token keeps all of it, bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from swerve import kernels
from swerve.models import layers
from swerve.models.config import Qwen35MoeConfig
from swerve.models.execution import DEFAULT, Execution
from swerve.models.parameters import Params, unstack_blocks


class AttentionCache(NamedTuple):
    """Keys (normalised and rotated) `[B, K, D, S]` and values `[B, K, S, D]` of one attention layer."""

    keys: jax.Array
    values: jax.Array


class DeltaCache(NamedTuple):
    """Convolution history `[B, W - 1, C]` and state `[B, H, P, V]` (float32) of one DeltaNet layer."""

    history: jax.Array
    state: jax.Array


class DecodeState(NamedTuple):
    """Everything a batch of rows remembers.

    Attributes:
        lengths: int32 `[B]`, tokens each row holds.
        layers: One cache per layer.
    """

    lengths: jax.Array
    layers: tuple[AttentionCache | DeltaCache, ...]


def init_state(
    config: Qwen35MoeConfig, batch: int, max_length: int, dtype: jnp.dtype | type | str = jnp.float32
) -> DecodeState:
    """Empty rows.

    Args:
        config: The model's shape.
        batch: Rows.
        max_length: Tokens a row can hold.
        dtype: Type of keys, values and convolution histories.

    Returns:
        The state.
    """
    heads, width = config.num_key_value_heads, config.head_dim
    state_shape = (
        batch, config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    )  # fmt: skip

    def cache(layer: int) -> AttentionCache | DeltaCache:
        if config.is_attention_layer(layer):
            return AttentionCache(
                jnp.zeros((batch, heads, width, max_length), dtype), jnp.zeros((batch, heads, max_length, width), dtype)
            )
        return DeltaCache(layers.empty_history(config, batch, dtype), jnp.zeros(state_shape, jnp.float32))

    return DecodeState(jnp.zeros(batch, jnp.int32), tuple(cache(i) for i in range(config.num_hidden_layers)))


def grow_state(state: DecodeState, max_length: int) -> DecodeState:
    """The same rows with room for more tokens; what they hold stays, bit for bit.

    Args:
        state: The rows.
        max_length: Tokens a row can hold afterwards, at least as many as before.
    """

    def longer(x: jax.Array, axis: int) -> jax.Array:
        pads = [(0, 0)] * x.ndim
        pads[axis] = (0, max_length - x.shape[axis])
        return jnp.pad(x, pads)

    caches = tuple(
        AttentionCache(longer(c.keys, 3), longer(c.values, 2)) if isinstance(c, AttentionCache) else c
        for c in state.layers
    )
    return DecodeState(state.lengths, caches)


def reset_rows(state: DecodeState, mask: jax.Array) -> DecodeState:
    """Empty the rows where `mask` (bool `[B]`) is true; the others stay as they are."""

    def cleared(x: jax.Array) -> jax.Array:
        return jnp.where(mask.reshape(-1, *(1,) * (x.ndim - 1)), 0, x)

    caches = tuple(c if isinstance(c, AttentionCache) else jax.tree.map(cleared, c) for c in state.layers)
    return DecodeState(cleared(state.lengths), caches)  # what lies beyond a row's length is never read


def extend(
    params: Params,
    config: Qwen35MoeConfig,
    tokens: jax.Array,
    num_valid: jax.Array,
    state: DecodeState,
    *,
    execution: Execution = DEFAULT,
) -> tuple[jax.Array, DecodeState]:
    """Append a right-padded chunk of tokens to each row, at the row's own length.

    Args:
        params: Parameters, blocks stacked or not.
        config: The model's shape.
        tokens: int32 `[B, T]`; T = 1 is one decoding step.
        num_valid: int32 `[B]`, leading tokens of each row that count, 0 to T. The row's length plus this must not
            exceed the state's `max_length`.
        state: The rows.
        execution: How to compute it.

    Returns:
        The hidden state of each row's last valid token, final norm applied, `[B, M]` (meaningless for rows without
        any), and the new state.
    """
    time = tokens.shape[1]
    valid = jnp.arange(time)[None] < num_valid[:, None]
    positions = state.lengths[:, None] + jnp.arange(time)[None]
    dtype = _activation_dtype(state)
    x = jnp.take(params["embedding"], tokens, axis=0).astype(dtype)
    rotation = layers.rotation(positions, config)
    caches: list[AttentionCache | DeltaCache] = []
    blocks = unstack_blocks(params)["blocks"]
    for index, cache in enumerate(state.layers):
        block, within = divmod(index, config.full_attention_interval)
        attends = config.is_attention_layer(index)
        layer = blocks[block]["attention"] if attends else blocks[block]["delta"][within]
        normed = layers.rms_norm(x, layer["input_norm"], config.rms_norm_eps)
        mixed, cache = _mix(layer["mixer"], normed, valid, num_valid, positions, rotation, cache, config, execution)
        x = x + mixed
        normed = layers.rms_norm(x, layer["post_norm"], config.rms_norm_eps)
        x = x + layers.moe(layer["moe"], normed, valid, config, execution).out
        caches.append(cache)
    last = jnp.take_along_axis(x, jnp.maximum(num_valid - 1, 0)[:, None, None], axis=1)[:, 0]
    hidden = layers.rms_norm(last, params["final_norm"], config.rms_norm_eps)
    return hidden, DecodeState(state.lengths + num_valid, tuple(caches))


def _activation_dtype(state: DecodeState) -> Any:
    cache = state.layers[0]
    return cache.keys.dtype if isinstance(cache, AttentionCache) else cache.history.dtype


def _mix(
    params: Params,
    x: jax.Array,
    valid: jax.Array,
    num_valid: jax.Array,
    positions: jax.Array,
    rotation: layers.Rotation,
    cache: AttentionCache | DeltaCache,
    config: Qwen35MoeConfig,
    execution: Execution,
) -> tuple[jax.Array, AttentionCache | DeltaCache]:
    if isinstance(cache, AttentionCache):
        return _attend(params, x, valid, positions, rotation, cache, config)
    return _delta(params, x, valid, num_valid, cache, config, execution)


def _attend(
    params: Params,
    x: jax.Array,
    valid: jax.Array,
    positions: jax.Array,
    rotation: layers.Rotation,
    cache: AttentionCache,
    config: Qwen35MoeConfig,
) -> tuple[jax.Array, AttentionCache]:
    """Write the new keys and values, then attend to all of them."""
    q, k, v = layers.attention_inputs(params, x, rotation, config)
    rows = jnp.arange(x.shape[0])[:, None]
    where = jnp.where(valid, positions, cache.keys.shape[3])  # out of bounds: dropped
    keys = cache.keys.at[rows, :, :, where].set(k, mode="drop")
    values = cache.values.at[rows, :, where].set(v, mode="drop")
    mixed = kernels.cached_attention(q, keys, values, positions[:, 0])
    return layers.attention_output(params, x, mixed), AttentionCache(keys, values)


def _delta(
    params: Params,
    x: jax.Array,
    valid: jax.Array,
    num_valid: jax.Array,
    cache: DeltaCache,
    config: Qwen35MoeConfig,
    execution: Execution,
) -> tuple[jax.Array, DeltaCache]:
    """Advance the convolution and the state by the valid tokens."""
    time = x.shape[1]
    reach = jnp.full(x.shape[:2], config.linear_conv_kernel_dim, jnp.int32)  # histories of new rows are zeros
    projected = layers.delta_projected(params, x)
    inputs = layers.delta_inputs(params, x, projected, valid, reach, cache.history, config)
    if time == 1:
        q, k, v, g, beta = (a[:, 0] for a in inputs)
        mixed, state = kernels.delta_step(q, k, v, g, beta, cache.state)
        mixed = mixed[:, None]
    elif execution.delta == "recurrent":
        mixed, state = kernels.delta_recurrent(*inputs, jnp.zeros_like(valid), cache.state)
    else:
        starts = jnp.zeros_like(valid)
        mixed, state = kernels.delta_chunked(*inputs, starts, cache.state, chunk=execution.delta_chunk)
    moved = num_valid > 0
    state = jnp.where(moved[:, None, None, None], state, cache.state)
    history = _advance(cache.history, projected, num_valid)
    return layers.delta_output(params, x, mixed, config), DeltaCache(history, state)


def _advance(history_BZC: jax.Array, raw_BTC: jax.Array, num_valid_B: jax.Array) -> jax.Array:
    """The last `Z` inputs after `num_valid` more."""
    full = jnp.concatenate([history_BZC, raw_BTC], axis=1)
    if raw_BTC.shape[1] == 1:
        return jnp.where((num_valid_B > 0)[:, None, None], full[:, 1:], full[:, :-1])
    index = num_valid_B[:, None] + jnp.arange(history_BZC.shape[1])[None]
    return jnp.take_along_axis(full, index[..., None], axis=1)
