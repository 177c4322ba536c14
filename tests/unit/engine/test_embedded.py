"""The engine's sessions, barrier, rounds and refits, on a stand-in model that notices every lost or repeated token."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

from swerve.engine import EmbeddedEngine, EngineError, RefitError
from swerve.types import Completion, FinishReason, SamplingParams, SwerveError

from .stand_in import PAD, STOP, HashConfig, HashModel, expected_logprobs, table

SAMPLING = SamplingParams(max_new_tokens=20)


def make_engine(params: Any = None, *, num_slots: int = 8, context_length: int = 200, **options: Any) -> EmbeddedEngine:
    options.setdefault("model", HashModel())
    return EmbeddedEngine(
        HashConfig(),
        table() if params is None else params,
        num_slots=num_slots,
        context_length=context_length,
        end_of_turn_id=STOP,
        pad_id=PAD,
        **options,
    )


async def converse(
    engine: EmbeddedEngine, name: str, seed: int, prompts: Sequence[Sequence[int]], sampling: SamplingParams = SAMPLING
) -> list[Completion]:
    session = await engine.open(name, seed)
    try:
        return [await session.generate(prompt, sampling) for prompt in prompts]
    finally:
        session.close()


def run_all(engine: EmbeddedEngine, num: int, num_turns: int = 3, **options: Any) -> list[list[Completion]]:
    async def main() -> list[list[Completion]]:
        episodes = []
        for i in range(num):
            prompts = [[2 + (i // 2 + turn + k) % 9 for k in range(5 + 7 * (i // 2) % 40)] for turn in range(num_turns)]
            episodes.append(converse(engine, f"s{i:03d}", 100 + i, prompts, **options))
        return await asyncio.gather(*episodes)

    return asyncio.run(main())


def context_of(prompts: Sequence[Sequence[int]], completions: Sequence[Completion], turn: int) -> list[int]:
    context: list[int] = []
    for k in range(turn + 1):
        context += prompts[k]
        if k < turn:
            context += completions[k].tokens
    return context


def test_every_logprob_is_right_over_turns_and_batches() -> None:
    params = table()
    engine = make_engine(params, batch_sizes=(2, 4, 8), chunk_lengths=(4, 16), segment_steps=5)
    sampling = SamplingParams(temperature=0.7, max_new_tokens=17)
    for i, completions in enumerate(run_all(engine, 20, sampling=sampling)):
        prompts = [[2 + (i // 2 + turn + k) % 9 for k in range(5 + 7 * (i // 2) % 40)] for turn in range(3)]
        for turn, completion in enumerate(completions):
            context = context_of(prompts, completions, turn)
            expected = expected_logprobs(params, context, list(completion.tokens), 0.7)
            np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5)
            assert STOP not in completion.tokens[:-1]
            stopped = completion.tokens[-1] == STOP
            assert completion.finish_reason is (FinishReason.STOP if stopped else FinishReason.LENGTH)
            assert stopped or len(completion.tokens) == 17
    engine.shutdown()


def test_two_runs_are_identical_and_other_seeds_differ() -> None:
    first, second = (run_all(make_engine(num_slots=4), 11) for _ in range(2))
    assert first == second
    assert len({completions[0].tokens for completions in first}) > 5


def test_a_session_is_the_same_alone_and_in_any_company() -> None:
    together = run_all(make_engine(batch_sizes=(1, 2, 4, 8)), 8)
    alone = run_all(make_engine(num_slots=1), 8)
    assert together == alone


def test_a_new_turn_costs_its_new_tokens_and_equal_contexts_cost_once() -> None:
    engine = make_engine(table(stop_logit=-50.0))
    prompt, answer = list(range(2, 12)) * 3, [3] * 10

    async def main() -> None:
        sampling = SamplingParams(temperature=0.0, max_new_tokens=6)
        await asyncio.gather(*(converse(engine, str(i), i, [prompt, answer], sampling) for i in range(8)))

    asyncio.run(main())
    work = engine.counters().work
    assert work.prefill_tokens == 29 + 10  # the last token of each context opens the first decode step
    assert work.shared_tokens == 7 * (29 + 10)
    assert work.decode_tokens == 8 * 2 * 6
    assert engine.counters().num_rounds == 2
    engine.shutdown()


def test_sessions_opened_together_share_one_round() -> None:
    engine = make_engine()
    run_all(engine, 8, num_turns=1)
    assert engine.counters().num_rounds == 1


def test_the_barrier_waits_for_every_open_session() -> None:
    engine = make_engine()

    async def main() -> None:
        quick, slow = await engine.open("quick", 0), await engine.open("slow", 1)
        task = asyncio.create_task(quick.generate([2, 3], SAMPLING))
        await asyncio.sleep(0.05)
        assert not task.done()
        assert engine.counters().num_rounds == 0
        slow.close()
        await asyncio.wait_for(task, 20)
        quick.close()

    asyncio.run(main())
    assert engine.counters().open_sessions == 0


def test_max_wait_starts_without_the_late() -> None:
    engine = make_engine(max_wait_s=0.02)

    async def main() -> None:
        quick, slow = await engine.open("quick", 0), await engine.open("slow", 1)
        first = await asyncio.wait_for(quick.generate([2, 3], SAMPLING), 20)
        second = await asyncio.wait_for(slow.generate([2, 3], SAMPLING), 20)
        assert first.tokens and second.tokens
        quick.close()
        slow.close()

    asyncio.run(main())
    assert engine.counters().num_rounds == 2


def test_rows_outside_a_round_are_frozen() -> None:
    engine = make_engine(num_slots=4, max_wait_s=0.01, batch_sizes=(4,))

    async def main() -> None:
        sessions = [await engine.open(str(i), i) for i in range(4)]
        await asyncio.gather(*(s.generate([2 + i, 4], SAMPLING) for i, s in enumerate(sessions)))
        before = jax.tree.map(np.array, engine._runner._full)
        await sessions[1].generate([5, 6, 7], SAMPLING)
        after = jax.tree.map(np.array, engine._runner._full)
        others = [s.row for s in sessions if s is not sessions[1]]
        np.testing.assert_array_equal(before["history"][:, others], after["history"][:, others])
        np.testing.assert_array_equal(before["hash"][others], after["hash"][others])
        assert after["length"][sessions[1].row] > before["length"][sessions[1].row]
        for session in sessions:
            session.close()

    asyncio.run(main())


def test_the_state_holds_exactly_the_context_but_its_last_token() -> None:
    engine = make_engine(num_slots=8, batch_sizes=(2, 4, 8), segment_steps=3)

    async def main() -> None:
        sessions = [await engine.open(str(i), i) for i in range(8)]
        for turn in range(3):
            await asyncio.gather(*(s.generate([2 + turn] * (3 + i), SAMPLING) for i, s in enumerate(sessions)))
        state = jax.tree.map(np.array, engine._runner._full)
        for session in sessions:
            n = len(session.tokens) - 1
            assert state["length"][session.row] == n
            assert state["history"][0, session.row, :n].tolist() == session.tokens[:-1]
            session.close()

    asyncio.run(main())


def test_open_waits_in_order_and_slots_are_reused() -> None:
    engine = make_engine(num_slots=2)

    async def main() -> None:
        order: list[str] = []

        async def visit(name: str) -> None:
            session = await engine.open(name, 0)
            order.append(name)
            await session.generate([2, 3, 4], SAMPLING)
            session.close()

        await asyncio.gather(*(visit(name) for name in "fdbeca"))
        assert order == list("fdbeca")

    asyncio.run(main())
    counters = engine.counters()
    assert counters.peak_open_sessions == 2
    assert counters.num_completions == 6
    assert counters.num_rounds == 3


def test_a_cancelled_wait_leaves_the_queue() -> None:
    engine = make_engine(num_slots=1)

    async def main() -> None:
        first = await engine.open("a", 0)
        waiting = [asyncio.create_task(engine.open(name, 0)) for name in "bcd"]
        await asyncio.sleep(0)
        waiting[0].cancel()
        first.close()
        waiting[1].cancel()  # granted already, cancelled before it could notice
        last = await asyncio.wait_for(waiting[2], 5)
        assert engine.counters().open_sessions == 1
        assert engine.counters().waiting_sessions == 0
        last.close()

    asyncio.run(main())


def test_rows_grow_with_the_longest_session_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(first: int) -> tuple[list[list[Completion]], list[int]]:
        monkeypatch.setattr("swerve.engine.rounds.FIRST_CAPACITY", first)
        engine = make_engine(table(stop_logit=-50.0), context_length=100, batch_sizes=(2, 4, 8), segment_steps=5)
        played = run_all(engine, 8)
        capacities = sorted(engine._programs)
        engine.shutdown()
        return played, capacities

    small, grown = play(first=20)
    whole, fixed = play(first=200)
    assert grown == [20, 80, 100]  # doubled until the round fits, and never longer than the context
    assert fixed == [100]
    assert small == whole
    assert any(one.finish_reason is FinishReason.CONTEXT for episode in small for one in episode)


def test_the_context_fills() -> None:
    engine = make_engine(table(stop_logit=-50.0), context_length=12)

    async def main() -> None:
        session = await engine.open("a", 0)
        full = await session.generate([2] * 7, SamplingParams(max_new_tokens=50))
        assert (len(full.tokens), full.finish_reason) == (5, FinishReason.CONTEXT)
        more = await session.generate([3], SAMPLING)
        assert (more.tokens, more.finish_reason) == ((), FinishReason.CONTEXT)
        session.close()
        long = await engine.open("b", 0)
        assert (await long.generate([2] * 30, SAMPLING)).finish_reason is FinishReason.CONTEXT
        long.close()

    asyncio.run(main())


def test_stopping_in_the_last_place_is_a_stop() -> None:
    engine = make_engine(table(stop_logit=50.0), context_length=4)
    completion = asyncio.run(converse(engine, "a", 0, [[2, 3, 4]]))[0]
    assert (completion.tokens, completion.finish_reason) == ((STOP,), FinishReason.STOP)


class SlowModel(HashModel):
    """Sleeps in every step, and can be made to fail."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.failing = threading.Event()

    def logits(self, params: Any, config: Any, hidden: Any) -> Any:
        def pause(values: np.ndarray) -> np.ndarray:
            time.sleep(self.seconds)
            if self.failing.is_set():
                raise RuntimeError("the device is on fire")
            return np.asarray(values)

        logits = super().logits(params, config, hidden)
        return jax.pure_callback(pause, jax.ShapeDtypeStruct(logits.shape, logits.dtype), logits)


