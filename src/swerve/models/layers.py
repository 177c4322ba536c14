"""The layers, as functions of their parameters: norms, rotary embedding, both mixers, experts.

Training and decoding differ in where a mixer's past comes from. What comes before (projections) and after (gates,
output projection) is shared, so the two cannot drift apart.

Legend: B rows, T time, M hidden width, H query or value heads, K key heads, D head width, C channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from swerve import kernels
from swerve.models.config import Qwen35MoeConfig
from swerve.models.execution import Execution
from swerve.models.parameters import Params

_L2_EPS = 1e-6


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """`x / rms(x) * (1 + weight)` over the last dimension, computed in float32."""
    wide = x.astype(jnp.float32)
    normed = wide * lax.rsqrt((wide * wide).mean(-1, keepdims=True) + eps)
    return (normed * (1 + _trailing(weight, x.ndim))).astype(x.dtype)


class Rotation(NamedTuple):
    """Cosine and sine of each position's angles, `[B, T, 1, rotary_dim / 2]` float32."""

    cos: jax.Array
    sin: jax.Array


def rotation(positions_BT: jax.Array, config: Qwen35MoeConfig) -> Rotation:
    """The rotary angles of all positions: computed once, read by every layer and head."""
    half = config.rotary_dim // 2
    frequencies = config.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles = (positions_BT[..., None].astype(jnp.float32) * frequencies[None, None])[:, :, None]
    return Rotation(*lax.optimization_barrier((jnp.cos(angles), jnp.sin(angles))))


def rotate(x_BTHD: jax.Array, rotation: Rotation) -> jax.Array:
    """Rotary embedding of the leading dimensions, halves paired; the others stay."""
    half = rotation.cos.shape[-1]
    left, right, rest = jnp.split(x_BTHD.astype(jnp.float32), (half, 2 * half), axis=-1)
    turned = left * rotation.cos - right * rotation.sin, right * rotation.cos + left * rotation.sin
    return jnp.concatenate([*turned, rest], axis=-1).astype(x_BTHD.dtype)


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`[..., M]` times `[M, *rest]`, giving `[..., *rest]`."""
    flat = kernels.matmul(x, weight.reshape(weight.shape[0], -1).astype(x.dtype))
    return flat.reshape(*x.shape[:-1], *weight.shape[1:])


def project_out(x_BTHD: jax.Array, weight_XM: jax.Array) -> jax.Array:
    """`[B, T, H, D]` times `[H * D, M]`, giving `[B, T, M]`."""
    return project(x_BTHD.reshape(*x_BTHD.shape[:-2], -1), weight_XM)


# ------------------------------------------------------------------------------------------------ softmax attention


def attention_inputs(
    params: Params, x_BTM: jax.Array, rotation: Rotation, config: Qwen35MoeConfig
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries `[B, T, H, D]` (scaled), keys and values `[B, T, K, D]`, normalised and rotated."""
    q = rotate(rms_norm(project(x_BTM, params["q"]), params["q_norm"], config.rms_norm_eps), rotation)
    k = rotate(rms_norm(project(x_BTM, params["k"]), params["k_norm"], config.rms_norm_eps), rotation)
    return q * config.head_dim**-0.5, k, project(x_BTM, params["v"])


def attention_output(params: Params, x_BTM: jax.Array, mixed_BTHD: jax.Array) -> jax.Array:
    """Gate each head's output by a sigmoid of the layer's input, and project it."""
    return project_out(mixed_BTHD * jax.nn.sigmoid(project(x_BTM, params["gate"])), params["out"])


def attention(
    params: Params,
    x_BTM: jax.Array,
    rotation: Rotation,
    segment_ids_BT: jax.Array,
    config: Qwen35MoeConfig,
    execution: Execution,
) -> jax.Array:
    """Causal gated attention within segments, `[B, T, M]`."""
    q, k, v = attention_inputs(params, x_BTM, rotation, config)
    if execution.attention == "naive":
        mixed = kernels.packed_attention_naive(q, k, v, segment_ids_BT)
    else:
        mixed = kernels.packed_attention(q, k, v, segment_ids_BT, block=execution.attention_block)
    return attention_output(params, x_BTM, mixed)


# ------------------------------------------------------------------------------------------------ Gated DeltaNet


