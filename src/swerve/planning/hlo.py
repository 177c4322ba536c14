"""What XLA made of a program: reads the text of optimised HLO.

Collectives hide in it: inside fusions, inside asynchronous calls that other cores carry out, inside loops whose length
is a constant of their condition. This reader follows every call, multiplies by trip counts, and maps the devices of
each collective back to axes of the mesh. Bytes are counted as in `swerve.planning.jaxpr`, and so are matrix products,
which on a TPU are convolutions.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from swerve.planning.costs import Collective, wire_bytes

_KINDS = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
    "collective-broadcast": "broadcast",
}
_BITS = {"pred": 8, "token": 0, "c64": 64, "c128": 128}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\(")
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_CALLS = re.compile(r"\b(?:calls|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"\b(?:branch_computations=\{([^}]*)\}|(?:true|false)_computation=%?([\w.\-]+))")
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)=(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)"
)

Tally = Counter[tuple[str, tuple[str, ...], int, int]]
"""Times by kind, axes, group size and bytes of one; FLOPs by `_PRODUCTS`."""
_PRODUCTS = ("products", (), 0, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """One line of HLO.

    Attributes:
        name: Its name, unique in the module.
        shape: Text of its type, a tuple in parentheses.
        opcode: What it does.
        text: The whole line.
    """

    name: str
    shape: str
    opcode: str
    text: str

    @property
    def op_name(self) -> str:
        """Where in the traced program it comes from; empty where XLA does not say."""
        found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.text)
        return found[1] if found else ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """A parsed module.

    Attributes:
        computations: Instructions in order, by the computation's name.
        entry: Name of the computation that runs.
    """

    computations: Mapping[str, tuple[Instruction, ...]]
    entry: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Emitted:
    """What a module does between devices.

    Attributes:
        collectives: By kind and axes, repetitions included, most bytes first.
        num_unknown_loops: Loops with collectives whose length the text does not say; counted once.
        by_size: The collectives again, those that move arrays of another size apart.
        flops: Multiplications and additions of matrix products and convolutions, repetitions included.
    """

    collectives: tuple[Collective, ...]
    num_unknown_loops: int
    by_size: tuple[Collective, ...] = ()
    flops: int = 0


def parse_module(text: str) -> Module:
    """Read HLO text.

    Args:
        text: As XLA dumps or prints it.

    Returns:
        The module; without an entry if the text has none.
    """
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", []
    for line in text.splitlines():
        if line[:1].strip():
            if found := _COMPUTATION.match(line):
                current = computations.setdefault(found[2], [])
                entry = found[2] if found[1] else entry
        elif found := _INSTRUCTION.match(line):
            current.append(Instruction(name=found[1], shape=found[2], opcode=found[3], text=line))
    return Module(computations={name: tuple(lines) for name, lines in computations.items()}, entry=entry)


def read_emitted(module: Module, axis_sizes: Mapping[str, int]) -> Emitted:
    """Count a module's collectives.

    Args:
        module: Optimised HLO.
        axis_sizes: Devices along each axis of the mesh, major to minor.

    Returns:
        What it does.
    """
    reader = _Reader(
        module=module,
        axis_sizes=axis_sizes,
        shapes={line.name: line.shape for lines in module.computations.values() for line in lines},
    )
    tally = reader.tally(module.entry)
    flops = tally.pop(_PRODUCTS, 0)
    totals: dict[tuple[str, tuple[str, ...], int], list[int]] = {}
    for (kind, axes, group, num_bytes), count in tally.items():
        total = totals.setdefault((kind, axes, group), [0, 0])
        total[0] += count
        total[1] += count * num_bytes
    return Emitted(
        collectives=_most_first(_collective(*key, *total) for key, total in totals.items()),
        num_unknown_loops=reader.num_unknown_loops,
        by_size=_most_first(
            _collective(kind, axes, group, count, count * size) for (kind, axes, group, size), count in tally.items()
        ),
        flops=flops,
    )


def _collective(kind: str, axes: tuple[str, ...], group: int, count: int, num_bytes: int) -> Collective:
    return Collective(
        kind=kind,
        axes=axes,
        group_size=group,
        count=count,
        num_bytes=num_bytes,
        wire_bytes=wire_bytes(kind, num_bytes, group),
    )


def _most_first(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    return tuple(sorted(collectives, key=lambda each: -each.num_bytes))


@dataclass(kw_only=True, slots=True)
class _Reader:
    module: Module
    axis_sizes: Mapping[str, int]
    shapes: Mapping[str, str]
    num_unknown_loops: int = 0
    known: dict[str, Tally] = field(default_factory=dict)
    axes_of_group: dict[str, tuple[tuple[str, ...], int]] = field(default_factory=dict)

    def tally(self, name: str) -> Tally:
        """Collectives and products of a computation and all that it calls."""
        if name not in self.known:
            self.known[name] = Counter()
            total: Tally = Counter()
            for instruction in self.module.computations.get(name, ()):
                total.update(self._of(instruction))
            self.known[name] = total
        return self.known[name]

    def _of(self, instruction: Instruction) -> Tally:
        opcode = instruction.opcode
        if opcode.removesuffix("-start") in _KINDS:
            return self._collective(instruction)
        if opcode in _FLOPS:
            return Counter({_PRODUCTS: _FLOPS[opcode](instruction, self.shapes)})
        if opcode.endswith(("-done", "-update")):
            return Counter()
        if opcode == "while":
            inner = self.tally(re.search(r"\bbody=%?([\w.\-]+)", instruction.text)[1])  # pyright: ignore[reportOptionalSubscript]
            times = trip_count(self.module, instruction)
            self.num_unknown_loops += times is None and any(key != _PRODUCTS for key in inner)
            return Counter({key: value * (times or 1) for key, value in inner.items()})
        branches = [
            name for many, one in _BRANCHES.findall(instruction.text) for name in re.findall(r"[\w.\-]+", many or one)
        ]
        if branches:
            return max(map(self.tally, branches), key=_weight)
        total: Tally = Counter()
        for name in _CALLS.findall(instruction.text):
            total.update(self.tally(name))
        return total

    def _collective(self, instruction: Instruction) -> Tally:
        kind = _KINDS[instruction.opcode.removesuffix("-start")]
        axes, group = self._group(instruction.text)
        if group == 1:
            return Counter()
        sizes = [array_bytes(*found) for found in _ARRAY.findall(instruction.shape)]
        # The type of a start names operands beside results, but for reductions, which may reduce several arrays.
        one = kind in ("all_gather", "permute") and instruction.opcode.endswith("-start")
        num_bytes = (max(sizes) if one else sum(sizes)) * (group if kind == "reduce_scatter" else 1)
        return Counter({(kind, axes, group, num_bytes): 1})

    def _group(self, text: str) -> tuple[tuple[str, ...], int]:
        """Mesh axes over which a collective works, and how many devices take part in one group."""
        found = re.search(
            r"(?:replica_groups|source_target_pairs)=(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?)", text
        )
        if not found:
            return group_axes([], self.axis_sizes, pairs=False)
        if found[1] not in self.axes_of_group:
            pairs = "source_target_pairs" in found[0]
            self.axes_of_group[found[1]] = group_axes(_first_groups(found[1]), self.axis_sizes, pairs=pairs)
        return self.axes_of_group[found[1]]


def _weight(tally: Tally) -> tuple[int, int]:
    """What a branch costs, to find the heaviest: its FLOPs, then its bytes."""
    return tally[_PRODUCTS], sum(times * num_bytes for (*_, num_bytes), times in tally.items())


def _dot_flops(instruction: Instruction, shapes: Mapping[str, str]) -> int:
    contracting = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.text)
    left = _dims(shapes.get(_operands(instruction)[0], ""))
    inner = math.prod(left[int(dim)] for dim in contracting[1].split(",") if dim) if contracting else 1
    return 2 * math.prod(_dims(instruction.shape)) * inner


def _convolution_flops(instruction: Instruction, shapes: Mapping[str, str]) -> int:
    kernel = _dims(shapes.get(_operands(instruction)[1], ""))
    labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.text)
    outputs = kernel[labels[1].index("o")] if labels and kernel else 1
    return 2 * math.prod(_dims(instruction.shape)) * math.prod(kernel) // outputs


_FLOPS = {"dot": _dot_flops, "convolution": _convolution_flops}


def _operands(instruction: Instruction) -> list[str]:
    inside = instruction.text.partition(f" {instruction.opcode}(")[2]
    return re.findall(r"%([\w.\-]+)", inside.partition("), ")[0])


def _dims(shape: str) -> list[int]:
    """Sizes of the first array of a type."""
    found = _ARRAY.search(shape)
    return [int(size) for size in found[2].split(",") if size] if found else []


def trip_count(module: Module, instruction: Instruction) -> int | None:
    """Repetitions of a loop: what XLA says, else the largest integer constant of its condition.

    Args:
        module: Where the loop is.
        instruction: The `while`.

    Returns:
        The number; None where the text does not say.
    """
    if found := re.search(r'known_trip_count[^0-9]*"?(\d+)', instruction.text):
        return int(found[1])
    condition = re.search(r"\bcondition=%?([\w.\-]+)", instruction.text)
    pending, constants = [condition[1]] if condition else [], []
    for name in pending:
        for inner in module.computations.get(name, ()):
            if found := re.search(r"= s32\[\]\S* constant\((\d+)\)", inner.text):
                constants.append(int(found[1]))
            pending += [called for called in _CALLS.findall(inner.text) if called not in pending]
    return max(constants, default=None)


def group_axes(groups: list[list[int]], axis_sizes: Mapping[str, int], *, pairs: bool) -> tuple[tuple[str, ...], int]:
    """Which axes of a mesh the groups of a collective vary along.

    Args:
        groups: Devices, as positions in the mesh's order; the first groups are enough.
        axis_sizes: Devices along each axis, major to minor.
        pairs: Whether each group is a source and a target.

    Returns:
        The axes of more than one device, empty if no set of axes fits; and the number of devices that take part in
        one group.
    """
    sizes = {axis: size for axis, size in axis_sizes.items() if size > 1}
    if not groups:
        return tuple(sizes), math.prod(sizes.values())
    varying = set()
    for group in groups:
        coordinates = [_coordinates(device, sizes) for device in group]
        varying |= {axis for axis, *values in zip(sizes, *coordinates, strict=True) if len(set(values)) > 1}
    axes = tuple(axis for axis in sizes if axis in varying)
    product = math.prod(sizes[axis] for axis in axes)
    if pairs:
        return axes, product
    return (axes if product == len(groups[0]) else ()), len(groups[0])


def _coordinates(device: int, sizes: Mapping[str, int]) -> list[int]:
    result = []
    for size in reversed(list(sizes.values())):
        device, coordinate = divmod(device, size)
        result.append(coordinate)
    return result[::-1]


def _first_groups(text: str) -> list[list[int]]:
    """Groups in braces, or the first group of the iota form `[groups,size]<=[dims]T(order)`."""
    if text.startswith("{"):
        return [[int(device) for device in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", text)[:64]]
    shape, dims, order = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups()  # pyright: ignore[reportOptionalMemberAccess]
    dims = [int(size) for size in dims.split(",")]
    permutation = [int(axis) for axis in order.split(",")] if order else list(range(len(dims)))
    strides = [math.prod(dims[axis + 1 :]) for axis in range(len(dims))]
    positions = itertools.product(*(range(dims[axis]) for axis in permutation))
    size = int(shape.split(",")[-1])
    return [
        [sum(i * strides[axis] for i, axis in zip(position, permutation, strict=True))
         for position in itertools.islice(positions, size)]
    ]  # fmt: skip


def array_bytes(dtype: str, dims: str) -> int:
    """Bytes of an array without padding.

    Args:
        dtype: XLA's name of the type, for example `bf16`.
        dims: Sizes, separated by commas; empty for a scalar.

    Returns:
        The bytes.
    """
    bits = _BITS.get(dtype)
    if bits is None:
        digits = re.search(r"\d+", dtype)
        bits = int(digits[0]) if digits else 0
    return math.ceil(math.prod(int(size) for size in dims.split(",") if size) * bits / 8)
