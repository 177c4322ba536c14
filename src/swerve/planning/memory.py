"""Where a program's memory goes, read from what XLA says about its buffer assignment.

Buffer assignment is what a device will allocate; it is known before code is generated. Kinds, in bytes per device:

- Arguments (parameters, optimizer, gradients, batch): exact, from shapes and shardings.
- Activations: buffers alive at the peak that an operation of the forward pass wrote and that live on into the backward
  pass; an operation belongs to either by the mark that differentiation leaves on its name.
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
    buffers = list(_peak_buffers(dump.live_range.read_text(encoding="utf-8"), module))
    return Memory(
        total_bytes=int(found[1]),
        argument_bytes=_argument_bytes(dump.assignment),
        activation_bytes=sum(buffer.num_bytes for buffer in buffers if buffer.kind == "activation"),
        buffers=tuple(sorted(buffers, key=lambda buffer: -buffer.num_bytes)[:num_buffers]),
    )


def _argument_bytes(assignment: Path) -> int:
    with assignment.open(encoding="utf-8") as lines:
        allocations = (line for line in lines if line.startswith("allocation "))
        return sum(
            int(found[1])
            for line in allocations
            if (found := re.match(r"allocation \d+: size (\d+), (?!color [1-9])(?:.*, )?parameter \d+,", line))
        )


def _peak_buffers(text: str, module: Module) -> Iterator[Buffer]:
    head, _, peak = text.partition(" (peak):\n")
    instructions = {i.name: i for computation in module.computations.values() for i in computation}
    arguments = {i.name for i in module.computations.get(module.entry, ()) if i.opcode == "parameter"}
    loops = dict(_loop_parameters(module))
    backward = _start_of_backward(head, instructions)
    at = int(head.rpartition(" ")[2])
    lives = {
        name: (int(start), int(end))
        for name, start, end in re.findall(r"^    (\S+\{[\d, ]*\}):(\d+)-(\d+)$", head, re.MULTILINE)
    }
    for name, index, size in re.findall(r"^    (\S+)\{([\d, ]*)\}: (\d+) bytes \(cumulative", peak, re.MULTILINE):
        if not int(size):
            continue
        writer = loops.get(name) or instructions.get(name)
        _, end = lives.get(f"{name}{{{index}}}", (at, at))
        source = writer.op_name if writer else ""
        forward = "jvp(" in source and "transpose(" not in source
        kind = "argument" if name in arguments else "activation" if forward and end > backward else "temporary"
        yield Buffer(
            num_bytes=int(size),
            shape=_shape(instructions[name].shape, index) if name in instructions else "",
            instruction=name,
            source=source,
            kind=kind,
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
