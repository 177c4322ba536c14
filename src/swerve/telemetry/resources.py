"""What the run takes from the machine: memory and its peak, pages that hold it, and an end with its parent."""

import contextlib
import ctypes
import os
import resource
import signal
import sys
import threading
from pathlib import Path
from types import TracebackType

import psutil

_KIB = 1024
_PR_SET_PDEATHSIG = 1
_TUNABLES, _HUGE_PAGES = "GLIBC_TUNABLES", "glibc.malloc.hugetlb=1"
_KERNEL_SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def die_with_parent() -> None:
    """Ask Linux to end this process with the one that started it, however that ends."""
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == 1:
            sys.exit(1)


def has_huge_pages() -> bool:
    """Whether this process was started so that large blocks of memory come in huge pages."""
    with contextlib.suppress(OSError):
        return _HUGE_PAGES.encode() in Path("/proc/self/environ").read_bytes()
    return False


def restart_with_huge_pages() -> None:
    """Start this process anew, under its number, with large blocks of memory in huge pages, where Linux offers them.

    Programs for CPUs allocate hundreds of megabytes at each call and give them back: with pages of 4 KiB the kernel
    spends a third of the time on faults. The C library reads the setting when a process starts, never later. Call it
    before anything else; what this process starts in turn does not inherit the setting.
    """
    if has_huge_pages():
        _forget()
        return
    if _offered():
        inherited = os.environ.get(_TUNABLES)
        os.environ[_TUNABLES] = f"{inherited}:{_HUGE_PAGES}" if inherited else _HUGE_PAGES
        os.execv(sys.executable, sys.orig_argv)


def _offered() -> bool:
    """Whether the C library (glibc from 2.35 on) and the kernel give huge pages to those who ask."""
    try:
        name, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").split()
        kernel = _KERNEL_SETTING.read_text()
    except (ValueError, OSError):
        return False
    recent = tuple(int(part) for part in version.split(".")[:2]) >= (2, 35)
    return name == "glibc" and recent and "[never]" not in kernel


def _forget() -> None:
    rest = [one for one in os.environ.get(_TUNABLES, "").split(":") if one not in ("", _HUGE_PAGES)]
    if rest:
        os.environ[_TUNABLES] = ":".join(rest)
    else:
        os.environ.pop(_TUNABLES, None)


def tree_memory_bytes(process: psutil.Process | None = None) -> int:
    """Memory that a process and its descendants hold right now.

    The process itself counts by resident size. Descendants count by proportional size where the kernel tells it, since
    forks of one interpreter share most of their pages, and by resident size elsewhere.

    Args:
        process: Root of the tree; this process where `None`.

    Returns:
        Bytes.
    """
    root = process or psutil.Process()
    total = root.memory_info().rss
    for child in root.children(recursive=True):
        with contextlib.suppress(psutil.Error, OSError):
            total += _proportional_bytes(child.pid) or child.memory_info().rss
    return total


def _proportional_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * _KIB
    return 0


class PeakMemory:
    """Watches the memory of the process and its descendants from a thread of its own.

    Used as a context manager. Peaks shorter than the interval can be missed in descendants, never in the process
    itself, whose peak the kernel keeps.
    """

    def __init__(self, interval_s: float = 1.0) -> None:
        """Does not start watching yet.

        Args:
            interval_s: Seconds between two looks.
        """
        self._interval_s = interval_s
        self._peak = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    @property
    def peak_bytes(self) -> int:
        """Largest sum seen so far."""
        own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB
        return max(self._peak, own)

    def _watch(self) -> None:
        process = psutil.Process()
        while True:
            with contextlib.suppress(psutil.Error, OSError):
                self._peak = max(self._peak, tree_memory_bytes(process))
            if self._stop.wait(self._interval_s):
                return

    def __enter__(self) -> "PeakMemory":
        """Starts watching."""
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stops watching."""
        self._stop.set()
        self._thread.join()
