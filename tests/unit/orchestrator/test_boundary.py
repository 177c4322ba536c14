"""The boundary between two steps: the same calls and the same bits whatever is done early, and exact resume from
anywhere in it. The loop and the trainer are the real ones; recorded episodes are played to them.
"""

import asyncio
import dataclasses
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest

from swerve import models
from swerve.checkpoint import BackgroundWriter, CheckpointStore, DataPosition
from swerve.config import TrainRecipe
from swerve.config.schema import Algorithm, Checkpoint, Evaluation, Optimizer, Packing, Rollout, Training
from swerve.orchestrator import LoopRoles, LoopState, Stepper, TrainingLoop
from swerve.orchestrator.state import Attempts
from swerve.telemetry import (
    Metrics,
    PhaseTimer,
    TrajectoryLog,
    open_progress,
    read_metrics,
    trajectory_from_json,
    trajectory_to_json,
)
from swerve.trainer import GrpoTrainer, StagingRefusedError, SyntheticShape, TrainerState, synthetic_groups
from swerve.types import SwerveError
from tiny import CONFIG

NOTHING: Any = None
NUM_STEPS = 4
OPEN = Algorithm(importance="none", logprob_error_threshold=float("inf"), overlong_filter=False, max_logprob_gap=1e9)


class Crash(BaseException):
    """The process is gone; nothing below may catch it."""


class Watched(GrpoTrainer):
    """A trainer that keeps what it was asked for, and where it is to crash."""

    def __init__(self, **options: Any) -> None:
        self.calls: list[str] = []
        self.on_call: Callable[[str], None] = lambda name: None
        settings: dict[str, Any] = {"context_length": 32, "row_length": 32, "rows_per_micro_batch": 2, "put": self.copy}
        params = models.initialise(CONFIG, jax.random.key(0))
        super().__init__(CONFIG, params, algorithm=OPEN, optimizer=Optimizer(learning_rate=1e-2), **settings | options)

    def copy(self, arrays: Any, sharding: Any) -> Any:
        self.note("copy")
        return jax.device_put(arrays, sharding)

    def note(self, name: str) -> None:
        self.calls.append(name)
        self.on_call(name)

    def begin(self, batch: Any) -> None:
        self.note("begin")
        super().begin(batch)

    def accumulate(self, micro_batch: Any) -> None:
        self.note("accumulate")
        super().accumulate(micro_batch)

    def defer_update(self, learning_rate: float, batch: Any, start: float) -> None:
        self.note("defer")
        super().defer_update(learning_rate, batch, start)

    def stage(self, micro_batch: Any) -> Any:
        self.note("stage")
        return super().stage(micro_batch)

    def finish_update(self) -> Any:
        self.note("update")
        stats = super().finish_update()
        self.note("updated")
        return stats


class Publisher:
    """Takes weights to nobody."""

    def __init__(self, trainer: Watched) -> None:
        self.trainer = trainer

    def publish(self, params: Any, number: int) -> None:
        self.trainer.note("hand over")
        jax.block_until_ready(params)
        self.trainer.note("handed over")


@pytest.fixture(scope="module")
def compiled() -> tuple[Watched, TrainerState]:
    trainer = Watched()
    return trainer, trainer.state()


@pytest.fixture
def trainer(compiled: tuple[Watched, TrainerState]) -> Watched:
    return renewed(*compiled)


def renewed(trainer: Watched, state: TrainerState) -> Watched:
    """The trainer as a new process would make it; compiled programs are kept."""
    trainer._due = None
    trainer.restore(state)
    trainer.calls = []
    trainer.on_call = lambda name: None
    return trainer


def recorded(number: int) -> asyncio.Future[Attempts]:
    """Episodes of a step, there at once, sampled one version before the one that they train, where there is one."""
    groups = synthetic_groups(
        SyntheticShape(context_length=32), 2, 4, vocab_size=48, seed=number, version=max(number - 2, 0)
    )
    played: asyncio.Future[Attempts] = asyncio.get_running_loop().create_future()
    played.set_result([group.trajectories for group in groups])
    return played


def recipe(**training: Any) -> TrainRecipe:
    settings: dict[str, Any] = {"num_steps": NUM_STEPS, "max_trajectory_age": 1} | training
    return TrainRecipe(
        rollout=Rollout(prompts_per_step=2, generations_per_prompt=4, context_length=32, max_new_tokens=8),
        algorithm=OPEN,
        optimizer=Optimizer(learning_rate=1e-2),
        packing=Packing(row_length=32, rows_per_micro_batch=2),
        training=Training(**settings),
        evaluation=Evaluation(before=False, after=False),
        checkpoint=Checkpoint(every=1, keep=0),
    )


