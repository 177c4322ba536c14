"""Routed experts by grouped matrix products, for accelerators.

The pairs lie sorted by expert without gaps, and one kernel multiplies each stretch by its expert's matrix. The kernel
is Megablox (Gale et al., "MegaBlocks", 2022, arXiv:2211.15841) as JAX ships it: forward, the gradient of its rows and
that of its matrices are all grouped. `lax.ragged_dot` is not used: the gradient of its matrices becomes a dense masked
convolution on TPUs. `experts_sorted` is its twin.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from swerve.kernels.experts import Routing, combine, plan_blocks, take_sorted

_ROWS, _LARGEST_TILE = 512, 1024


def experts_grouped(
    x_ND: jax.Array,
    routing: Routing,
    gate_up_ED2F: jax.Array,
    down_EFD: jax.Array,
    valid_N: jax.Array,
    *,
    first: jax.Array | int = 0,
    capacity: int,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """As `experts_sorted`, with one grouped product per projection.

    Args:
        x_ND: Token activations.
        routing: Where each token goes.
        gate_up_ED2F: Gate and up projections of the experts held here.
        down_EFD: Down projection.
        valid_N: bool, False for padding.
        first: Number of the first expert held here.
        capacity: Pairs computed at most; a multiple of `row_tile` of it.
        interpret: Run the kernel as plain JAX, for tests where there is no TPU.

    Returns:
        `[N, D]`, what the experts held here contribute, zero for padding; and the pairs dropped, int32 scalar.
    """
    num_experts, width, _, inner = gate_up_ED2F.shape
    plan = plan_blocks(routing.experts - first, valid_N, num_experts, 1, capacity)
    used = (jnp.arange(capacity) < plan.sizes.sum())[:, None]
    rows = take_sorted(x_ND, plan.source, plan.place)
    both = _product(rows, gate_up_ED2F.reshape(num_experts, width, 2 * inner), plan.sizes, interpret)
    both = jnp.where(used, both, 0)  # the kernel leaves what is past the last group as it found it
    hidden = jax.nn.silu(both[:, :inner].astype(jnp.float32)).astype(both.dtype) * both[:, inner:]
    hidden = checkpoint_name(hidden, "expert_hidden")
    out = jnp.where(used, _product(hidden, down_EFD, plan.sizes, interpret), 0)
    return combine(out, routing.weights, plan.source, plan.place), plan.dropped


def row_tile(num_pairs: int) -> int:
    """Rows of one tile of the kernel; capacities are multiples of it."""
    return min(_ROWS, 1 << max(num_pairs - 1, 1).bit_length())


def _product(rows: jax.Array, matrices: jax.Array, sizes: jax.Array, interpret: bool) -> jax.Array:
    from jax.experimental.pallas.ops.tpu.megablox import ops

    tiling = (row_tile(rows.shape[0]), min(_LARGEST_TILE, matrices.shape[1]), min(_LARGEST_TILE, matrices.shape[2]))
    return ops.gmm(rows, matrices, sizes, rows.dtype, tiling, None, None, False, interpret)
