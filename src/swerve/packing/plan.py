"""Which sequence lies where: first-fit decreasing bin packing over lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swerve.types import SwerveError


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """Where one sequence lies.

    Attributes:
        sequence: Index of the sequence in the batch.
        start: First token slot within the row.
        length: Tokens of the sequence.
    """

    sequence: int
    start: int
    length: int


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingPlan:
    """The layout of a batch.

    Attributes:
        row_length: Token slots of one row.
        rows: The placements of each row, from its first slot on, without gaps.
    """

    row_length: int
    rows: tuple[tuple[Placement, ...], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(placement.length for row in self.rows for placement in row)


def plan_rows(lengths: Sequence[int], row_length: int) -> PackingPlan:
    """Assign sequences to rows, longest first, each to the first row with room.

    First-fit decreasing needs at most 11/9 of the fewest rows possible, plus one (Johnson 1973). Sequences of equal
    length keep their order, so the plan is a function of the lengths.

    Args:
        lengths: Tokens of each sequence.
        row_length: Token slots of one row.

    Returns:
        The plan; a batch without sequences has no rows.

    Raises:
        SwerveError: A sequence is empty or longer than a row.
    """
    sizes = np.asarray(lengths, np.int64)
    if sizes.size and (sizes.max() > row_length or sizes.min() < 1):
        worst = int(sizes.argmax() if sizes.max() > row_length else sizes.argmin())
        raise SwerveError(
            f"sequence {worst} has {sizes[worst]} tokens and cannot be packed into rows of {row_length}: "
            f"raise the row length to at least the episodes' context length"
        )
    free = np.full(sizes.size, row_length, np.int64)
    rows: list[list[Placement]] = []
    for index in np.argsort(-sizes, kind="stable").tolist():
        length = int(sizes[index])
        row = int(np.argmax(free[: len(rows) + 1] >= length))
        if row == len(rows):
            rows.append([])
        start = row_length - int(free[row])
        rows[row].append(Placement(sequence=index, start=start, length=length))
        free[row] -= length
    return PackingPlan(row_length=row_length, rows=tuple(tuple(row) for row in rows))