def run(trainer: Watched, directory: Path, settings: TrainRecipe, *, resume: bool = False) -> LoopState:
    """Train, in a directory, from the start or from what lies there."""
    directory.mkdir(exist_ok=True)
    store = CheckpointStore(directory / "checkpoints", recipe_digest="r", datasets={})
    state = LoopState(position=DataPosition(num_tasks=64))
    if resume and store.latest() is not None:
        kept = store.load(fall_back=True)
        trainer.restore(TrainerState(params=kept.params, optimizer=kept.optimizer, version=kept.step))
        state = LoopState.from_json(kept.host, map(trajectory_from_json, kept.queue))
    step = state.step if resume else None
    writer = BackgroundWriter()
    metrics = Metrics(directory / "metrics.jsonl", resume_step=step)
    log = TrajectoryLog(directory / "trajectories.jsonl", resume_step=step)

    def save(state: LoopState, worth: float | None) -> None:
        trainer.note("save")
        whole, host = trainer.state(), state.to_json()
        queue = [trajectory_to_json(one) for group in state.queue for one in group]
        writer.submit(
            lambda: store.save(state.step, params=whole.params, optimizer=whole.optimizer, host=host, queue=queue)
        )
        trainer.note("saved")

    roles = LoopRoles(
        episode=NOTHING, trainer=trainer, publisher=cast("Any", Publisher(trainer)), metrics=metrics,
        progress=open_progress("none", NUM_STEPS, io.StringIO()), trajectories=log, train_tasks=[NOTHING] * 64,
        validation_tasks=[], replay=recorded,
    )  # fmt: skip
    try:
        final = asyncio.run(TrainingLoop(settings, roles, state, save).run())
        writer.wait()
        return final
    finally:
        writer.close()
        metrics.close()
        log.close()


def rows(directory: Path) -> list[dict[str, Any]]:
    """What the metrics say, but for times."""
    times = ("_s", "unix_time")
    return [
        {name: value for name, value in line.items() if not name.endswith(times[0]) and not name.startswith("phase_s/")
         and "unix_time" not in name}
        for line in read_metrics(directory / "metrics.jsonl")
    ]  # fmt: skip


def kept(directory: Path) -> list[str]:
    return (directory / "trajectories.jsonl").read_text().splitlines()


def assert_equal(a: TrainerState, b: TrainerState) -> None:
    assert a.version == b.version
    jax.tree.map(np.testing.assert_array_equal, (a.params, a.optimizer), (b.params, b.optimizer))


WAYS: dict[str, dict[str, bool]] = {
    "plain": {},
    "pipelined": {"pipelined": True},
    "staged": {"pipelined": True, "staged": True},
}


@pytest.fixture(scope="module")
def undisturbed(
    compiled: tuple[Watched, TrainerState], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, TrainerState, list[str]]]:
    """Directory, final state and calls of a whole run each way."""
    made = {}
    for way, settings in WAYS.items():
        trainer, directory = renewed(*compiled), tmp_path_factory.mktemp(way)
        run(trainer, directory, recipe(**settings))
        made[way] = (directory, trainer.state(), list(trainer.calls))
    return made


def test_parameters_and_logs_are_the_same_to_the_last_bit_whatever_is_done_early(undisturbed: Any) -> None:
    directory, state, _ = undisturbed["plain"]
    for way in ("pipelined", "staged"):
        assert_equal(undisturbed[way][1], state)
        assert rows(undisturbed[way][0]) == rows(directory)
        assert kept(undisturbed[way][0]) == kept(directory)
    assert [row["staleness_max"] for row in rows(directory)] == [0, 1, 1, 1]


def test_the_trainer_is_asked_for_the_same_in_the_same_order(undisturbed: Any) -> None:
    def asked(way: str) -> list[str]:
        return [name for name in undisturbed[way][2] if name not in ("copy", "stage")]

    assert asked("plain") == asked("pipelined") == asked("staged")
    assert undisturbed["staged"][2].count("stage") == NUM_STEPS - 1
    assert "stage" not in undisturbed["pipelined"][2]


def test_an_update_is_held_back_until_the_copy_has_begun(undisturbed: Any) -> None:
    calls = undisturbed["staged"][2]
    for place in (index for index, name in enumerate(calls) if name == "stage"):
        assert calls[place - 1] == "defer"
        assert calls[place : place + 3] == ["stage", "copy", "update"]
    # Sent right after hand-over and checkpoint, with nothing to copy any more.
    after = calls[calls.index("stage") :]
    assert after[after.index("handed over") :][:5] == ["handed over", "save", "saved", "begin", "accumulate"]


def points(calls: list[str]) -> Iterator[tuple[str, int]]:
    """Every call of the second step, with the boundaries around it: its name, and how often it came before."""
    updates = [index for index, name in enumerate(calls) if name == "update"]
    for index in range(updates[0], updates[2]):
        yield calls[index], calls[:index].count(calls[index])


