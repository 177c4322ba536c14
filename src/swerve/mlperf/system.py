"""The description of a system: what the machine tells of the 33 fields, and what a site has to say itself."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import psutil

from swerve.mlperf import rules
from swerve.types import SwerveError

_GIB = 2**30
_STACK = ("jaxlib", "numpy", "optax", "jax-cuda13-plugin", "jax-cuda12-plugin", "libtpu", "vllm", "ray", "swerve")
_NO_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd")
NONE = "N/A"
"""What a field says that does not apply."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accelerators:
    """What the framework computes on, on this machine.

    Attributes:
        platform: `cpu`, `gpu` or `tpu`.
        count: How many devices.
        kind: Their name.
    """

    platform: str
    count: int
    kind: str


def probe_system(accelerators: Accelerators | None) -> dict[str, str]:
    """Fields that this machine tells.

    Args:
        accelerators: What the framework computes on; unknown where `None`.

    Returns:
        Field to text; fields that are not known are left out.
    """
    return {
        name: value
        for name, value in {
            **_processor(),
            **_memory_and_disk(),
            **_accelerators(accelerators),
            **_software(),
            "hw_notes": "",
            "sw_notes": "",
        }.items()
        if value is not None
    }


def read_site(path: Path) -> dict[str, str]:
    """Reads what a site says of its system.

    Args:
        path: A JSON object of fields; `null` is a field that is still to be filled in.

    Returns:
        Field to text, without the `null` ones.

    Raises:
        SwerveError: It is missing, no JSON object, or a field is no text.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SwerveError(f"{path}: {error.strerror}: swerve mlperf system --out {path} writes a template") from error
    except ValueError as error:
        raise SwerveError(f"{path}: no JSON: {error}") from error
    if not isinstance(document, dict):
        raise SwerveError(f"{path}: must be a JSON object of fields, such as cooling")
    fields = cast("dict[str, object]", document)
    for name, value in fields.items():
        if value is not None and not isinstance(value, str):
            raise SwerveError(f"{path}: {name}: {json.dumps(value)} is no text: put it between quotes")
    return {name: value for name, value in fields.items() if isinstance(value, str)}


def missing_fields(fields: Mapping[str, str]) -> dict[str, str]:
    """Fields that the rules ask for and nobody has given, and what each is."""
    return {name: what for name, what in rules.SYSTEM_FIELDS.items() if name not in fields}


def template(fields: Mapping[str, str]) -> dict[str, str | None]:
    """All fields in the order of the rules, `None` where unknown; fields of the site's own come last."""
    own = {name: value for name, value in fields.items() if name not in rules.SYSTEM_FIELDS}
    return {**{name: fields.get(name) for name in rules.SYSTEM_FIELDS}, **own}


# ---------------------------------------------------------------------------------------------------- what is known


def _processor() -> dict[str, str | None]:
    cores = [
        dict(re.findall(r"^([\w ]+?)\s*: ?(.*)$", block, re.MULTILINE))
        for block in _read(Path("/proc/cpuinfo")).strip().split("\n\n")
    ]
    sockets = len({core.get("physical id", "0") for core in cores}) or 1
    threads, physical = psutil.cpu_count(logical=True), psutil.cpu_count(logical=False)
    frequency = psutil.cpu_freq()
    mhz = (frequency.max or frequency.current) if frequency else 0
    return {
        "host_processors_per_node": str(sockets),
        "host_processor_model_name": next((core["model name"] for core in cores if "model name" in core), None),
        "host_processor_core_count": str(physical // sockets) if physical else None,
        "host_processor_vcpu_count": str(threads // sockets) if threads else None,
        "host_processor_frequency": f"{mhz:.0f} MHz" if mhz else None,
        "host_processor_caches": _caches(),
        "host_processor_interconnect": NONE if sockets == 1 else None,
    }


def _caches() -> str | None:
    """Caches that the first core sees, such as `L1d 32 KiB, L1i 32 KiB, L2 512 KiB, L3 32 MiB`."""
    found: list[str] = []
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(index / name).strip() for name in ("level", "type", "size"))
        if match := re.fullmatch(r"(\d+)K", size):
            kib = int(match[1])
            words = f"{kib // 1024} MiB" if kib >= 1024 and kib % 1024 == 0 else f"{kib} KiB"
            found.append(f"L{level}{ {'Data': 'd', 'Instruction': 'i'}.get(kind, '') } {words}")
    return ", ".join(found) or None


def _memory_and_disk() -> dict[str, str | None]:
    blocks = [path for path in Path("/sys/block").glob("*") if not path.name.startswith(_NO_DISKS)]
    kinds = {_disk(block) for block in blocks}
    return {
        "host_memory_capacity": f"{psutil.virtual_memory().total / _GIB:.0f} GiB",
        "host_storage_type": ", ".join(sorted(kinds)) or None,
        "host_storage_capacity": f"{shutil.disk_usage(Path.cwd()).total / _GIB:.0f} GiB",
    }


def _disk(block: Path) -> str:
    """Kind of a disk; a virtual one does not tell what is beneath it."""
    if block.name.startswith(("vd", "xvd")):
        return "virtual disk"
    if block.name.startswith("nvme"):
        return "NVMe SSD"
    return "HDD" if _read(block / "queue" / "rotational").strip() == "1" else "SSD"


def _accelerators(found: Accelerators | None) -> dict[str, str | None]:
    if found is None:
        return {}
    if found.platform == "cpu":
        names = [name for name in rules.SYSTEM_FIELDS if name.startswith("accelerator_")]
        return {"accelerators_per_node": "0", **dict.fromkeys(names, NONE)}
    fields: dict[str, str | None] = {
        "accelerators_per_node": str(found.count),
        "accelerator_model_name": found.kind,
        "accelerator_interconnect": NONE if found.count == 1 else None,
        "accelerator_interconnect_topology": NONE if found.count == 1 else None,
    }
    if found.platform == "gpu" and (told := _nvidia()):
        name, memory, clock = told
        fields |= {"accelerator_model_name": name, "accelerator_memory_capacity": f"{memory / 1024:.0f} GiB"}
        fields |= {"accelerator_frequency": f"{clock:.0f} MHz"}
    return fields


def _nvidia() -> tuple[str, float, float] | None:
    query = ["nvidia-smi", "--query-gpu=name,memory.total,clocks.max.sm", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
        name, memory, clock = (word.strip() for word in done.stdout.splitlines()[0].split(","))
        return name, float(memory), float(clock)
    except (OSError, ValueError, IndexError, subprocess.SubprocessError):
        return None


def _software() -> dict[str, str | None]:
    try:
        release = platform.freedesktop_os_release().get("PRETTY_NAME", platform.system())
    except OSError:
        release = platform.system()
    versions = {name: version for name in _STACK if (version := _version(name))}
    jax = _version("jax")
    stack = [f"Python {platform.python_version()}", *(f"{name} {version}" for name, version in versions.items())]
    return {
        "framework": f"JAX {jax}" if jax else None,
        "other_software_stack": ", ".join(stack),
        "operating_system": f"{release}, kernel {platform.release()}",
    }


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
