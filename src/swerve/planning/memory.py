"""Where a program's memory goes, read from what XLA says about its buffer assignment.

Buffer assignment is what a device will allocate; it is known before code is generated. Kinds, in bytes per device:

- Arguments (parameters, optimizer, gradients, batch): exact, from shapes and shardings.
- Activations: buffers alive at the peak that an operation of the forward pass wrote and that live on into the backward
  pass, by themselves or as what the forward pass goes on to write in their place; an operation belongs to either by the
  mark that differentiation leaves on its name.
- Temporaries: everything else at the peak: gathered weights, recomputed values, work space, gradients in the making,
  outputs that take no argument's place, padding of arguments to the device's tiles, and fragmentation.

So the kinds sum to the total of the assignment. Without differentiation in a program there are no activations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from swerve.planning.hlo import Instruction, Module, parse_module

REPORT = "after_optimizations-memory-usage-report.txt"
"""End of the name of the last file that XLA writes about a buffer assignment."""

_NO_WORK = ("constant", "broadcast", "iota", "parameter", "copy", "tuple", "get-tuple-element", "bitcast")


@dataclass(frozen=True, kw_only=True, slots=True)
class Buffer:
    """One buffer alive at the peak.

    Attributes:
        num_bytes: Its size, padding included.
        shape: Its type, without layout.
        instruction: Name of the instruction that wrote it.
        source: Where in the traced program that comes from; empty where XLA does not say.
        kind: `argument`, `activation` or `temporary`.
    """

    num_bytes: int
    shape: str
    instruction: str
    source: str
    kind: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """The memory of one program on one device.

    Attributes:
        total_bytes: Buffer assignment in the device's main memory, arguments included.
        argument_bytes: What the assignment gives arguments, padding included.
        activation_bytes: What lives from the forward to the backward pass, at the peak.
        buffers: Largest buffers at the peak, largest first.
    """

    total_bytes: int
    argument_bytes: int
    activation_bytes: int
    buffers: tuple[Buffer, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dump:
    """Files that XLA wrote about one program.

    Attributes:
        report: Sizes by memory space.
    """

    report: Path

    @property
    def hlo(self) -> Path:
        """Optimised HLO."""
        return self._sibling(".txt")

    @property
    def assignment(self) -> Path:
        """Allocations and what they hold."""
        return self._sibling("-buffer-assignment.txt")

    @property
    def live_range(self) -> Path:
        """Order of instructions, lives of buffers, and what is alive at the peak."""
        return self._sibling("-live-range.txt")

    def _sibling(self, suffix: str) -> Path:
        return self.report.with_name(self.report.name.removesuffix("-memory-usage-report.txt") + suffix)


def find_dump(directory: Path) -> Dump | None:
    """The dump of the largest program in a folder, once XLA has written all of it.

    Args:
        directory: Of `xla_dump_to`.

    Returns:
        The dump; None while the buffer assignment is not there.
    """
    reports = [path for path in directory.glob(f"*{REPORT}") if Dump(report=path).hlo.exists()]
    return Dump(report=max(reports, key=lambda path: Dump(report=path).hlo.stat().st_size)) if reports else None


def read_memory(dump: Dump, module: Module | None = None, num_buffers: int = 20) -> Memory:
    """Read what a dump says.

    Args:
        dump: Files of one program.
        module: Its HLO where that has been parsed already.
        num_buffers: How many of the largest buffers to name.

    Returns:
        The program's memory.
    """
    module = module or parse_module(dump.hlo.read_text(encoding="utf-8"))
    report = dump.report.read_text(encoding="utf-8")
    found = re.search(r"Memory Space: default \(color=0\)\s+Total bytes: (\d+)", report)
    if not found:
        raise ValueError(f"{dump.report.name} names no default memory space")
    assignment = dump.assignment.read_text(encoding="utf-8")
    buffers = list(_peak_buffers(dump.live_range.read_text(encoding="utf-8"), assignment, module))
    return Memory(
        total_bytes=int(found[1]),
        argument_bytes=_argument_bytes(assignment),
        activation_bytes=sum(buffer.num_bytes for buffer in buffers if buffer.kind == "activation"),
        buffers=tuple(sorted(buffers, key=lambda buffer: -buffer.num_bytes)[:num_buffers]),
    )


def _argument_bytes(assignment: str) -> int:
    sizes = re.findall(r"^allocation \d+: size (\d+), (?!color [1-9])(?:.*, )?parameter \d+,", assignment, re.MULTILINE)
    return sum(map(int, sizes))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where a value lies: values in the same place follow each other in it."""

    color: int
    allocation: int
    offset: int
    num_bytes: int


_MAIN = _Place(color=0, allocation=-1, offset=-1, num_bytes=-1)


