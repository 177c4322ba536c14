"""The layers, as functions of their parameters: norms, rotary embedding, both mixers, experts.

Training and decoding differ in where a mixer's past comes from. What comes before (projections) and after (gates,
output projection) is shared, so the two cannot drift apart.

On a mesh, a device sees its rows, its stretch of each, and its heads, experts and inner units; the parameters given
here are gathered but for those. Mixers and experts return what this device contributes: the sum over `tensor` is due.

Legend: B rows, T time, M hidden width, H query or value heads, K key heads, D head width, C channels.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from swerve import kernels
from swerve.models.config import Qwen35MoeConfig
from swerve.models.execution import Execution
from swerve.models.parameters import Params
from swerve.parallel import MeshShape

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
    q, k = checkpoint_name(q, "attention_query"), checkpoint_name(k, "attention_key")
    mixed = _attend(q, k, checkpoint_name(v, "attention_value"), segment_ids_BT, execution)
    return attention_output(params, x_BTM, checkpoint_name(mixed, "attention_mixed"))


def _attend(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, execution: Execution) -> jax.Array:
    """Attention of this device's stretch of the rows to all of them."""
    mesh, block = execution.mesh, execution.attention_block
    if mesh.context == 1 and execution.attention == "naive":
        return kernels.packed_attention_naive(q, k, v, segments)
    if mesh.context == 1 and execution.attention == "blocked":
        return kernels.packed_attention(q, k, v, segments, block=block)
    if execution.context_attention == "ring" and mesh.context > 1:
        return _ring(q, k, v, segments, execution).astype(q.dtype)
    keys, values, all_segments = (mesh.gather(x, ("context",), 1) for x in (k, v, segments))
    stretch = mesh.index("context")
    if execution.attention == "splash":
        interpret = execution.interpret
        return kernels.splash_attention(
            q, keys, values, segments, all_segments, stretch=stretch, block=block, interpret=interpret
        )
    ahead = stretch * q.shape[1]
    return kernels.attend_part(q, keys, values, segments, all_segments, ahead, block=block).out.astype(q.dtype)


def _ring(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, execution: Execution) -> jax.Array:
    """Attention to the stretches of all devices of the row, which visit this one after the other."""
    mesh, time = execution.mesh, q.shape[1]
    whole = kernels.attend_part(q, k, v, segments, segments, 0, block=execution.attention_block)
    visiting = (k, v, segments)
    for step in range(1, mesh.context):
        visiting = mesh.rotated(visiting, "context")
        ahead = jnp.where(mesh.index("context") >= step, step * time, -time)  # none of a later stretch is seen
        keys, values, key_segments = visiting
        part = kernels.attend_part(q, keys, values, segments, key_segments, ahead, block=execution.attention_block)
        whole = whole.merge(part)
    return whole.out


# ------------------------------------------------------------------------------------------------ Gated DeltaNet


class DeltaInputs(NamedTuple):
    """What the delta rule takes."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array


def empty_history(config: Qwen35MoeConfig, rows: int, dtype: Any) -> jax.Array:
    """Inputs of the convolution before the start of a sequence: zeros `[B, W - 1, C]`, C channels of q, k and v."""
    channels = 2 * config.linear_key_dim + config.linear_value_dim
    return jnp.zeros((rows, config.linear_conv_kernel_dim - 1, channels), dtype)


def delta_projected(params: Params, x_BTM: jax.Array) -> jax.Array:
    """Queries, keys and values before the convolution, side by side: `[B, T, C]`."""
    return kernels.matmul(x_BTM, _side_by_side(params, ("q", "k", "v")).astype(x_BTM.dtype))


def delta_inputs(
    params: Params,
    x_BTM: jax.Array,
    projected_BTC: jax.Array,
    valid_BT: jax.Array,
    reach_BT: jax.Array,
    history_BZC: jax.Array,
    config: Qwen35MoeConfig,
) -> DeltaInputs:
    """Convolve and normalise; padding gets `g` and `beta` 0, which leave any state as it is."""
    taps = _side_by_side(params, ("q_conv", "k_conv", "v_conv")).astype(x_BTM.dtype)
    convolved = kernels.causal_convolution(projected_BTC, taps, history_BZC, reach_BT).astype(jnp.float32)
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
    return DeltaInputs(_l2_norm(q) * config.linear_key_head_dim**-0.5, _l2_norm(k), v, g, beta)


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
    mesh, look_back = execution.mesh, config.linear_conv_kernel_dim - 1
    before = _halo(segment_ids_BT + 1, max(look_back, 1), mesh) - 1  # -1 before the row
    starts, reach = segment_borders(segment_ids_BT, before)
    projected = checkpoint_name(delta_projected(params, x_BTM), "delta_projected")
    history = _halo(projected, look_back, mesh)
    inputs = delta_inputs(params, x_BTM, projected, segment_ids_BT > 0, reach, history, config)
    if mesh.context == 1:
        mixed, _ = _delta_rule(inputs, starts, _no_state(inputs), execution)
    else:
        mixed = _delta_across(inputs, starts, execution)
    return delta_output(params, x_BTM, checkpoint_name(mixed, "delta_mixed"), config)


def _halo(x_BT: jax.Array, places: int, mesh: MeshShape) -> jax.Array:
    """The last places of the stretch before this device's, zeros before the row: `[B, places, ...]`."""
    last = x_BT[:, max(x_BT.shape[1] - places, 0) :]
    short = places - last.shape[1]
    last = jnp.pad(last, ((0, 0), (short, 0), *((0, 0),) * (last.ndim - 2))) if short else last
    return mesh.from_before(last, "context")


