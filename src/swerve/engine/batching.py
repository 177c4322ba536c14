"""Plans of a round, on the host: batch sizes, chunk lengths, rows that share a context.

Everything here is a function of the requests alone, never of time, so that a run repeats exactly.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

from swerve.types import SwerveError

_CHUNK_OVERHEAD_TOKENS = 4
"""What starting a chunk costs, in columns of a chunk."""

_T = TypeVar("_T")


def default_batch_sizes(num_slots: int) -> tuple[int, ...]:
    """All slots, half of them, a quarter, and an eighth (at least 8): few programs to compile, little waste."""
    sizes = [num_slots]
    while sizes[-1] // 2 >= max(8, num_slots // 8):
        sizes.append(sizes[-1] // 2)
    return tuple(sorted(sizes))


def check_sizes(sizes: Iterable[int], largest: int | None, what: str) -> tuple[int, ...]:
    """Sort sizes and refuse an empty, non-positive or incomplete list.

    Args:
        sizes: The sizes asked for.
        largest: What the largest one must be, or `None` for any.
        what: How to call them in an error.

    Returns:
        The sizes, ascending, each once.
    """
    ordered = tuple(sorted(set(sizes)))
    if not ordered or ordered[0] < 1:
        raise SwerveError(f"engine: {what} must be positive, got {list(ordered)}")
    if largest is not None and ordered[-1] != largest:
        raise SwerveError(f"engine: the largest of {what} must be {largest}, got {ordered[-1]}")
    return ordered


def batch_size_for(num_rows: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending sizes that holds a number of rows."""
    return next(size for size in sizes if size >= num_rows)


def smaller_batch_size(size: int, sizes: Sequence[int]) -> int:
    """The next smaller of the ascending sizes, 0 below the smallest."""
    return max((other for other in sizes if other < size), default=0)


@lru_cache(maxsize=4096)
def plan_chunks(num_tokens: int, lengths: tuple[int, ...]) -> tuple[int, ...]:
    """Cover a number of tokens with chunks of given lengths at the least cost, padding and start-up counted.

    Args:
        num_tokens: Tokens of the longest row, 0 for none.
        lengths: Ascending chunk lengths.

    Returns:
        Chunk lengths, longest first, whose sum is at least `num_tokens`.
    """
    plan: list[int] = []
    whole = max(num_tokens // lengths[-1] - 1, 0)  # the bulk goes in the longest chunks; only the rest is a question
    plan.extend([lengths[-1]] * whole)
    rest = num_tokens - whole * lengths[-1]
    best: list[tuple[int, tuple[int, ...]]] = [(0, ())]
    for covered in range(1, rest + 1):
        options = (
            (cost + length + _CHUNK_OVERHEAD_TOKENS, (*chunks, length))
            for length in lengths
            for cost, chunks in (best[max(covered - length, 0)],)
        )
        best.append(min(options))
    return (*plan, *sorted(best[rest][1], reverse=True))


def group_by_key(items: Sequence[_T], keys: Sequence[Hashable]) -> list[list[_T]]:
    """Group items with equal keys; groups and members keep the order of the items."""
    groups: dict[Hashable, list[_T]] = {}
    for item, key in zip(items, keys, strict=True):
        groups.setdefault(key, []).append(item)
    return list(groups.values())
