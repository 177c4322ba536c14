"""The plan: what the programs need, set against what a device has.

Memory is that of the fullest moment of the fullest program, with what other programs keep on the device meanwhile.
Times are bounds from peak figures, not predictions: the longest of computing, memory and interconnect if all three
overlap perfectly, their sum if none do. Memory traffic counts operands and results of every counted operation,
arguments once, and results that take an argument's place once; interconnect traffic is what XLA emitted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swerve.planning.compiler import Compiled, state_bytes
from swerve.planning.costs import Collective, Description
from swerve.planning.topology import MIB, Topology

ASSUMPTIONS = (
    "work outside shard_map is spread evenly over the devices; elementwise work takes no time of its own",
    "kernels take what their cost_estimate says, and routed experts the room they are given",
    "memory traffic: operands and results of products, kernels and collectives; nothing stays in on-chip memory",
    "interconnect: (n-1)/n of a collective's bytes reach each device, twice that for all-reduce, at the full bandwidth",
    "at least: computing, memory and interconnect overlap perfectly; at most: they do not overlap",
)
KINDS = ("parameters", "optimizer", "gradients", "batch", "activations", "temporaries")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgramPlan:
    """One program on one device.

    Attributes:
        memory_bytes: By kind, in the order of `KINDS`; of state that is on the device while the program runs, too.
            Empty where XLA gave up before it knew.
        total_bytes: Their sum, or what XLA says it would need.
        fits: Whether that is within the budget.
        seconds: Lower bounds: `compute`, `memory`, `interconnect`; and the step's `at_least` and `at_most`.
        bad_lowerings: A line each.
        description: What the program asks for.
        compiled: What XLA made of it.
    """

    memory_bytes: Mapping[str, int]
    total_bytes: int
    fits: bool
    seconds: Mapping[str, float]
    bad_lowerings: tuple[str, ...]
    description: Description
    compiled: Compiled

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """What XLA emitted, or what is asked for where that is not known."""
        return self.compiled.emitted.collectives if self.compiled.emitted else self.description.costs.collectives


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All programs of a recipe.

    Attributes:
        topology: What they are planned for.
        mesh: Devices along each axis.
        full: Whether code was generated.
        programs: By name.
    """

    topology: Topology
    mesh: Mapping[str, int]
    full: bool
    programs: Mapping[str, ProgramPlan]

    @property
    def fits(self) -> bool:
        """The verdict."""
        return all(program.fits for program in self.programs.values())

    @property
    def total_bytes(self) -> int:
        """Memory of the program that needs most."""
        return max(program.total_bytes for program in self.programs.values())


def make_plan(
    topology: Topology, mesh: Mapping[str, int], full: bool, results: Mapping[str, tuple[Description, Compiled]]
) -> Plan:
    """Set what programs need against what a device has.

    Args:
        topology: The devices, and their figures.
        mesh: Devices along each axis.
        full: Whether code was generated.
        results: Of `run_job`.

    Returns:
        The plan.
    """
    state = state_bytes(description for description, _ in results.values())
    programs = {name: _plan_program(topology, state, *result) for name, result in results.items()}
    return Plan(topology=topology, mesh=mesh, full=full, programs=programs)


def _plan_program(
    topology: Topology, state: Mapping[str, int], description: Description, compiled: Compiled
) -> ProgramPlan:
    memory = _memory_bytes(state, description, compiled)
    absent = sum(size for kind, size in state.items() if kind not in description.argument_bytes)
    total = sum(memory.values()) if memory else compiled.used_bytes + absent
    return ProgramPlan(
        memory_bytes=memory,
        total_bytes=total,
        fits=not compiled.out_of_memory and total <= topology.device.budget_mib * MIB,
        seconds=_seconds(topology, description, compiled),
        bad_lowerings=_bad_lowerings(description, compiled),
        description=description,
        compiled=compiled,
    )


def _memory_bytes(state: Mapping[str, int], description: Description, compiled: Compiled) -> dict[str, int]:
    memory = compiled.memory
    if memory is None:
        return {}
    sizes = dict.fromkeys(KINDS, 0) | dict(state) | dict(description.argument_bytes)
    # Padding makes arguments larger than their shapes say; those that nothing reads are not in the assignment at all.
    padding = max(0, memory.argument_bytes - sum(description.argument_bytes.values()))
    sizes["activations"] = memory.activation_bytes
    sizes["temporaries"] = memory.total_bytes - memory.argument_bytes - memory.activation_bytes + padding
    return sizes


def _seconds(topology: Topology, description: Description, compiled: Compiled) -> dict[str, float]:
    device, costs = topology.device, description.costs
    wire = compiled.emitted.collectives if compiled.emitted else costs.collectives
    traffic = costs.hbm_bytes + sum(description.argument_bytes.values()) + description.donated_bytes
    traffic += sum(each.num_bytes for each in wire)
    parts = {
        "compute": costs.flops / device.peak_flops_per_s,
        "memory": traffic / device.hbm_bytes_per_s,
        "interconnect": sum(each.wire_bytes for each in wire) / device.ici_bytes_per_s,
    }
    return parts | {"at_least": max(parts.values()), "at_most": sum(parts.values())}


def _bad_lowerings(description: Description, compiled: Compiled) -> tuple[str, ...]:
    """What the jaxpr shows by itself, and what the comparison with HLO shows to have become reductions."""
    costs, emitted = description.costs, compiled.emitted
    if emitted is None:
        return (*costs.bad_lowerings, *costs.suspects)
    all_axes = dict.fromkeys(each.axes for each in costs.collectives)
    turned = (_turned_into_reductions(axes, costs.collectives, emitted.collectives) for axes in all_axes)
    return (*costs.bad_lowerings, *filter(None, turned))


def _turned_into_reductions(axes: tuple[str, ...], asked: Sequence[Collective], made: Sequence[Collective]) -> str:
    """A line about gathers and scatters over these axes that were emitted as all-reduces; empty if there are none."""

    def surplus(kind: str, more: Sequence[Collective], fewer: Sequence[Collective]) -> tuple[int, int]:
        here = [[each for each in some if (each.kind, each.axes) == (kind, axes)] for some in (more, fewer)]
        counts = [sum(each.count for each in some) for some in here]
        sizes = [sum(each.num_bytes for each in some) for some in here]
        return counts[0] - counts[1], sizes[0] - sizes[1]

    reductions, reduced_bytes = surplus("all_reduce", made, asked)
    missing = []
    for kind in ("all_gather", "reduce_scatter"):
        count, num_bytes = surplus(kind, asked, made)
        # XLA also joins collectives of a kind, which loses none of their bytes.
        if count > 0 and num_bytes * 20 > reduced_bytes:
            missing.append(f"{count:,} x {kind}")
    if reductions <= 0 or not missing:
        return ""
    verb = "all-reduces, which move" if reductions > 1 else "all-reduce, which moves"
    return f"{' and '.join(missing)} over {', '.join(axes)} became {reductions:,} {verb} twice the bytes"
