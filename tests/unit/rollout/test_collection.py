import asyncio

import pytest

from swerve.rollout import collect, derive_seed
from swerve.types import EpisodeStatus, MachineError


def by_task(words):
    """Attempts with an even number repair, the others do not."""
    return lambda session_id, number: words.RIGHT if int(session_id[-4:]) % 2 == 0 else words.WRONG


def gather(run, here, tasks, num_samples, **changes):
    arguments = {"roles": here.roles, "settings": here.settings, "seed": 5, **changes}
    return run(collect(tasks, num_samples, **arguments))


def test_groups_keep_the_order_of_tasks_and_attempts(run, world, words):
    here = world(by_task(words))
    tasks = [words.task(name) for name in ("c", "a", "b")]
    groups = gather(run, here, tasks, 4, step=2)
    assert [[(t.task_id, t.sample_index) for t in group] for group in groups] == [
        [(name, i) for i in range(4)] for name in ("c", "a", "b")
    ]
    assert [[t.reward for t in group] for group in groups] == [[1.0, 0.0, 1.0, 0.0]] * 3
    assert [session for session, _ in here.policy.opened] == [
        f"000002/{name}#{i:04d}" for name in ("c", "a", "b") for i in range(4)
    ]
    assert len({t.seed for group in groups for t in group}) == 12
    again = gather(run, world(by_task(words)), tasks[::-1], 4, step=2, max_concurrency=2)
    for group, other in zip(groups, again[::-1], strict=True):
        for one, two in zip(group, other, strict=True):
            assert (one.seed, one.tokens.tolist()) == (two.seed, two.tokens.tolist())


def test_seeds_follow_from_names():
    assert derive_seed(1, 2, "a", 3) == derive_seed(1, 2, "a", 3)
    names = [(1, 2, "a", 3), (2, 2, "a", 3), (1, 3, "a", 3), (1, 2, "b", 3), (1, 2, "a", 4)]
    seeds = {derive_seed(*name) for name in names}
    assert len(seeds) == 5
    assert all(0 <= derive_seed(0, 0, "t", i) < 2**31 for i in range(1000))
    assert derive_seed(1, 23, "4", 5) != derive_seed(12, 3, "4", 5)


def test_a_failed_attempt_is_retried_with_its_own_seed(run, world, words):
    def choose(session_id, number):
        return [MachineError("lost")] if number in (2, 4, 5) else words.RIGHT

    here = world(choose)
    seen = []
    groups = gather(run, here, [words.task("a"), words.task("b")], 2, on_progress=seen.append, max_concurrency=1)
    assert [[t.reward for t in group] for group in groups] == [[1.0, 1.0], [1.0, 1.0]]
    assert [(p.trajectory.task_id, p.trajectory.sample_index, p.attempt, p.will_retry, p.num_done) for p in seen] == [
        ("a", 0, 1, False, 1),
        ("a", 1, 1, True, 1),
        ("a", 1, 2, False, 2),
        ("b", 0, 1, True, 2),
        ("b", 0, 2, True, 2),
        ("b", 0, 3, False, 3),
        ("b", 1, 1, False, 4),
    ]
    assert {p.num_total for p in seen} == {4}
    assert here.policy.opened[1] == here.policy.opened[2]


def test_what_fails_for_ever_ends_in_its_own_place_with_its_cause(run, world, words):
    here = world(lambda session_id, number: [MachineError("no disk")] if "b#0001" in session_id else words.RIGHT)
    groups = gather(run, here, [words.task("a"), words.task("b"), words.task("c")], 2, retries=1)
    statuses = [[t.status for t in group] for group in groups]
    ok = EpisodeStatus.SUCCEEDED
    assert statuses == [[ok, ok], [ok, EpisodeStatus.ERROR], [ok, ok]]
    lost = groups[1][1]
    assert (lost.task_id, lost.sample_index, lost.reward, lost.error) == ("b", 1, None, "no disk")
    assert len(here.policy.opened) == 7


def test_a_task_that_comes_twice_has_twice_the_attempts(run, world, words):
    task = words.task("a")
    groups = gather(run, world(by_task(words)), [task, task], 2)
    assert [[t.sample_index for t in group] for group in groups] == [[0, 1], [2, 3]]


def test_a_mistake_in_the_program_ends_the_collection(run, world, words):
    here = world(lambda session_id, number: [KeyError("bug")] if "#0001" in session_id else words.RIGHT)
    with pytest.raises(KeyError, match="bug"):
        gather(run, here, [words.task("a")], 3)
    assert not here.policy.open_now


def test_a_callback_that_fails_ends_the_collection_with_its_own_error(run, world, words):
    here = world(lambda session_id, number: words.RIGHT)

    def full(progress):
        raise MachineError("the disk is full")

    with pytest.raises(MachineError, match="the disk is full"):
        gather(run, here, [words.task("a")], 3, on_progress=full)
    assert not here.policy.open_now


def test_a_cancelled_collection_closes_its_sessions(run, world, words):
    here = world(lambda session_id, number: words.RIGHT, delay_s=30.0)

    async def cancel():
        running = asyncio.create_task(collect([words.task("a")], 4, roles=here.roles, settings=here.settings, seed=0))
        while len(here.policy.open_now) < 4:
            await asyncio.sleep(0.01)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    run(cancel())
    assert not here.policy.open_now