def test_an_abort_returns_what_was_generated() -> None:
    engine = make_engine(table(stop_logit=-50.0), model=SlowModel(0.01), segment_steps=4, num_slots=2)
    engine.warmup([2])
    endless = SamplingParams(max_new_tokens=180)

    async def main() -> None:
        a, b = await engine.open("a", 0), await engine.open("b", 1)
        tasks = [asyncio.create_task(s.generate([2, 3], endless)) for s in (a, b)]
        while engine._round is None:
            await asyncio.sleep(0.01)
        ticks = 0
        until = time.monotonic() + 0.2
        while time.monotonic() < until:  # the loop lives while the device works
            await asyncio.sleep(0.005)
            ticks += 1
        assert ticks > 10
        a.abort()
        b.close()
        first, second = await asyncio.gather(*tasks)
        for completion in (first, second):
            assert completion.finish_reason is FinishReason.ABORT
            assert 0 < len(completion.tokens) < 180
            assert len(completion.logprobs) == len(completion.tokens)
        again = await a.generate([4], SamplingParams(max_new_tokens=3))
        assert len(again.tokens) == 3
        a.close()

    asyncio.run(main())
    assert engine.counters().num_aborted == 2
    assert engine.counters().open_sessions == 0
    engine.shutdown()


def test_an_abort_before_the_round_returns_nothing() -> None:
    engine = make_engine()

    async def main() -> None:
        a, b = await engine.open("a", 0), await engine.open("b", 1)
        task = asyncio.create_task(a.generate([2], SAMPLING))
        await asyncio.sleep(0.01)
        a.abort()
        completion = await task
        assert (completion.tokens, completion.finish_reason) == ((), FinishReason.ABORT)
        a.close()
        b.close()

    asyncio.run(main())


