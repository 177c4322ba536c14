"""Which sequence lies where: bin packing over lengths.

Several ways are tried, and the one with the fewest rows is taken. First-fit decreasing is never far off. Filling looks,
for each row that its longest sequence begins, for the sequence or the two that leave least room; a row is full where
little is left, since closer fits would use up the short sequences that later rows need. How little depends on the
lengths: where two kinds of sequences hardly fit together, it is more. The order of rows has no effect but on the order
of sums in a step: every row costs the same, whatever lies in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from swerve.types import SwerveError

_SPARE = (1 / 128, 1 / 16)
"""Parts of a row of which at most so much may be left in a row that is full, tried in this order."""

Rows = list[list[int]]
"""For each row the sequences in it, as indices into a list of lengths."""


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
    """Assign sequences to rows.

    Never needs more rows than first-fit decreasing, which needs at most 11/9 of the fewest possible, plus one (Johnson
    1973). Sequences of equal length keep their order, so the plan is a function of the lengths.

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
    order = np.argsort(-sizes, kind="stable")
    rows, fewest = _first_fit(sizes[order], row_length), fewest_rows(lengths, row_length)
    for share in _SPARE:
        if len(rows) > fewest:
            rows = min(rows, _filled(sizes[order], row_length, int(share * row_length)), key=len)
    return PackingPlan(row_length=row_length, rows=tuple(_placed(order[row], sizes) for row in rows))


def fewest_rows(lengths: Sequence[int], row_length: int) -> int:
    """A number of rows below which no plan can get: the bound L2 of Martello & Toth (1990).

    For every threshold k: sequences longer than a row less k share their row with none of k or more, those longer than
    half a row not with each other, and what fits beside the latter is all the room there is for the others of k or
    more.

    Args:
        lengths: Tokens of each sequence, each from 1 to `row_length`.
        row_length: Token slots of one row.

    Returns:
        The bound, at least the sum of the lengths over `row_length`, rounded up.
    """
    sizes = np.sort(np.asarray(lengths, np.int64))[::-1]
    sums = np.concatenate([[0], np.cumsum(sizes)])
    thresholds = np.unique(np.concatenate([[0], sizes[2 * sizes <= row_length]]))
    alone = np.searchsorted(-sizes, thresholds - row_length)  # sequences longer than a row less the threshold
    long = int(np.searchsorted(-2 * sizes, -row_length))  # longer than half a row
    considered = np.searchsorted(-sizes, -thresholds, side="right")
    room = (long - alone) * row_length - (sums[long] - sums[alone])
    more = np.maximum(0, -((room - (sums[considered] - sums[long])) // row_length))
    return int((long + more).max())


def _first_fit(sizes: NDArray[np.int64], row_length: int) -> Rows:
    """First-fit: each sequence, longest first, into the first row with room."""
    free = np.full(sizes.size, row_length, np.int64)
    rows: Rows = []
    for index, length in enumerate(sizes.tolist()):
        row = int(np.argmax(free[: len(rows) + 1] >= length))
        if row == len(rows):
            rows.append([])
        rows[row].append(index)
        free[row] -= length
    return rows


def _filled(sizes: NDArray[np.int64], row_length: int, spare: int) -> Rows:
    """Row by row: the longest sequence left, then again and again what fits best beside it; `sizes` fall."""
    left, indices = sizes[::-1], np.arange(sizes.size)[::-1]  # shortest first
    rows: Rows = []
    while left.size:
        rows.append([int(indices[-1])])
        room = row_length - int(left[-1])
        left, indices = left[:-1], indices[:-1]
        while left.size and left[0] <= room:
            taken = _best_fit(left, room, spare)
            rows[-1] += [int(indices[place]) for place in taken]
            room -= int(left[taken].sum())
            left, indices = np.delete(left, taken), np.delete(indices, taken)
    return rows


def _best_fit(left: NDArray[np.int64], room: int, spare: int) -> list[int]:
    """The longest of `left`, which rise, that fits, unless it leaves more than `spare` and two together leave less."""
    single = int(np.searchsorted(left, room, side="right")) - 1
    least = room - int(left[single])
    if least <= spare or single == 0:
        return [single]
    shorter = left[: single + 1]
    partner = np.searchsorted(left, room - shorter, side="right") - 1
    rest = np.where(partner > np.arange(single + 1), room - shorter - left[partner], room)
    best = int(rest.argmin())
    return [int(partner[best]), best] if rest[best] < least else [single]


def _placed(row: NDArray[np.int64], sizes: NDArray[np.int64]) -> tuple[Placement, ...]:
    """The sequences of a row one after the other, without gaps."""
    starts = np.concatenate([[0], np.cumsum(sizes[row])]).tolist()
    return tuple(
        Placement(sequence=sequence, start=start, length=int(sizes[sequence]))
        for sequence, start in zip(row.tolist(), starts, strict=False)
    )
