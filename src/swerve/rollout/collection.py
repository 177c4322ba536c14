"""Many episodes at once: groups of attempts per task, in a fixed order and with seeds that follow from names alone.

    tasks x attempts --> [places: max_concurrency] --> run_episode --> valid? --yes--> its place in its group
                                                           ^             | no
                                                           +-- retries --+--none left--> its place, with its cause

A failed attempt resolves its own place and no other; nothing waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from swerve.rollout.episode import EpisodeRoles, EpisodeSettings, run_episode
from swerve.types import EpisodeStatus, Task, Trajectory

_RETRIED = frozenset({EpisodeStatus.ERROR, EpisodeStatus.AGENT_TIMEOUT})


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """One attempt has ended.

    Attributes:
        trajectory: What came of it.
        attempt: 1 for the first try of this place, then one more per retry.
        will_retry: It was no valid sample and is tried again; it does not count as done.
        num_done: Places filled so far.
        num_total: Places in all.
    """

    trajectory: Trajectory
    attempt: int
    will_retry: bool
    num_done: int
    num_total: int


ProgressCallback = Callable[[Progress], None]


def derive_seed(run_seed: int, step: int, task_id: str, sample_index: int) -> int:
    """Seed of one attempt, a hash of what identifies it; 0 to 2**31 - 1.

    Neither the order of the tasks nor which others are played, nor a retry, changes it.
    """
    name = f"{run_seed}\n{step}\n{sample_index}\n{task_id}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") >> 1


async def collect(
    tasks: Sequence[Task],
    num_samples: int,
    *,
    roles: EpisodeRoles,
    settings: EpisodeSettings,
    seed: int,
    step: int = 0,
    retries: int = 2,
    max_concurrency: int | None = None,
    known: Mapping[tuple[str, int], Trajectory] | None = None,
    on_progress: ProgressCallback | None = None,
) -> list[list[Trajectory]]:
    """Play `num_samples` episodes of each task.

    Args:
        tasks: What to repair. The same task may stand in the list twice; its attempts are then numbered on.
        num_samples: Attempts per task.
        roles: Whom to work with.
        settings: How to play.
        seed: Of the run.
        step: Optimizer step, or whatever tells this collection from others of the run; part of every seed.
        retries: How often an attempt that failed for reasons of infrastructure or of time is repeated.
        max_concurrency: Episodes at once; as many as the policy admits if `None`.
        known: Attempts played before, by task and number; they are not played again.
        on_progress: Called when an attempt has ended, retried ones included.

    Returns:
        Trajectories by task and attempt, in the order of `tasks`, whatever order they ended in. A place whose every
        try failed holds the last of them, with its status and cause.
    """
    places = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    num_total = len(tasks) * num_samples
    played = known or {}
    num_done = len(played)

    async def fill(task: Task, sample_index: int) -> Trajectory:
        nonlocal num_done
        if (task.id, sample_index) in played:
            return played[task.id, sample_index]
        sample_seed = derive_seed(seed, step, task.id, sample_index)
        session_id = f"{step:06d}/{task.id}#{sample_index:04d}"
        async with places:
            for attempt in range(1, retries + 2):
                trajectory = await run_episode(
                    task, sample_index, roles=roles, settings=settings, seed=sample_seed, session_id=session_id
                )
                will_retry = trajectory.status in _RETRIED and attempt <= retries
                num_done += not will_retry
                if on_progress is not None:
                    on_progress(
                        Progress(
                            trajectory=trajectory,
                            attempt=attempt,
                            will_retry=will_retry,
                            num_done=num_done,
                            num_total=num_total,
                        )
                    )
                if not will_retry:
                    return trajectory
        raise AssertionError("unreachable")

    num_seen: dict[str, int] = {}
    pending: list[list[asyncio.Task[Trajectory]]] = []
    try:
        async with asyncio.TaskGroup() as group:
            for task in tasks:
                first = num_seen.get(task.id, 0)
                num_seen[task.id] = first + num_samples
                pending.append([group.create_task(fill(task, i)) for i in range(first, first + num_samples)])
    except BaseExceptionGroup as errors:
        raise _first(errors) from errors
    return [[place.result() for place in places_of_task] for places_of_task in pending]


def _first(error: BaseException) -> BaseException:
    """The first error of nested groups: what the caller can act on, one clear line included."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
