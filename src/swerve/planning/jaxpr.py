"""What a program costs per device, read from its jaxpr: exact trip counts, no compiler.

The jaxpr says what was asked for. Inside `shard_map` its shapes are those of one device; outside, they are global and
work counts as spread evenly over the devices. Counted are matrix products, convolutions and Pallas kernels, and the
collectives that the program names; elementwise work is not. What XLA makes of it, `swerve.planning.hlo` reads.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jax.extend import core

from swerve.planning.costs import Collective, Costs, Work, wire_bytes
from swerve.planning.names import direction_of, scope_of

_COLLECTIVES = {
    "all_gather": "all_gather",
    "psum": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "reduce_scatter": "reduce_scatter",
    "psum_scatter": "reduce_scatter",
    "ppermute": "permute",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",
}
WHOLE_MESH = (
    "a gather over the whole mesh at once, which TPUs turn into an all-reduce of twice the bytes: gather over some "
    "axes, then over the others"
)
_SUFFIXES = re.compile(r"_(invariant|reduced)$")


def count_costs(jaxpr: core.ClosedJaxpr | core.Jaxpr, axis_sizes: Mapping[str, int]) -> Costs:
    """Count what a program does on each device.

    Args:
        jaxpr: The program.
        axis_sizes: Devices along each axis of the mesh that it runs on, major to minor.

    Returns:
        Its costs.
    """
    count = _Count(axis_sizes=dict(axis_sizes))
    count.visit(_open(jaxpr), _Place(share=1 / math.prod(axis_sizes.values())))
    return count.costs()


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Where in the program an equation stands: its repetitions, its scopes, its share per device."""

    times: int = 1
    scopes: str = ""
    share: float = 1.0

    def inside(self, eqn: Any, times: int = 1) -> _Place:
        return replace(
            self, times=self.times * times, scopes=f"{self.scopes}/{eqn.source_info.name_stack}/{eqn.primitive.name}"
        )


