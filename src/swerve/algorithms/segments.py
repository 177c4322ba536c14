"""Sums over the segments of packed rows, and back.

A row `[time]` holds several sequences one after the other; `segment_ids` numbers them 1.. and is 0 in padding. Values
per sequence live in arrays `[rows, time + 1]` indexed by the segment id, so one compiled shape serves any number of
sequences; entries of segments that do not exist are 0.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def segment_sum(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Sum values over each segment of each row.

    Args:
        values: `[rows, time]`.
        segment_ids: int32 `[rows, time]`, 1.. within a row, 0 in padding.

    Returns:
        `[rows, time + 1]`; entry s is the sum over segment s, entry 0 the sum over padding.
    """
    num_segments = segment_ids.shape[1] + 1

    def sum_row(row: jax.Array, ids: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(row, ids, num_segments=num_segments)

    return jax.vmap(sum_row)(values, segment_ids)


def segment_counts(mask: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Count the masked-in tokens of each segment.

    Args:
        mask: float32 `[rows, time]`, 1 where a token counts; 0 in padding.
        segment_ids: int32 `[rows, time]`.

    Returns:
        float32 `[rows, time + 1]`.
    """
    return segment_sum(mask, segment_ids)


def segment_mean(values: jax.Array, mask: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Average values over the masked-in tokens of each segment.

    Args:
        values: `[rows, time]`.
        mask: float32 `[rows, time]`, 1 where a token counts.
        segment_ids: int32 `[rows, time]`.

    Returns:
        `[rows, time + 1]`, 0 for a segment without tokens that count.
    """
    total = segment_sum(jnp.where(mask > 0, values, 0.0), segment_ids)
    return total / jnp.maximum(segment_counts(mask, segment_ids), 1.0)


def per_token(per_segment: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Give every token the value of its segment.

    Args:
        per_segment: `[rows, time + 1]`.
        segment_ids: int32 `[rows, time]`.

    Returns:
        `[rows, time]`.
    """
    return jnp.take_along_axis(per_segment, segment_ids, axis=1)
