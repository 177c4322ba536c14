"""Accelerators by name: how many devices a topology has, and what each of them can hold and do.

Figures are those that vendors publish per chip, divided by the devices that JAX sees on a chip. Sources: Google Cloud's
pages "TPU7x (Ironwood)", "TPU v5p" and "TPU v5e": peak bf16 FLOP/s, HBM capacity and bandwidth, and half of the
bidirectional inter-chip interconnect (ICI) bandwidth, since a device receives over one direction. Default budgets are
what libtpu lets a program use of the HBM; that of `tpu7x` is the benchmark's.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from swerve.types import SwerveError

if TYPE_CHECKING:
    from jax.sharding import Mesh

MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """What one device, as JAX counts them, can hold and do.

    Attributes:
        name: Vendor's name of the chip in a topology's name.
        num_dims: Dimensions of the interconnect, 0 where there is none.
        per_chip: Devices on a chip.
        hbm_bytes: Memory.
        budget_mib: Memory that programs may use, in MiB.
        peak_flops_per_s: Dense bf16 multiplications and additions per second.
        hbm_bytes_per_s: Memory bandwidth.
        ici_bytes_per_s: What it can receive from others over all links.
    """

    name: str
    num_dims: int
    per_chip: int = 1
    hbm_bytes: int
    budget_mib: int
    peak_flops_per_s: float
    hbm_bytes_per_s: float
    ici_bytes_per_s: float


_GIB = 2**30
DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        Device(name="tpu7x", num_dims=3, per_chip=2, hbm_bytes=96 * _GIB, budget_mib=84_992,
               peak_flops_per_s=1153.5e12, hbm_bytes_per_s=3690e9, ici_bytes_per_s=300e9),
        Device(name="v6e", num_dims=2, hbm_bytes=32 * _GIB, budget_mib=32_000,
               peak_flops_per_s=918e12, hbm_bytes_per_s=1638e9, ici_bytes_per_s=400e9),
        Device(name="v5p", num_dims=3, hbm_bytes=95 * _GIB, budget_mib=98_037,
               peak_flops_per_s=459e12, hbm_bytes_per_s=2765e9, ici_bytes_per_s=600e9),
        Device(name="v5e", num_dims=2, hbm_bytes=16 * _GIB, budget_mib=16_128,
               peak_flops_per_s=197e12, hbm_bytes_per_s=819e9, ici_bytes_per_s=200e9),
    )
}  # fmt: skip
"""TPUs whose programs libtpu compiles without one at hand."""

_CPU = Device(
    name="cpu", num_dims=0, hbm_bytes=8 * _GIB, budget_mib=8192,
    peak_flops_per_s=1e11, hbm_bytes_per_s=20e9, ici_bytes_per_s=10e9,
)  # fmt: skip
"""A round figure for one simulated device; nothing is claimed of any processor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Topology:
    """Devices that a program is planned for.

    Attributes:
        name: As typed, for example `tpu7x:4x4x8`, or `cpu:8`.
        device: What each device is.
        num_chips: Chips.
    """

    name: str
    device: Device
    num_chips: int

    @property
    def num_devices(self) -> int:
        """Devices that JAX sees."""
        return self.num_chips * self.device.per_chip

    @property
    def is_tpu(self) -> bool:
        """Whether libtpu compiles for it; otherwise these are simulated devices of the CPU."""
        return self.device.num_dims > 0

    def with_figures(
        self,
        *,
        budget_mib: int | None = None,
        peak_tflops: float | None = None,
        hbm_gbps: float | None = None,
        ici_gbps: float | None = None,
    ) -> Topology:
        """The same topology with other figures per device, where given.

        Args:
            budget_mib: Memory that programs may use, MiB.
            peak_tflops: Peak TFLOP/s.
            hbm_gbps: Memory bandwidth, GB/s.
            ici_gbps: Interconnect bandwidth, GB/s.

        Returns:
            The topology.

        Raises:
            SwerveError: A figure is not positive.
        """
        given = {
            "budget_mib": (budget_mib, 1),
            "peak_flops_per_s": (peak_tflops, 1e12),
            "hbm_bytes_per_s": (hbm_gbps, 1e9),
            "ici_bytes_per_s": (ici_gbps, 1e9),
        }
        for name, (value, _) in given.items():
            if value is not None and not 0 < value < math.inf:
                raise SwerveError(f"{self.name}: {name} must be a positive number, not {value}")
        chosen = {name: value * unit for name, (value, unit) in given.items() if value is not None}
        return replace(self, device=replace(self.device, **chosen))