@dataclass(kw_only=True, slots=True)
class _Count:
    axis_sizes: dict[str, int]
    work: Counter[tuple[str, str]] = field(default_factory=Counter)
    traffic: Counter[tuple[str, str]] = field(default_factory=Counter)
    calls: Counter[tuple[str, tuple[str, ...]]] = field(default_factory=Counter)
    moved: Counter[tuple[str, tuple[str, ...]]] = field(default_factory=Counter)
    received: Counter[tuple[str, tuple[str, ...]]] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    suspects: Counter[str] = field(default_factory=Counter)
    notes: Counter[str] = field(default_factory=Counter)

    # ------------------------------------------------------------------------------------------------ walking

    def visit(self, jaxpr: core.Jaxpr, place: _Place) -> None:
        for eqn in jaxpr.eqns:
            name = _SUFFIXES.sub("", eqn.primitive.name)
            if flops := _FLOPS.get(name):
                self._add(eqn, place, flops(eqn))
            elif name == "ragged_dot_general":
                self._ragged(eqn, place)
            elif name == "pallas_call":
                self._kernel(eqn, place)
            elif name in _COLLECTIVES:
                self._collective(_COLLECTIVES[name], eqn, place)
            elif name == "cond":
                self._branches(eqn, place)
            elif name == "while":
                self._while(eqn, place)
            elif name == "shard_map":
                self.visit(_open(eqn.params["jaxpr"]), self._manual(eqn, place))
            else:
                times = eqn.params["length"] if name == "scan" else 1
                for inner in _inner(eqn.params.values()):
                    self.visit(inner, place.inside(eqn, times))

    def _manual(self, eqn: Any, place: _Place) -> _Place:
        manual = eqn.params.get("manual_axes") or self.axis_sizes
        rest = math.prod(size for axis, size in self.axis_sizes.items() if axis not in manual)
        return replace(place.inside(eqn), share=1 / rest)

    def _branches(self, eqn: Any, place: _Place) -> None:
        """Takes the branch with most work: a device that skips it waits for those that do not."""
        counts = []
        for branch in eqn.params["branches"]:
            counts.append(_Count(axis_sizes=self.axis_sizes))
            counts[-1].visit(_open(branch), place.inside(eqn))
        heaviest = max(counts, key=lambda count: (sum(count.work.values()), sum(count.moved.values())))
        for name in ("work", "traffic", "calls", "moved", "received", "bad", "suspects", "notes"):
            getattr(self, name).update(getattr(heaviest, name))

    def _while(self, eqn: Any, place: _Place) -> None:
        times = trip_count(eqn)
        before = sum(self.work.values()) + sum(self.calls.values())
        for part in ("cond_jaxpr", "body_jaxpr"):
            self.visit(_open(eqn.params[part]), place.inside(eqn, times or 1))
        if times is None and sum(self.work.values()) + sum(self.calls.values()) > before:
            self.notes[f"{source_of(eqn, place.scopes)}: a loop of unknown length, counted once"] += 1

    # ------------------------------------------------------------------------------------------------ counting

    def _add(self, eqn: Any, place: _Place, flops: float, num_bytes: float | None = None, otherwise: str = "") -> None:
        key = (source_of(eqn, place.scopes, otherwise), direction_of(f"{place.scopes}/{eqn.source_info.name_stack}"))
        once = sum(map(_num_bytes, (*eqn.invars, *eqn.outvars))) if num_bytes is None else num_bytes
        self.work[key] += round(flops * place.times * place.share)
        self.traffic[key] += round(once * place.times * place.share)

    def _ragged(self, eqn: Any, place: _Place) -> None:
        numbers = eqn.params["ragged_dot_dimension_numbers"]
        (contract, _), _ = numbers.dot_dimension_numbers
        flops = 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(eqn.invars[0].aval.shape[d] for d in contract)
        if set(numbers.lhs_ragged_dimensions) & set(contract):
            # The result has a dimension of groups, and each is computed from all rows, masked.
            where = source_of(eqn, place.scopes)
            self.bad[f"{where}: ragged_dot over a ragged contraction becomes a dense masked convolution over all "
                     f"{eqn.outvars[0].aval.shape[0]} groups; use a grouped kernel"] += place.times  # fmt: skip
        self._add(eqn, place, flops)

    def _kernel(self, eqn: Any, place: _Place) -> None:
        name = str(eqn.params.get("name") or getattr(eqn.params.get("name_and_src_info"), "name", "") or "kernel")
        estimate = eqn.params.get("cost_estimate")
        if estimate is not None:
            self._add(eqn, place, estimate.flops, estimate.bytes_accessed, name)
            return
        grid = eqn.params["grid_mapping"].grid
        if not all(isinstance(size, int) for size in grid):
            self.notes[f"kernel {name}: grid of unknown size and no cost_estimate, counted as nothing"] += 1
            return
        body = _Count(axis_sizes=self.axis_sizes)
        body.visit(_open(eqn.params["jaxpr"]), _Place())
        self._add(eqn, place, sum(body.work.values()) * math.prod(grid), otherwise=name)
        steps = " x ".join(map(str, grid))
        self.notes[f"kernel {name}: no cost_estimate, counted as all {steps} steps of its grid, skipped ones too"] += 1

    def _collective(self, kind: str, eqn: Any, place: _Place) -> None:
        named = eqn.params.get("axis_name", eqn.params.get("axes", ()))
        named = (named,) if isinstance(named, str) else tuple(axis for axis in named if isinstance(axis, str))
        axes = tuple(axis for axis, size in self.axis_sizes.items() if axis in named and size > 1)
        if not axes:
            return
        group = math.prod(self.axis_sizes[axis] for axis in axes)
        side = eqn.outvars if kind == "all_gather" else eqn.invars
        num_bytes = sum(map(_num_bytes, side)) * place.share
        key = (kind, axes)
        self.calls[key] += place.times
        self.moved[key] += round(num_bytes) * place.times
        self.received[key] += wire_bytes(kind, num_bytes, group) * place.times
        split = [axis for axis, size in self.axis_sizes.items() if size > 1]
        if kind == "all_gather" and len(split) > 1 and len(axes) == len(split):
            where = source_of(eqn, place.scopes)
            self.suspects[f"{where}: {WHOLE_MESH}"] += place.times

    def costs(self) -> Costs:
        """What was counted."""
        work = (
            Work(source=source, direction=direction, flops=flops, num_bytes=self.traffic[source, direction])
            for (source, direction), flops in self.work.items()
        )
        collectives = (
            Collective(kind=kind, axes=axes, group_size=math.prod(self.axis_sizes[axis] for axis in axes), count=count,
                       num_bytes=self.moved[kind, axes], wire_bytes=self.received[kind, axes])
            for (kind, axes), count in self.calls.items()
        )  # fmt: skip
        return Costs(
            work=tuple(sorted(work, key=lambda each: -each.flops)),
            collectives=tuple(sorted(collectives, key=lambda each: -each.num_bytes)),
            bad_lowerings=tuple(f"{times:,} x {text}" for text, times in self.bad.items()),
            suspects=tuple(f"{times:,} x {text}" for text, times in self.suspects.items()),
            notes=tuple(self.notes),
        )