def test_a_cancelled_generate_frees_its_slot_when_the_round_ends() -> None:
    engine = make_engine(table(stop_logit=-50.0), model=SlowModel(0.01), segment_steps=4, num_slots=1)

    async def main() -> None:
        task = asyncio.create_task(converse(engine, "a", 0, [[2, 3]], SamplingParams(max_new_tokens=180)))
        while engine._round is None:
            await asyncio.sleep(0.01)
        task.cancel()
        after = await asyncio.wait_for(converse(engine, "b", 0, [[2]], SamplingParams(max_new_tokens=2)), 20)
        assert len(after[0].tokens) == 2
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    engine.shutdown()


@pytest.mark.filterwarnings("ignore")
def test_a_failed_round_reaches_everybody_within_a_second() -> None:
    model = SlowModel(0.0)
    engine = make_engine(model=model, num_slots=2)

    async def main() -> None:
        model.failing.set()
        tasks = [asyncio.create_task(converse(engine, name, 0, [[2, 3]])) for name in "abc"]
        started = time.monotonic()
        while engine._failure is None:
            await asyncio.sleep(0.01)
            assert time.monotonic() - started < 20
        started = time.monotonic()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert time.monotonic() - started < 1
        for result in results:
            assert isinstance(result, EngineError)
            assert "on fire" in str(result)
            assert result.__cause__ is not None
        with pytest.raises(EngineError, match="on fire"):
            await engine.open("d", 0)

    asyncio.run(main())
    engine.shutdown()


def test_refit_serves_the_new_weights_like_a_cold_engine() -> None:
    a, b = table(1), table(2)
    engine = make_engine(a)
    prompt = [2, 5, 3, 7, 4]
    before = engine.probe(prompt)
    engine.refit(b, 1)
    middle = engine.probe(prompt)
    engine.refit(a, 2)
    np.testing.assert_array_equal(before, engine.probe(prompt))
    np.testing.assert_array_equal(middle, make_engine(b).probe(prompt))
    assert (before != middle).any()
    np.testing.assert_allclose(before, [0.0, *expected_logprobs(a, prompt[:1], prompt[1:], 1.0)], atol=1e-5)