class DeltaInputs(NamedTuple):
    """What the delta rule takes, and the convolution's raw input `[B, T, C]`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    raw: jax.Array


def empty_history(config: Qwen35MoeConfig, rows: int, dtype: Any) -> jax.Array:
    """Inputs of the convolution before the start of a sequence: zeros `[B, W - 1, C]`, C channels of q, k and v."""
    channels = 2 * config.linear_key_dim + config.linear_value_dim
    return jnp.zeros((rows, config.linear_conv_kernel_dim - 1, channels), dtype)


def delta_inputs(
    params: Params,
    x_BTM: jax.Array,
    valid_BT: jax.Array,
    reach_BT: jax.Array,
    history_BZC: jax.Array,
    config: Qwen35MoeConfig,
) -> DeltaInputs:
    """Project, convolve, normalise; padding gets `g` and `beta` 0, which leave any state as it is."""
    weight = _side_by_side(params, ("q", "k", "v")).astype(x_BTM.dtype)
    taps = _side_by_side(params, ("q_conv", "k_conv", "v_conv")).astype(x_BTM.dtype)
    raw = kernels.matmul(x_BTM, weight)
    convolved = kernels.causal_convolution(raw, taps, history_BZC, reach_BT).astype(jnp.float32)
    cuts = (config.linear_key_dim, 2 * config.linear_key_dim)
    q, k, v = (
        part.reshape(*part.shape[:2], heads, -1)
        for part, heads in zip(
            jnp.split(convolved, cuts, axis=-1),
            (config.linear_num_key_heads, config.linear_num_key_heads, config.linear_num_value_heads),
            strict=True,
        )
    )
    both = kernels.matmul(x_BTM, _side_by_side(params, ("a", "b")).astype(x_BTM.dtype)).astype(jnp.float32)
    a, b = jnp.split(both, 2, axis=-1)
    valid = valid_BT[..., None]
    decay = jax.nn.softplus(a + _trailing(params["dt_bias"], 3))
    g = jnp.where(valid, -jnp.exp(_trailing(params["A_log"], 3)) * decay, 0)
    beta = jnp.where(valid, jax.nn.sigmoid(b), 0)
    return DeltaInputs(_l2_norm(q) * config.linear_key_head_dim**-0.5, _l2_norm(k), v, g, beta, raw)


def _side_by_side(params: Params, names: tuple[str, ...]) -> jax.Array:
    """Weights `[in, ...]` as one matrix."""
    return jnp.concatenate([params[n].reshape(params[n].shape[0], -1) for n in names], axis=1)


def delta_output(params: Params, x_BTM: jax.Array, mixed_BTHD: jax.Array, config: Qwen35MoeConfig) -> jax.Array:
    """Normalise each head (weight `w`, not `1 + w`), gate it by silu of z, and project it."""
    z = project(x_BTM, params["z"]).astype(jnp.float32)
    scale = lax.rsqrt((mixed_BTHD * mixed_BTHD).mean(-1, keepdims=True) + config.rms_norm_eps)
    gated = mixed_BTHD * scale * _trailing(params["norm"], 4) * jax.nn.silu(z)
    return project_out(gated.astype(x_BTM.dtype), params["out"])


def delta_net(
    params: Params, x_BTM: jax.Array, segment_ids_BT: jax.Array, config: Qwen35MoeConfig, execution: Execution
) -> jax.Array:
    """Gated DeltaNet over packed rows, `[B, T, M]`; neither state nor convolution crosses a segment's start."""
    rows = x_BTM.shape[0]
    starts, reach = segment_borders(segment_ids_BT, config.linear_conv_kernel_dim)
    history = empty_history(config, rows, x_BTM.dtype)
    inputs = delta_inputs(params, x_BTM, segment_ids_BT > 0, reach, history, config)
    state = jnp.zeros(
        (rows, config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim), jnp.float32
    )
    if execution.delta == "recurrent":
        mixed, _ = kernels.delta_recurrent(*inputs[:5], starts, state)
    else:
        mixed, _ = kernels.delta_chunked(*inputs[:5], starts, state, chunk=execution.delta_chunk)
    return delta_output(params, x_BTM, mixed, config)


def segment_borders(segment_ids_BT: jax.Array, conv_width: int) -> tuple[jax.Array, jax.Array]:
    """Where segments start, and how far a convolution may look back.

    Args:
        segment_ids_BT: int32, contiguous segments, 0 for padding.
        conv_width: Width of the convolution.

    Returns:
        bool `[B, T]`, the token is the first of a segment; int32 `[B, T]`, inputs before it in the same segment,
        counted up to `conv_width - 1`.
    """
    time = segment_ids_BT.shape[1]
    padded = jnp.pad(segment_ids_BT, ((0, 0), (conv_width - 1, 0)), constant_values=-1)
    reach = jnp.zeros_like(segment_ids_BT)
    for back in range(1, conv_width):
        start = conv_width - 1 - back
        reach += (padded[:, start : start + time] == segment_ids_BT) & (reach == back - 1)
    before = jnp.pad(segment_ids_BT[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return (segment_ids_BT != before) & (segment_ids_BT > 0), reach


def _trailing(weight: jax.Array, ndim: int) -> jax.Array:
    """A vector as float32, shaped to scale the last of `ndim` dimensions."""
    return weight.astype(jnp.float32).reshape(*(1,) * (ndim - 1), -1)


def _l2_norm(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt((x * x).sum(-1, keepdims=True) + _L2_EPS)


# -------------------------------------------------------------------------------------------------------- experts


def moe(
    params: Params,
    x_BTM: jax.Array,
    valid_BT: jax.Array,
    config: Qwen35MoeConfig,
    execution: Execution,
    replay_BTJ: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Routed experts plus the shared one.

    Returns:
        `[B, T, M]`, and the router's balance term, 1 when balanced.
    """
    x, valid = x_BTM.reshape(-1, x_BTM.shape[-1]), valid_BT.reshape(-1)
    replay = None if replay_BTJ is None else replay_BTJ.reshape(-1, replay_BTJ.shape[-1])
    routing = kernels.route(x, params["router"], valid, config.num_experts_per_tok, replay)
    gate_up, down = params["gate_up"].astype(x.dtype), params["down"].astype(x.dtype)
    if execution.experts == "dense":
        routed = kernels.experts_dense(x, routing, gate_up, down)
    else:
        block = expert_block(x.shape[0], config, execution.expert_block)
        routed = kernels.experts_sorted(x, routing, gate_up, down, valid, block=block)
    shared = project(x, params["shared_gate_up"])
    shared = project(jax.nn.silu(shared[:, 0]) * shared[:, 1], params["shared_down"])
    scale = jax.nn.sigmoid((x * params["shared_scale"].astype(x.dtype)[None]).sum(-1, keepdims=True))
    return (routed + scale * shared).reshape(x_BTM.shape), routing.aux


def expert_block(num_tokens: int, config: Qwen35MoeConfig, largest: int) -> int:
    """Places of one block: about the balanced load of half an expert, a power of two from 8 to `largest`."""
    balanced = num_tokens * config.num_experts_per_tok / config.num_experts
    block = 8
    while block < largest and block < balanced / 2:
        block *= 2
    return block