def _delta_rule(
    inputs: DeltaInputs, starts: jax.Array, state: jax.Array, execution: Execution
) -> tuple[jax.Array, jax.Array]:
    if execution.delta == "recurrent":
        return kernels.delta_recurrent(*inputs, starts, state)
    return kernels.delta_chunked(*inputs, starts, state, chunk=execution.delta_chunk)


def _no_state(inputs: DeltaInputs) -> jax.Array:
    """The state before a row: zeros `[B, H, P, V]`."""
    rows, _, heads, value_width = inputs.v.shape
    return jnp.zeros((rows, heads, inputs.k.shape[-1], value_width), jnp.float32)


def _delta_across(inputs: DeltaInputs, starts: jax.Array, execution: Execution) -> jax.Array:
    """The delta rule over rows whose stretches lie on several devices.

    A stretch maps the state S before it to A S + b after it, and its outputs are affine in S likewise. Both halves come
    from one run: columns of the state never mix, so the identity is put beside a state of zeros, without values of its
    own. The maps are composed across devices in log2 steps, and what arrives is added to the outputs.
    """
    mesh, precision = execution.mesh, execution.delta_precision
    value_width, key_width = inputs.v.shape[-1], inputs.k.shape[-1]
    identity = jnp.broadcast_to(
        jnp.eye(key_width, dtype=jnp.float32), (*inputs.v.shape[:1], inputs.v.shape[2], key_width, key_width)
    )
    both = jnp.concatenate([_no_state(inputs), identity], axis=-1)
    wide = jnp.pad(inputs.v, ((0, 0), (0, 0), (0, 0), (0, key_width)))
    out, end = _delta_rule(inputs._replace(v=wide), starts, both, execution)
    b, a = jnp.split(end, (value_width,), axis=-1)
    distance = 1
    while distance < mesh.context:
        earlier_a, earlier_b = mesh.from_before((a, b), "context", distance)  # zeros where there is none: as due
        b = b + jnp.matmul(a, earlier_b, precision=precision)
        a = jnp.matmul(a, earlier_a, precision=precision)
        distance *= 2
    state = mesh.from_before(b, "context")
    own, answers = jnp.split(out, (value_width,), axis=-1)
    return own + jnp.einsum("bthp,bhpv->bthv", answers, state, precision=precision)