def test_completions_carry_the_version_of_their_weights() -> None:
    engine = make_engine(table(1), weights_version=4)
    cold = make_engine(table(2), weights_version=5)
    first = run_all(engine, 2, num_turns=1)
    engine.refit(table(2), 5)
    second = run_all(engine, 2, num_turns=1)
    assert {c[0].weights_version for c in first} == {4}
    assert {c[0].weights_version for c in second} == {5}
    assert second == run_all(cold, 2, num_turns=1)
    assert first[0][0].logprobs != second[0][0].logprobs


def test_refit_beside_open_sessions_consumes_their_context_anew() -> None:
    old, new = table(1), table(2)
    engine = make_engine(old)

    async def main() -> None:
        session = await engine.open("a", 3)
        first = await session.generate([2, 3, 4], SAMPLING)
        with pytest.raises(RefitError, match="1 sessions are open"):
            engine.refit(new, 1)
        assert engine.weights_version == 0
        engine.refit(new, 1, allow_open=True)
        context = [*session.tokens, 5]
        fed = engine.counters().work.prefill_tokens
        second = await session.generate([5], SAMPLING)
        assert engine.counters().work.prefill_tokens - fed == len(context) - 1
        assert (first.weights_version, second.weights_version) == (0, 1)
        expected = expected_logprobs(new, context, list(second.tokens), 1.0)
        np.testing.assert_allclose(second.logprobs, expected, atol=1e-5)
        session.close()

    asyncio.run(main())


def test_wrong_weights_are_refused_and_the_old_ones_stay() -> None:
    engine = make_engine(table(1))
    good = np.asarray(table(2)["table"])
    bad = good.copy()
    bad[3, 3] = np.nan
    before = engine.probe([2, 3])
    for params, version, match in (
        ({"table": good}, 0, "greater"),
        ({"table": bad}, 1, "not finite"),
        ({"table": good[:5]}, 1, "table"),
        ({"table": good.astype(np.float16)}, 1, "float16"),
        ({"other": good}, 1, "other"),
    ):
        with pytest.raises(RefitError, match=match):
            engine.refit(params, version)
    assert engine.weights_version == 0
    np.testing.assert_array_equal(before, engine.probe([2, 3]))


def test_the_engine_keeps_a_copy_of_its_weights() -> None:
    params = table(1)
    engine = make_engine(params)
    before = engine.probe([2, 3])
    jax.jit(lambda x: jax.tree.map(lambda y: y + 1, x), donate_argnums=0)(params)
    np.testing.assert_array_equal(before, engine.probe([2, 3]))


def test_the_same_engine_serves_several_event_loops() -> None:
    engine = make_engine()
    assert run_all(engine, 3) == run_all(engine, 3)


def test_wrong_calls_say_so() -> None:
    engine = make_engine()

    async def main() -> None:
        session = await engine.open("a", 0)
        for tokens, sampling, match in (
            ([], SAMPLING, "no tokens"),
            ([12], SAMPLING, "vocabulary"),
            ([2], SamplingParams(temperature=-1.0), "temperature"),
            ([2], SamplingParams(top_p=0.0), "top_p"),
            ([2], SamplingParams(max_new_tokens=0), "max_new_tokens"),
        ):
            with pytest.raises(SwerveError, match=match):
                await session.generate(tokens, sampling)
        with pytest.raises(SwerveError, match="already open"):
            await engine.open("a", 0)
        session.close()
        session.close()
        with pytest.raises(SwerveError, match="closed"):
            await session.generate([2], SAMPLING)

    asyncio.run(main())
    engine.shutdown()
    with pytest.raises(EngineError, match="shut down"):
        asyncio.run(engine.open("b", 0))


def test_warmup_compiles_all_that_a_round_needs() -> None:
    engine = make_engine(batch_sizes=(2, 8))
    engine.warmup()
    run_all(engine, 8)
    names = set(engine.compile_seconds)
    assert engine.counters().work.compile_s < 0.05
    assert {"decode[8]", "decode[2]", "feed[8x16]", "feed[2x16]", "take[2]", "put[2]"} <= names


def test_counters_add_up() -> None:
    engine = make_engine()
    completions = run_all(engine, 8)
    work = engine.counters().work
    assert work.decode_tokens == sum(len(c.tokens) for cs in completions for c in cs)
    assert work.decode_slots >= work.decode_tokens
    assert work.prefill_slots >= work.prefill_tokens
    assert 0 <= work.host_s <= work.round_s