def _places(assignment: str) -> Iterator[tuple[str, _Place]]:
    """Every value with its place, by its name with an index in braces."""
    allocation = -1
    value = re.compile(r" value: <\d+ (\S+?)(\{[\d, ]*\})?(?: \(phi\))? @(\d+)> \(size=(\d+),offset=(\d+)\)")
    for line in assignment.splitlines():
        if line.startswith("allocation "):
            allocation = int(line.split(":")[0].removeprefix("allocation "))
        elif found := value.match(line):
            color, num_bytes, offset = map(int, found.groups()[2:])
            place = _Place(color=color, allocation=allocation, offset=offset, num_bytes=num_bytes)
            yield found[1] + (found[2] or "{}"), place


class _Lives:
    """Which values are alive when, who wrote them, and what takes over their place.

    Args:
        text: Of the live ranges, up to the peak.
        assignment: Text of the buffer assignment.
        module: The HLO.
    """

    def __init__(self, text: str, assignment: str, module: Module) -> None:
        self.instructions = {i.name: i for computation in module.computations.values() for i in computation}
        self.arguments = {i.name for i in module.computations.get(module.entry, ()) if i.opcode == "parameter"}
        self.places = dict(_places(assignment))
        self._loops = dict(_loop_parameters(module))
        self._backward = _start_of_backward(text, self.instructions)
        self._successors: dict[_Place, list[tuple[int, int, str]]] = {}
        self._lives: dict[str, tuple[int, int]] = {}
        for name, index, start, end in re.findall(r"^    (\S+)(\{[\d, ]*\}):(\d+)-(\d+)$", text, re.MULTILINE):
            life = int(start), int(end)
            self._lives[name + index] = life
            if (place := self.places.get(name + index)) and self.is_forward(name):
                self._successors.setdefault(place, []).append((*life, name + index))
        for values in self._successors.values():
            values.sort()

    def source(self, name: str) -> str:
        """Where in the traced program the writer of a value comes from."""
        writer = self._loops.get(name) or self.instructions.get(name)
        return writer.op_name if writer else ""

    def is_forward(self, name: str) -> bool:
        """Whether an operation of the forward pass wrote a value."""
        source = self.source(name)
        return "jvp(" in source and "transpose(" not in source

    def reaches_backward(self, key: str) -> bool:
        """Whether a value, or what the forward pass makes of it in its place, lives on into the backward pass.

        A loop that fills an array row by row writes it under many names: each takes over the place of the one before.
        """
        start, end = self._lives.get(key, (0, 0))
        for other_start, other_end, _ in self._successors.get(self.places.get(key, _MAIN), []):
            if start <= other_start <= end:
                end = max(end, other_end)
        return end > self._backward


def _peak_buffers(text: str, assignment: str, module: Module) -> Iterator[Buffer]:
    head, _, peak = text.partition(" (peak):\n")
    lives = _Lives(head, assignment, module)
    for name, index, size in re.findall(r"^    (\S+)(\{[\d, ]*\}): (\d+) bytes \(cumulative", peak, re.MULTILINE):
        if not int(size) or lives.places.get(name + index, _MAIN).color:
            continue
        kept = lives.is_forward(name) and lives.reaches_backward(name + index)
        instruction = lives.instructions.get(name)
        yield Buffer(
            num_bytes=int(size),
            shape=_shape(instruction.shape, index.strip("{}")) if instruction else "",
            instruction=name,
            source=lives.source(name),
            kind="argument" if name in lives.arguments else "activation" if kept else "temporary",
        )


def _loop_parameters(module: Module) -> Iterator[tuple[str, Instruction]]:
    """Parameters of loops' bodies with the loop that runs them: what they hold, the loop writes."""
    for computation in module.computations.values():
        for instruction in computation:
            if found := re.search(r"\bbody=%?([\w.\-]+)", instruction.text):
                for inner in module.computations.get(found[1], ()):
                    if inner.opcode == "parameter":
                        yield inner.name, instruction


def _start_of_backward(text: str, instructions: Mapping[str, Instruction]) -> float:
    for position, name in re.findall(r"^    (\d+):(\S+)$", text, re.MULTILINE):
        instruction = instructions.get(name)
        if instruction and instruction.opcode not in _NO_WORK and "transpose(" in instruction.op_name:
            return int(position)
    return math.inf


def _shape(text: str, index: str) -> str:
    """Type of an instruction, or of the element that an index names, without layouts."""
    bare = re.sub(r"\{[^}]*\}|/\*.*?\*/", "", text)
    if not index or not bare.startswith("("):
        return bare
    elements = re.findall(r"\w+\[[\d,]*\]", bare)
    first = int(index.split(",")[0])
    return elements[first] if first < len(elements) else bare