def parse_topology(text: str) -> Topology:
    """Read a topology's name.

    Args:
        text: `NAME:AxBxC` with a TPU's name and chips per dimension, or `cpu:N`.

    Returns:
        The topology.

    Raises:
        SwerveError: The name is unknown, or the dimensions are not those of such a machine.
    """
    name, _, dims = text.partition(":")
    if name != "cpu" and name not in DEVICES:
        known = ", ".join((*DEVICES, "cpu"))
        raise SwerveError(f"--topology {text}: {name or 'nothing'} is not a known accelerator; known: {known}")
    device = _CPU if name == "cpu" else DEVICES[name]
    shape = "N" if device is _CPU else "x".join("ABC"[: device.num_dims])
    if not re.fullmatch(r"[1-9]\d{0,4}" + r"x[1-9]\d{0,3}" * max(device.num_dims - 1, 0), dims):
        raise SwerveError(f"--topology {text}: expected {name}:{shape}, for example {name}:{_example(device)}")
    return Topology(name=text, device=device, num_chips=math.prod(map(int, dims.split("x"))))


def _example(device: Device) -> str:
    return {0: "8", 2: "16x16", 3: "4x4x8"}[device.num_dims]


def environment(topology: Topology, logs: Path) -> dict[str, str]:
    """The environment of a process that compiles for a topology; that of this process stays as it is.

    Args:
        topology: What is compiled for.
        logs: Where libtpu may leave its logs.

    Returns:
        Variables by name, those of this process included.
    """
    own = dict(os.environ)
    # No chip is touched: arrays, where there are any, live on the CPU.
    own["JAX_PLATFORMS"] = "cpu"
    # The same Swerve as here, wherever it was imported from.
    own["PYTHONPATH"] = os.pathsep.join(filter(None, (str(Path(__file__).parents[2]), own.get("PYTHONPATH"))))
    own["JAX_TRACEBACK_FILTERING"] = "off"  # so that a traceback ends with its error
    own.pop("JAX_COMPILATION_CACHE_DIR", None)
    if not topology.is_tpu:
        count = f"--xla_force_host_platform_device_count={topology.num_devices}"
        return own | {"XLA_FLAGS": f"{own.get('XLA_FLAGS', '')} {count}".strip()}
    # libtpu reads the CPU's flags too, and ends at those that it does not know.
    own.pop("XLA_FLAGS", None)
    own.pop("JAX_DISABLE_MOST_OPTIMIZATIONS", None)
    return own | {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5p-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_WORKER_ID": "0",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_LOG_DIR": str(logs),
    }


def make_mesh(topology: Topology, axes: Sequence[str], sizes: Sequence[int]) -> Mesh:
    """A mesh over a topology's devices, in their own order; for a process with the topology's `environment`.

    Args:
        topology: Whose devices.
        axes: Names of the mesh's axes, major to minor.
        sizes: Devices along each.

    Returns:
        The mesh. Arrays cannot be placed on a TPU's; programs can be compiled for it.

    Raises:
        SwerveError: libtpu does not know the topology.
    """
    import jax
    import numpy as np
    from jax.experimental import topologies
    from jax.sharding import Mesh

    check_mesh(topology, dict(zip(axes, sizes, strict=True)))
    if topology.is_tpu:
        try:
            devices = topologies.get_topology_desc(platform="tpu", topology_name=topology.name).devices
        except Exception as error:
            raise SwerveError(
                f"--topology {topology.name}: libtpu refuses it: {' '.join(str(error).split())}"
            ) from None
    else:
        devices = jax.devices("cpu")
    return Mesh(np.array(devices).reshape(tuple(sizes)), tuple(axes))


def check_mesh(topology: Topology, sizes: Mapping[str, int]) -> None:
    """Refuse a mesh that is not made of exactly the topology's devices.

    Args:
        topology: Whose devices.
        sizes: Devices along each axis, by name.

    Raises:
        SwerveError: Their product is another number.
    """
    product = " x ".join(f"{name} {size}" for name, size in sizes.items())
    if math.prod(sizes.values()) != topology.num_devices:
        raise SwerveError(
            f"mesh: {product} is {math.prod(sizes.values())} devices, and {topology.name} has {topology.num_devices}; "
            "change [mesh] or --topology"
        )
