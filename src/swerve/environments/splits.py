"""Held-out tasks: whole packages or files stay on one side, never single tasks of one."""

from __future__ import annotations

import dataclasses
import hashlib
from collections import defaultdict
from collections.abc import Sequence

from swerve.types import SwerveError, Task


def hold_out(tasks: Sequence[Task], *, by: str, share: float, seed: int, where: str) -> tuple[list[Task], list[Task]]:
    """Divide tasks into training and held-out ones.

    Args:
        tasks: All of them; each with a provenance.
        by: `package` or `file`: what stays together.
        share: Part of the tasks that is held out, about; above 0 and below 1.
        seed: Decides which groups are.
        where: Named in complaints.

    Returns:
        Training and held-out tasks, each in the order of `tasks` and marked as what it is; the same for the same
        arguments.

    Raises:
        SwerveError: There is only one group, a task does not say where it comes from, or the share is none.
    """
    if not 0.0 < share < 1.0:
        raise SwerveError(f"--validation-share {share:g}: must be above 0 and below 1")
    groups: dict[str, list[Task]] = defaultdict(list)
    for task in tasks:
        if task.provenance is None:
            raise SwerveError(f"{where}: task {task.id}: key provenance: missing, and it cannot be told what it is of")
        groups[
            task.provenance.package if by == "package" else f"{task.provenance.package}/{task.provenance.file}"
        ].append(task)
    if len(groups) < 2:
        raise SwerveError(f"{where}: all tasks are of one {by} ({next(iter(groups))}): there is nothing to hold out")
    order = sorted(groups, key=lambda name: hashlib.sha256(f"{seed}\n{name}".encode()).hexdigest())
    wanted = share * len(tasks)
    held: set[str] = set()
    number = 0
    for name in order:
        # A group is held out if that brings the number nearer to what is wanted; the last one never is.
        if len(held) + 1 < len(groups) and abs(number + len(groups[name]) - wanted) < abs(number - wanted):
            held.add(name)
            number += len(groups[name])
    if not held:
        held.add(min(order, key=lambda name: (len(groups[name]), order.index(name))))
    chosen = {task.id for name in held for task in groups[name]}
    train = [dataclasses.replace(task, split="train") for task in tasks if task.id not in chosen]
    return train, [dataclasses.replace(task, split="validation") for task in tasks if task.id in chosen]
