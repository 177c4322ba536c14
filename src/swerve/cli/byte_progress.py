"""Shows how many bytes of a long transfer are done."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

_QUIET_S = 5.0


@contextlib.contextmanager
def byte_progress() -> Iterator[Callable[[int, int], None]]:
    """Shows on the standard error how many bytes are done: a bar on a terminal, elsewhere a line now and then."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

        columns = BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn()
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("", total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return
    said, said_done = time.monotonic(), 0

    def say(done: int, total: int) -> None:
        nonlocal said, said_done
        now = time.monotonic()
        if now - said >= _QUIET_S:
            rate = (done - said_done) / (now - said)
            said, said_done = now, done
            left = f", {(total - done) / rate:,.0f} s left" if rate > 0 else ""
            print(f"{size_text(done)} of {size_text(total)}, {size_text(rate)}/s{left}", file=sys.stderr, flush=True)

    yield say


def size_text(num_bytes: float) -> str:
    """A number of bytes for people."""
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 999.5 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.3g} {units[0]}"
