"""What the run takes from the machine: peak memory of the process and everything it started."""

import contextlib
import resource
import threading
from pathlib import Path
from types import TracebackType

import psutil

_KIB = 1024


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
