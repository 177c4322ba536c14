"""How far a run has read its tasks: an endless, repeatable order over a finite list."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from swerve.types import SwerveError


@dataclass(frozen=True, kw_only=True, slots=True)
class DataPosition:
    """A place in the order in which tasks are taken, round and round.

    The order of a round is a function of the seed and the round's number alone, so a position restored from a
    checkpoint goes on with the very next task.

    Attributes:
        num_tasks: Tasks of one round.
        num_taken: Tasks taken since the start of the run, over all rounds.
        shuffle_seed: Seed of the order of each round; `None` takes tasks in file order.
    """

    num_tasks: int
    num_taken: int = 0
    shuffle_seed: int | None = None

    def __post_init__(self) -> None:
        if self.num_tasks < 1 or self.num_taken < 0:
            raise SwerveError(
                f"no position in a list of {self.num_tasks} tasks after {self.num_taken}: the task file holds no task, "
                f"or the checkpoint is not of this run"
            )

    @property
    def epoch(self) -> int:
        """Number of the round that the next task belongs to, from 0."""
        return self.num_taken // self.num_tasks

    def take(self, count: int) -> tuple[tuple[int, ...], DataPosition]:
        """Return the next tasks and the position after them.

        Args:
            count: Tasks to take; more than remain in the round go on in the next one.

        Returns:
            Indices into the task list, `count` of them, and the new position.
        """
        orders: dict[int, tuple[int, ...]] = {}
        taken: list[int] = []
        for number in range(self.num_taken, self.num_taken + count):
            epoch, place = divmod(number, self.num_tasks)
            if epoch not in orders:
                orders[epoch] = self._order(epoch)
            taken.append(orders[epoch][place])
        return tuple(taken), replace(self, num_taken=self.num_taken + count)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> DataPosition:
        """Read what `to_json` wrote.

        Args:
            record: JSON object.

        Returns:
            The position.

        Raises:
            SwerveError: A field is missing or unknown.
        """
        fields = {"num_tasks", "num_taken", "shuffle_seed"}
        if odd := sorted(fields ^ record.keys()):
            raise SwerveError(f"data position: the fields {', '.join(odd)} are missing or unknown: not of this version")
        return cls(**record)

    def _order(self, epoch: int) -> tuple[int, ...]:
        if self.shuffle_seed is None:
            return tuple(range(self.num_tasks))
        return tuple(np.random.default_rng([self.shuffle_seed, epoch]).permutation(self.num_tasks).tolist())