# ------------------------------------------------------------------------------------------------ formulas


def _dot_flops(eqn: Any) -> float:
    (contract, _), _ = eqn.params["dimension_numbers"]
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(eqn.invars[0].aval.shape[d] for d in contract)


def _convolution_flops(eqn: Any) -> float:
    kernel = eqn.invars[1].aval.shape
    out_features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) / out_features


_FLOPS = {"dot_general": _dot_flops, "conv_general_dilated": _convolution_flops}


def trip_count(eqn: Any) -> int | None:
    """Repetitions of a `while` that counts an integer from one constant up to another.

    Args:
        eqn: The equation.

    Returns:
        The number; None where it cannot be told from the program.
    """
    cond, body = _open(eqn.params["cond_jaxpr"]), _open(eqn.params["body_jaxpr"])
    num_cond, num_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    if len(cond.eqns) != 1 or cond.eqns[0].primitive.name != "lt" or not _is_input(cond.eqns[0].invars[0], cond):
        return None
    counter, limit = cond.eqns[0].invars
    positions: dict[Any, int] = {variable: position for position, variable in enumerate(cond.invars)}
    index = positions[counter] - num_cond
    if not isinstance(limit, core.Literal):
        limit = eqn.invars[positions[limit]] if positions[limit] < num_cond else None
    start = eqn.invars[num_cond + num_body + index]
    if index < 0 or not isinstance(limit, core.Literal) or not isinstance(start, core.Literal):
        return None
    for step in body.eqns:
        if step.outvars[0] is body.outvars[index] and step.primitive.name == "add":
            left, right = step.invars
            if left is body.invars[num_body + index] and isinstance(right, core.Literal) and right.val > 0:
                return max(0, -(-(int(limit.val) - int(start.val)) // int(right.val)))
    return None


# ------------------------------------------------------------------------------------------------ names


def source_of(eqn: Any, scopes: str, otherwise: str = "") -> str:
    """Where an equation comes from: the author's scopes, else the functions that wrote it.

    Args:
        eqn: The equation.
        scopes: Names of what it stands in.
        otherwise: What to say where neither is known, in place of the operation's name.
    """
    return scope_of(f"{scopes}/{eqn.source_info.name_stack}") or _function_of(eqn) or otherwise or eqn.primitive.name


def _function_of(eqn: Any) -> str:
    """The innermost two functions outside JAX, the outer one first: a helper alone says little."""
    found: list[str] = []
    for frame in getattr(eqn.source_info.traceback, "frames", ()):
        path = frame.file_name.replace("\\", "/")
        name = f"{path.rpartition('/')[2].removesuffix('.py')}.{frame.function_name.rpartition('.')[2]}"
        if "/jax/" not in path and not path.startswith("<") and name not in found:
            found.append(name)
    return "/".join(reversed(found[:2]))


# ------------------------------------------------------------------------------------------------ helpers


def _is_input(variable: Any, jaxpr: core.Jaxpr) -> bool:
    return any(variable is each for each in jaxpr.invars)


def _open(jaxpr: Any) -> core.Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr


def _inner(values: Any) -> Iterator[core.Jaxpr]:
    for value in values:
        if isinstance(value, (core.Jaxpr, core.ClosedJaxpr)):
            yield _open(value)
        elif isinstance(value, Sequence) and not isinstance(value, str):
            yield from _inner(value)


def _num_bytes(variable: Any) -> int:
    aval = variable.aval
    if not hasattr(aval, "shape"):
        return 0
    return math.prod(aval.shape) * aval.dtype.itemsize
