"""Where a step's time goes: every second belongs to exactly one named phase."""

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

OTHER = "other"
"""The phase of every second that no other phase claims."""


class PhaseTimer:
    """A stopwatch whose laps split into named phases without gap or overlap.

    Phases nest: while an inner phase runs the outer one stands still. Whatever lies outside all of them is `other`.
    For one thread (or one task) that drives a step; work that others do at the same time is the phase in which the
    driver waits for it.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        annotate: Callable[[str], AbstractContextManager[object]] = contextlib.nullcontext,
    ) -> None:
        """Starts the first lap.

        Args:
            clock: Monotonic seconds.
            annotate: Marks a block with the phase's name, for example in a profiler's trace.
        """
        self._clock = clock
        self._annotate = annotate
        self._stack: list[str] = []
        self._seconds: dict[str, float] = {}
        self._since = clock()

    @property
    def current(self) -> str:
        """Name of the phase that is running."""
        return self._stack[-1] if self._stack else OTHER

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time of the block as the named phase.

        Args:
            name: The phase; the same name may come again, its times add up.
        """
        self._settle()
        self._stack.append(name)
        try:
            with self._annotate(name):
                yield
        finally:
            self._settle()
            self._stack.pop()

    def lap(self) -> dict[str, float]:
        """Ends a lap and begins the next.

        Returns:
            Seconds by phase, in order of first appearance; their sum is the wall time since the lap before.
        """
        self._settle()
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _settle(self) -> None:
        now = self._clock()
        self._seconds[self.current] = self._seconds.get(self.current, 0.0) + now - self._since
        self._since = now
