"""What a value of a recipe may be beyond its type, written beside the type with `typing.Annotated`."""

import math
from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True, slots=True)
class Range:
    """An interval of numbers.

    Attributes:
        low: Smallest value allowed.
        high: Largest value allowed.
        above_low: Whether `low` itself is excluded.
    """

    low: float = -math.inf
    high: float = math.inf
    above_low: bool = False

    def allows(self, value: float) -> bool:
        """Whether `value` lies in the interval; not-a-number never does."""
        return (self.low < value if self.above_low else self.low <= value) and value <= self.high

    def __str__(self) -> str:
        """The interval in words, to follow "must be"."""
        if self.low == self.high:
            return f"{self.low:g}"
        low = "" if self.low == -math.inf else f"{'above' if self.above_low else 'at least'} {self.low:g}"
        high = "" if self.high == math.inf else f"at most {self.high:g}"
        return " and ".join(part for part in (low, high) if part)


Count = Annotated[int, Range(1)]
"""A number of things of which there is at least one."""
CountOrZero = Annotated[int, Range(0)]
"""A number of things; what 0 means is said where it is used."""
Seconds = Annotated[float, Range(0, above_low=True)]
"""A span of time; `inf` for no limit."""
PositiveFloat = Annotated[float, Range(0, above_low=True)]
NonNegativeFloat = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
"""A part of a whole, 0 to 1."""
PositiveShare = Annotated[float, Range(0, 1, above_low=True)]
