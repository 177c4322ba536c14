"""What was counted in a program, per device; read from its jaxpr or from its HLO.

Bytes of a collective are those of its larger side: of the result for a gather, of the operand for a reduction. Bytes on
the wire are what one device of a group of n must at least receive: (n-1)/n of them, twice that for an all-reduce.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """Communication of one kind over some axes of the mesh, repetitions included.

    Attributes:
        kind: `all_gather`, `reduce_scatter`, `all_reduce`, `all_to_all`, `permute`.
        axes: Mesh axes whose devices take part, in the mesh's order; empty where they could not be told.
        group_size: Devices that take part.
        count: Times that it runs.
        num_bytes: Bytes per device over all of them.
        wire_bytes: Bytes that one device receives over all of them.
    """

    kind: str
    axes: tuple[str, ...]
    group_size: int
    count: int
    num_bytes: int
    wire_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """Multiplications and additions of one place in the program.

    Attributes:
        source: Scope that the author named, else module and function.
        direction: `forward`, `backward`, or `recomputed`.
        flops: Per device, repetitions included.
        num_bytes: Operands and results, read and written once each time, per device.
    """

    source: str
    direction: str
    flops: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """Everything counted in a program, per device.

    Attributes:
        work: By source and direction, most first.
        collectives: By kind and axes, most bytes first.
        bad_lowerings: Operations that TPUs carry out far from what was meant, a line each.
        suspects: Operations that may be; HLO shows whether they are. A line each.
        notes: What could not be counted exactly, a line each.
    """

    work: tuple[Work, ...] = ()
    collectives: tuple[Collective, ...] = ()
    bad_lowerings: tuple[str, ...] = ()
    suspects: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def flops(self) -> int:
        """Multiplications and additions."""
        return sum(work.flops for work in self.work)

    @property
    def hbm_bytes(self) -> int:
        """Bytes that counted operations read and write."""
        return sum(work.num_bytes for work in self.work)

    @property
    def wire_bytes(self) -> int:
        """Bytes received from other devices."""
        return sum(collective.wire_bytes for collective in self.collectives)


def wire_bytes(kind: str, num_bytes: float, group_size: int) -> int:
    """Bytes that a device of a group receives in one collective.

    Args:
        kind: Of the collective.
        num_bytes: Bytes of its larger side.
        group_size: Devices of the group.

    Returns:
        The bytes of the best algorithm over a ring.
    """
    if kind == "permute":
        return round(num_bytes)
    return round(num_bytes * (2 if kind == "all_reduce" else 1) * (group_size - 1) / group_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """What is known of a program without a compiler, per device.

    Attributes:
        costs: Work and collectives that it asks for.
        argument_bytes: Exact bytes of its arguments by kind, without padding.
        donated_bytes: Bytes of the arguments whose place its results take.
        digest: Of everything that a compiler would be given, and of the compiler's version.
        reference_flops: What the model needs by the usual rule; 0 where there is none for this program.
    """

    costs: Costs
    argument_bytes: Mapping[str, int]
    donated_bytes: int
    digest: str
    reference_flops: float = 0.0
