"""What the loop itself remembers, beside weights and moments."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from swerve.checkpoint import DataPosition
from swerve.types import SwerveError, Trajectory

Attempts: TypeAlias = Sequence[Sequence[Trajectory]]
"""Episodes by task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LoopState:
    """Where a run stands after some number of updates.

    Attributes:
        step: Updates made.
        position: Where the training tasks go on.
        evaluations: Summary of each evaluation done, by the number of updates before it.
        gap_checked: Sampler and trainer have been compared.
        first_reward_s: Seconds from the start of training to the first reward, or `None`.
        seconds: Seconds the run has taken, those before a resume included.
        queue: Attempts at the next step's tasks, by task, where they were played already; kept apart from the rest.
    """

    step: int = 0
    position: DataPosition
    evaluations: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    gap_checked: bool = False
    first_reward_s: float | None = None
    seconds: float = 0.0
    queue: Attempts = ()

    def to_json(self) -> dict[str, Any]:
        """The state as JSON values, without the queue."""
        return {
            "step": self.step,
            "position": self.position.to_json(),
            "evaluations": {str(step): dict(summary) for step, summary in self.evaluations.items()},
            "gap_checked": self.gap_checked,
            "first_reward_s": self.first_reward_s,
            "seconds": self.seconds,
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any], queue: Iterable[Trajectory] = ()) -> LoopState:
        """The state of JSON values made by `to_json`.

        Args:
            values: The values.
            queue: Attempts at the next step's tasks, those at one task one after the other.

        Raises:
            SwerveError: A key is missing or unknown.
        """
        names = set(cls.__dataclass_fields__) - {"queue"}
        if odd := sorted(names ^ values.keys()):
            raise SwerveError(f"state of a run: key {odd[0]} is missing or unknown: it is of another release")
        return cls(
            step=values["step"],
            position=DataPosition.from_json(values["position"]),
            evaluations={int(step): summary for step, summary in values["evaluations"].items()},
            gap_checked=values["gap_checked"],
            first_reward_s=values["first_reward_s"],
            seconds=values["seconds"],
            queue=tuple(tuple(group) for _, group in itertools.groupby(queue, key=lambda one: one.task_id)),
        )