def segment_borders(segment_ids_BT: jax.Array, before_BZ: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Where segments start, and how far a convolution may look back.

    Args:
        segment_ids_BT: int32, contiguous segments, 0 for padding.
        before_BZ: int32, the ids before these, as many as the convolution looks back; -1 before the row.

    Returns:
        bool `[B, T]`, the token is the first of a segment; int32 `[B, T]`, inputs before it in the same segment,
        counted up to Z.
    """
    time, most = segment_ids_BT.shape[1], before_BZ.shape[1]
    padded = jnp.concatenate([before_BZ, segment_ids_BT], axis=1)
    reach = jnp.zeros_like(segment_ids_BT)
    for back in range(1, most + 1):
        start = most - back
        reach += (padded[:, start : start + time] == segment_ids_BT) & (reach == back - 1)
    return (segment_ids_BT != padded[:, most - 1 : most - 1 + time]) & (segment_ids_BT > 0), reach


def _trailing(weight: jax.Array, ndim: int) -> jax.Array:
    """A vector as float32, shaped to scale the last of `ndim` dimensions."""
    return weight.astype(jnp.float32).reshape(*(1,) * (ndim - 1), -1)


def _l2_norm(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt((x * x).sum(-1, keepdims=True) + _L2_EPS)


# -------------------------------------------------------------------------------------------------------- experts


class Experts(NamedTuple):
    """What the experts of a layer give.

    Attributes:
        out: `[B, T, M]`, this device's contribution.
        load: Of the experts, summed over this device's tokens.
        dropped: int32 scalar, pairs that this device should have computed and had no place for.
    """

    out: jax.Array
    load: kernels.Load
    dropped: jax.Array


def moe(
    params: Params,
    x_BTM: jax.Array,
    valid_BT: jax.Array,
    config: Qwen35MoeConfig,
    execution: Execution,
    replay_BTJ: jax.Array | None = None,
) -> Experts:
    """Routed experts plus the shared one."""
    x, valid = x_BTM.reshape(-1, x_BTM.shape[-1]), valid_BT.reshape(-1)
    replay = None if replay_BTJ is None else replay_BTJ.reshape(-1, replay_BTJ.shape[-1])

    def visit(x: jax.Array, valid: jax.Array, replay: jax.Array | None) -> Experts:
        routing = kernels.route(x, params["router"], valid, config.num_experts_per_tok, replay)
        out, dropped = _routed(params, x, valid, routing, config, execution)
        return Experts(checkpoint_name(out, "expert_output"), routing.load, dropped)

    if execution.expert_chunks == 1:
        routed = visit(x, valid, replay)
    else:
        parts = jax.tree.map(lambda a: a.reshape(execution.expert_chunks, -1, *a.shape[1:]), (x, valid, replay))
        each = lax.map(lambda part: visit(*part), parts)
        routed = Experts(each.out.reshape(x.shape), *jax.tree.map(lambda a: a.sum(0), each[1:]))
    shared = project(x, params["shared_gate_up"])
    hidden = checkpoint_name(jax.nn.silu(shared[:, 0]) * shared[:, 1], "shared_hidden")
    shared = project(hidden, params["shared_down"])
    scale = jax.nn.sigmoid((x * _trailing(params["shared_scale"], x.ndim)).sum(-1, keepdims=True)).astype(x.dtype)
    return routed._replace(out=(routed.out + scale * shared).reshape(x_BTM.shape))


def _routed(
    params: Params,
    x: jax.Array,
    valid: jax.Array,
    routing: kernels.Routing,
    config: Qwen35MoeConfig,
    execution: Execution,
) -> tuple[jax.Array, jax.Array]:
    """What the routed experts make of tokens `[N, M]`, and the pairs dropped.

    Devices along the axis `expert` hold different tokens and different experts: each gathers the tokens of all, runs
    its experts on them, and the sums go back to where the tokens came from.
    """
    mesh = execution.mesh
    x, valid, routing = (
        jax.tree.map(lambda a: mesh.gather(a, ("expert",), 0), part) for part in (x, valid, routing._replace(load=None))
    )
    gate_up, down = params["gate_up"].astype(x.dtype), params["down"].astype(x.dtype)
    first = mesh.index("expert") * gate_up.shape[0]
    size, top_k, shards = x.shape[0], config.num_experts_per_tok, mesh.expert
    if execution.experts == "dense":
        local = routing._replace(experts=routing.experts - first)
        out, dropped = kernels.experts_dense(x, local, gate_up, down), jnp.int32(0)
    elif execution.experts == "grouped":
        tile = kernels.row_tile(kernels.capacity_of(size, top_k, shards, execution.buffer_factor))
        capacity = kernels.capacity_of(size, top_k, shards, execution.buffer_factor, tile)
        out, dropped = kernels.experts_grouped(
            x, routing, gate_up, down, valid, first=first, capacity=capacity, interpret=execution.interpret
        )
    else:
        block = expert_block(size, config, execution.expert_block)
        capacity = kernels.capacity_of(size, top_k, shards, execution.buffer_factor)
        out, dropped = kernels.experts_sorted(
            x, routing, gate_up, down, valid, block=block, first=first, capacity=capacity
        )
    return mesh.scatter_sum(out, ("expert",), 0), dropped


def expert_block(num_tokens: int, config: Qwen35MoeConfig, largest: int) -> int:
    """Places of one block: about the balanced load of half an expert, a power of two from 8 to `largest`."""
    balanced = num_tokens * config.num_experts_per_tok / config.num_experts
    block = 8
    while block < largest and block < balanced / 2:
        block *= 2
    return block
