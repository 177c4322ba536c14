"""Attention over packed rows by the splash kernel, on TPUs.

JAX ships the kernel; it skips blocks that the causal mask empties. What is ours is the plan of these blocks: the
kernel's own takes minutes for long rows, since it looks at every pair of places, though a block of a causal mask is
full, empty or on the diagonal by its number alone. It is made here for a row shrunk so that a block is eight places.

Legend: B rows, T queries, S keys, H query heads, K key heads, D head width.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_LEAST = 8  # places of a block in the shrunk row, the kernel's smallest


def splash_attention(
    q_BTHD: jax.Array,
    k_BSKD: jax.Array,
    v_BSKD: jax.Array,
    q_segments_BT: jax.Array,
    k_segments_BS: jax.Array,
    *,
    stretch: jax.Array | int = 0,
    block: int = 0,
    interpret: bool = False,
) -> jax.Array:
    """Causal attention within segments of one stretch of each row to the whole row.

    Args:
        q_BTHD: Queries of the stretch, scaled.
        k_BSKD: Keys of the row.
        v_BSKD: Values of the row.
        q_segments_BT: int32, segments of the queries.
        k_segments_BS: int32, segments of the keys.
        stretch: int32 scalar, which of the `S / T` stretches.
        block: Queries and keys of one block; divides T; 0 takes 512.
        interpret: Run the kernel as plain JAX, for tests where there is no TPU.

    Returns:
        `[B, T, H, D]`.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    time, places = q_BTHD.shape[1], k_BSKD.shape[1]
    kernel = _of_stretch(
        _kernel(places, q_BTHD.shape[2], places // time, min(block or 512, time), interpret), stretch, time
    )

    def row(q: jax.Array, k: jax.Array, v: jax.Array, q_segments: jax.Array, k_segments: jax.Array) -> jax.Array:
        heads_first = (jnp.swapaxes(x, 0, 1) for x in (q, k, v))
        out = kernel(*heads_first, segment_ids=splash.SegmentIds(q=q_segments, kv=k_segments))
        return jnp.swapaxes(out, 0, 1)

    arrays = (q_BTHD, k_BSKD, v_BSKD, q_segments_BT, k_segments_BS)
    return jnp.stack([row(*(x[i] for x in arrays)) for i in range(q_BTHD.shape[0])])


@functools.lru_cache(maxsize=8)
def _kernel(places: int, heads: int, stretches: int, block: int, interpret: bool) -> Any:
    """The kernel of a whole row, its plan as numpy arrays."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

    def sizes(of: int) -> Any:
        names = ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
        named: dict[str, Any] = {f"block_{name}": of for name in names}
        return splash.BlockSizes(**named)

    shrunk = places * _LEAST // block
    mask = masks.MultiHeadMask([masks.CausalMask((shrunk, shrunk), shard_count=stretches)] * heads)
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha(
            mask, block_sizes=sizes(_LEAST), head_shards=1, q_seq_shards=stretches, interpret=interpret
        )

    def enlarged(plan: Any) -> Any:
        plan = jax.tree.map(np.asarray, plan)
        return plan._replace(q_sequence=np.arange(places, dtype=np.int32))

    plans = (enlarged(plan) for plan in (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info))
    return splash.SplashAttentionKernel(*plans, **{**kernel.kwargs, "block_sizes": sizes(block)})


def _of_stretch(kernel: Any, stretch: jax.Array | int, time: int) -> Any:
    """The kernel with the part of its plan that one stretch of queries needs."""
    stretches = len(kernel.fwd_mask_info.q_sequence) // time

    def part(array: np.ndarray, dim: int) -> jax.Array:
        size = array.shape[dim] // stretches
        return lax.dynamic_slice_in_dim(jnp.asarray(array), stretch * size, size, dim)

    def of(plan: Any) -> Any:
        by_block = {
            name: part(array, 1)
            for name in ("data_next", "mask_next", "block_mask")
            if (array := getattr(plan, name)) is not None
        }
        return plan._replace(**by_block, q_sequence=part(plan.q_sequence, 0))

    plans = (of(plan) for plan in (kernel.fwd_mask_info, kernel.dq_mask_info, kernel.dkv_mask_info))
    return type(kernel)(*plans, **kernel.kwargs)
