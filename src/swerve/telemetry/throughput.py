"""Rates: what was counted in an interval, divided by that interval's time."""

import time
from collections.abc import Callable


class ThroughputMeter:
    """Counts named things and reports them per second of the interval in which they were counted.

    Never a total over a part of its time, nor a part over the total time.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Starts the first interval.

        Args:
            clock: Monotonic seconds.
        """
        self._clock = clock
        self._counts: dict[str, float] = {}
        self._since = clock()

    def add(self, name: str, count: float) -> None:
        """Counts something in the current interval.

        Args:
            name: What, for example `tokens` or `token_slots`.
            count: How many.
        """
        self._counts[name] = self._counts.get(name, 0.0) + count

    def interval(self) -> dict[str, float]:
        """Ends an interval and begins the next.

        Returns:
            `<name>_per_s` for everything counted since the interval before; a name once seen is reported as 0 in an
            interval without it.
        """
        now = self._clock()
        seconds = now - self._since
        rates = {f"{name}_per_s": count / seconds if seconds > 0 else 0.0 for name, count in self._counts.items()}
        self._counts = dict.fromkeys(self._counts, 0.0)
        self._since = now
        return rates
