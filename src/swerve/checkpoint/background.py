"""Writes while others compute: one thing at a time, in order, and never silently not."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWriter:
    """Runs writes in a thread of its own. What is written must not change meanwhile: give it copies."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="write-checkpoint")
        self._last: Future[object] | None = None

    def submit(self, write: Callable[[], object]) -> None:
        """Begin to write, as soon as what was submitted before is written.

        Args:
            write: Called without arguments.

        Raises:
            Exception: What the write before raised; this one is not begun.
        """
        self.wait()
        self._last = self._thread.submit(write)

    def wait(self) -> None:
        """Return when everything is written; raises what a write raised."""
        last, self._last = self._last, None
        if last is not None:
            last.result()

    def close(self) -> None:
        """Let the present write end, and end the thread; idempotent. Call `wait` first to learn how it ended."""
        self._thread.shutdown()