@pytest.mark.timeout(300)
def test_a_run_that_crashes_anywhere_in_a_boundary_goes_on_to_the_same_end(
    undisturbed: Any, compiled: tuple[Watched, TrainerState], tmp_path: Path
) -> None:
    directory, state, calls = undisturbed["staged"]
    places = list(points(calls))
    assert len(places) > 20
    for number, (name, before) in enumerate(places):
        trainer, there = renewed(*compiled), tmp_path / str(number)
        left = before

        def crash(called: str, name: str = name) -> None:
            nonlocal left
            if called == name:
                left -= 1
                if left < 0:
                    raise Crash(name)

        trainer.on_call = crash
        with pytest.raises(Crash):
            run(trainer, there, recipe(**WAYS["staged"]))
        run(renewed(*compiled), there, recipe(**WAYS["staged"]), resume=True)
        assert_equal(compiled[0].state(), state)
        assert rows(there) == rows(directory), name
        assert kept(there) == kept(directory), name


def test_a_crash_while_a_checkpoint_is_written_leaves_the_last_good_one(
    undisturbed: Any, compiled: tuple[Watched, TrainerState], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, left = json.dumps, 2

    def fails_in_the_second(*arguments: Any, **options: Any) -> str:
        nonlocal left
        if isinstance(arguments[0], dict) and "files" in arguments[0]:
            left -= 1
            if left == 0:
                raise Crash("power cut")
        return real(*arguments, **options)

    monkeypatch.setattr("swerve.checkpoint.files.json.dumps", fails_in_the_second)
    with pytest.raises(Crash):
        run(renewed(*compiled), tmp_path, recipe())
    monkeypatch.undo()
    assert CheckpointStore(tmp_path / "checkpoints", recipe_digest="r", datasets={}).latest() == 1
    run(renewed(*compiled), tmp_path, recipe(), resume=True)
    assert_equal(compiled[0].state(), undisturbed["plain"][1])


# ------------------------------------------------------------------------------------------------ what goes wrong


def stepped(trainer: Watched, said: list[str], num_steps: int = 3, **options: Any) -> Stepper:
    """Some steps by a stepper alone."""
    stepper = Stepper(trainer, PhaseTimer(), pipelined=True, staged=True, say=said.append)
    groups = [
        synthetic_groups(SyntheticShape(context_length=32), 2, 4, vocab_size=48, seed=n) for n in range(num_steps)
    ]
    batch = trainer.prepare(groups[0])
    for number in range(num_steps):
        stepper.begin(stepper.prepared or batch)
        following = (
            (lambda n=number + 1: trainer.prepare(groups[n], ahead=1)) if number + 1 < num_steps else lambda: None
        )
        stepper.finish(1e-2, following, **options)
    return stepper


def test_a_micro_batch_that_is_not_taken_is_sent_later_and_nothing_is_staged_any_more(
    trainer: Watched, monkeypatch: pytest.MonkeyPatch, undisturbed: Any
) -> None:
    before, said = trainer.state(), []
    stepped(trainer, said)
    expected = trainer.state()
    assert said == []
    trainer.restore(before)

    def refuse(micro_batch: Any) -> Any:
        trainer.note("stage")
        raise StagingRefusedError("the micro-batch was not taken: no thread")

    monkeypatch.setattr(trainer, "stage", refuse)
    trainer.calls = []
    stepper = stepped(trainer, said)
    assert trainer.calls.count("stage") == 1
    assert not stepper.stages
    assert said == ["warning: nothing is staged from here on: the micro-batch was not taken: no thread"]
    assert_equal(trainer.state(), expected)


def test_a_micro_batch_that_fails_on_its_way_ends_the_run(trainer: Watched) -> None:
    copies = 0

    def fail(name: str) -> None:
        nonlocal copies
        copies += name == "copy"
        if name == "copy" and trainer.calls[-2] == "stage":
            raise RuntimeError("a device is gone")

    trainer.on_call = fail
    with pytest.raises(RuntimeError, match="a device is gone"):
        stepped(trainer, [])
    assert trainer.version == 1  # the update that was held back was made, and no step after it


def test_nothing_is_staged_where_the_checkpoint_is_timed(trainer: Watched) -> None:
    stepped(trainer, [], checkpoint_is_timed=True)
    assert "stage" not in trainer.calls


def test_weights_of_a_scored_run_are_timed(trainer: Watched, tmp_path: Path) -> None:
    settings = recipe(**WAYS["staged"])
    scored = dataclasses.replace(settings, checkpoint=Checkpoint(every=2, keep=0, full=False))
    run(trainer, tmp_path, scored)
    staged = [trainer.calls[:i].count("updated") for i, name in enumerate(trainer.calls) if name == "stage"]
    assert staged == [0, 2]  # before the updates of steps 1 and 3; those of 2 and 4 are saved


def test_staging_without_pipelining_is_refused(trainer: Watched) -> None:
    with pytest.raises(SwerveError, match="staging needs pipelining"):
        Stepper(trainer, PhaseTimer(), staged=True)
