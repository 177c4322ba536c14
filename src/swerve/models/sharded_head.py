"""The sharded head for whole arrays, on a mesh whose axes have any names and any order.

The trainer runs the same core inside its own manual program, `token_logprobs`. Here the caller says where its arrays
live. Axes of the mesh that split no token take a part of the tokens all the same, as long as rows or columns divide;
where no such layout fits, the plain head computes the result, and one line of the log says why.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from swerve import parallel
from swerve.models.plain_head import HeadLayout, entry, plain_token_logprobs
from swerve.models.scoring import Table, scored

_log = logging.getLogger(__name__)

_Axes = tuple[str, ...]


def sharded_token_logprobs(
    hidden: jax.Array,
    weight: jax.Array,
    tokens: jax.Array,
    segment_ids: jax.Array,
    temperature: float | jax.Array = 1.0,
    *,
    chunk: int = 1024,
    layout: HeadLayout | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Log-probability of each token given those before it in its segment.

    Args:
        hidden: `[B, T, M]` from `forward`.
        weight: The head's, `[M, V]`.
        tokens: int32 `[B, T]`.
        segment_ids: int32 `[B, T]`.
        temperature: Divides the logits.
        chunk: Tokens of a device whose logits are live at a time.
        layout: Where the arrays live; `None` without a mesh.

    Returns:
        Log-probabilities and entropies, nats, float32 `[B, T]`, as from `token_logprobs`; laid out as the tokens are.

    Raises:
        ValueError: The layout names an axis that its mesh lacks, or one axis twice.
    """
    fitted = _fit(layout, tokens.shape, weight.shape)
    if layout is None or isinstance(fitted, str):
        _say_once(str(fitted))
        pinned = layout if layout is not None and _divides(layout, tokens.shape, weight.shape) else None
        return plain_token_logprobs(hidden, weight, tokens, segment_ids, temperature, chunk=chunk, layout=pinned)
    (rows, columns), table = fitted
    spread, whole = PartitionSpec(rows, columns), PartitionSpec()
    mesh = layout.mesh

    def of_device(
        hidden: jax.Array, part: jax.Array, targets: jax.Array, scale: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        size = min(chunk, targets.size)
        scores = scored(hidden.reshape(-1, hidden.shape[-1]), part, targets.reshape(-1), scale, size, table)
        return scores[0].reshape(targets.shape), scores[1].reshape(targets.shape)

    inputs = (spread, layout.table, spread, whole)
    manual = jax.shard_map(of_device, mesh=mesh, in_specs=inputs, out_specs=(spread, spread), check_vma=False)
    following = jnp.pad(tokens[:, 1:], ((0, 0), (0, 1)))
    scores = manual(hidden, weight, following, 1 / jnp.asarray(temperature, jnp.float32))
    inside = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)

    def moved(values: jax.Array) -> jax.Array:
        values = jnp.pad(jnp.where(inside, values[:, :-1], 0), ((0, 0), (1, 0)))
        return lax.with_sharding_constraint(values, NamedSharding(mesh, layout.tokens))

    return moved(scores[0]), moved(scores[1])


def _fit(
    layout: HeadLayout | None, tokens: tuple[int, ...], weight: tuple[int, ...]
) -> tuple[tuple[_Axes, _Axes], Table] | str:
    """The axes that rows and columns of tokens are split over and the table's exchanges; or why there are none."""
    if layout is None or layout.mesh.size == 1:
        return "there is no mesh"
    sizes = dict(layout.mesh.shape)
    table = _split(layout.table, sizes)
    for dim, (size, axes) in enumerate(zip(weight, table, strict=True)):
        if size % (parts := _product(axes, sizes)):
            return f"dimension {dim} of the head's weight, {size}, cannot be split over {parts} devices"
    steps = tuple((dim, over) for dim, axes in enumerate(table) for over in parallel.exchange_steps(axes, sizes))
    named = _split(layout.tokens, sizes)
    rest = [axis for axis, size in sizes.items() if size > 1 and axis not in (*named[0], *named[1])]
    for choice in itertools.product((0, 1), repeat=len(rest)):
        more = [tuple(axis for axis, dim in zip(rest, choice, strict=True) if dim == here) for here in (0, 1)]
        rows, columns = named[0] + more[0], named[1] + more[1]
        if not (tokens[0] % _product(rows, sizes) or tokens[1] % _product(columns, sizes)):
            return (rows, columns), Table(steps)
    shape = " x ".join(f"{axis} {size}" for axis, size in sizes.items())
    return f"{tokens[0]} rows of {tokens[1]} tokens cannot be split over a mesh of {shape}"


def _divides(layout: HeadLayout, tokens: tuple[int, ...], weight: tuple[int, ...]) -> bool:
    """Whether the arrays can live where the layout says, whoever computes with them."""
    sizes = dict(layout.mesh.shape)
    split = (*_split(layout.tokens, sizes), *_split(layout.table, sizes))
    return not any(size % _product(axes, sizes) for size, axes in zip((*tokens, *weight), split, strict=True))


def _split(spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[_Axes, _Axes]:
    """Axes of more than one device that split each of two dimensions, major first."""
    rows, columns = (_axes(entry(spec, dim), sizes) for dim in (0, 1))
    if twice := set(rows) & set(columns):
        raise ValueError(f"axis {min(twice)!r} splits both dimensions of {spec}")
    return rows, columns


def _axes(named: Any, sizes: Mapping[str, int]) -> _Axes:
    axes = () if named is None else (named,) if isinstance(named, str) else tuple(named)
    for axis in axes:
        if axis not in sizes:
            raise ValueError(f"the mesh has no axis {axis!r}, only {', '.join(sizes)}")
    return tuple(axis for axis in axes if sizes[axis] > 1)


def _product(axes: _Axes, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes[axis] for axis in axes)


@functools.cache
def _say_once(reason: str) -> None:
    _log.warning("the plain head is used instead of the sharded one: %s", reason)
