"""Settings of this process that make a CPU a better accelerator.

XLA allocates all temporaries of a program at each call. The C library hands such large blocks back to the kernel when
they are freed, so every training step faults in and clears hundreds of megabytes again: a third of its time. So freed
memory is kept, and comes in huge pages where there are any (`swerve.telemetry.restart_with_huge_pages`): less to fault
in the first time, and fewer misses in the tables of pages. LLVM at its default level spends more than half of a
program's compilation on optimisations that this code does not gain from.
"""

from __future__ import annotations

import ctypes
import os
import sys

from swerve.telemetry import has_huge_pages

_M_TRIM_THRESHOLD, _M_MMAP_MAX, _M_ARENA_MAX = -1, -4, -8  # malloc.h
_FLAGS = {"--xla_backend_optimization_level": "1"}


def tune_cpu() -> bool:
    """Keep freed memory in the process, and compile for CPUs at a level that pays.

    Call it once, before the first computation and before any thread allocates much; set `XLA_FLAGS` win.
    The process's memory never shrinks afterwards: it stays at its peak.

    Returns:
        Whether the C library took the settings; False where it is not glibc.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    wanted = [f"{name}={value}" for name, value in _FLAGS.items() if name not in flags]
    os.environ["XLA_FLAGS"] = " ".join([*flags.split(), *wanted])
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except AttributeError:  # musl
        return False
    settings = [(_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1)]
    if not has_huge_pages():
        settings.append((_M_ARENA_MAX, 1))  # with huge pages it is better to keep small blocks of threads apart
    return all(mallopt(name, value) == 1 for name, value in settings)
