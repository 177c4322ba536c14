"""What is to be planned, as the processes that do it pass it on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One plan.

    Attributes:
        recipe: TOML text of the resolved recipe, or empty where `programs` needs none.
        topology: Name of the topology.
        mesh: Devices along each axis, major to minor.
        programs: `module:function` of what makes the programs from a recipe and a mesh, by name: each with `jitted`,
            `arguments` (abstract arrays with shardings), `kinds` of the arguments, and `reference_flops`.
        budget_mib: Memory per device that a compiled program may use, MiB.
    """

    recipe: str
    topology: str
    mesh: Mapping[str, int]
    programs: str
    budget_mib: int
