"""What is to be planned, as processes pass it on, and the programs that they make of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """One plan.

    Attributes:
        recipe: TOML text of the resolved recipe, or empty where `programs` needs none.
        topology: Name of the topology.
        mesh: Devices along each axis, major to minor.
        programs: `module:function` of what makes the programs from a recipe and a mesh: `Planned` by name.
        budget_mib: Memory per device that a compiled program may use, MiB.
        options: Further arguments of what makes the programs, by name.
    """

    recipe: str
    topology: str
    mesh: Mapping[str, int]
    programs: str
    budget_mib: int
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A program to plan.

    Attributes:
        jitted: From `jax.jit`.
        arguments: Abstract arrays with their shardings.
        kinds: What each argument is: `parameters`, `optimizer`, `gradients` or `batch`.
        reference_flops: What the model needs on all devices together by the usual rule; 0 where there is none.
    """

    jitted: Any
    arguments: tuple[Any, ...]
    kinds: tuple[str, ...]
    reference_flops: float = 0.0
