"""The remote engine's sessions, faults and refits, against a small server that speaks vLLM's HTTP."""

from __future__ import annotations

import asyncio
import itertools
import os
import shlex
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from swerve.config.schema import Engine
from swerve.engine import EngineError, RefitError, VllmEngine
from swerve.engine.remote import VllmSession
from swerve.types import Completion, FinishReason, SamplingParams, SwerveError
from swerve.weights import WeightsError, WeightsPublisher

from .stand_in_server import STOP, StandIn, logprobs, save, serving, table

PROMPT = (2, 3, 4, 5)
SHARP = SamplingParams(temperature=0.5, max_new_tokens=30)


def make_engine(tmp_path: Path, *servers: StandIn, urls: tuple[str, ...] = (), **settings: Any) -> VllmEngine:
    section = Engine(
        kind="vllm",
        urls=urls or tuple(server.url for server in servers),
        weights_directory=str(tmp_path / "weights"),
        request_timeout_s=settings.pop("request_timeout_s", 5.0),
        **settings,
    )
    engine = VllmEngine(
        section,
        save,
        {"table": table(0)},
        num_slots=8,
        context_length=64,
        end_of_turn_id=STOP,
        sample_tokens=PROMPT,
    )
    return engine


@pytest.fixture
def server():
    with serving() as one:
        yield one


@pytest.fixture
def engine(server, tmp_path):
    one = make_engine(tmp_path, server)
    one.warmup()
    yield one
    one.shutdown()


async def say(engine: VllmEngine, *turns: tuple[int, ...], sampling: SamplingParams = SHARP, seed: int = 7) -> Any:
    """A conversation, turn by turn; completions, and the session, closed."""
    session = await engine.open("one", seed)
    try:
        return [await session.generate(turn, sampling) for turn in turns], session
    finally:
        session.close()


def expected(weights: np.ndarray, before: int, completion: Completion, temperature: float) -> list[float]:
    """Log-probabilities of a completion's tokens."""
    lasts = [before, *completion.tokens]
    return [float(logprobs(weights, last, temperature)[token]) for last, token in itertools.pairwise(lasts)]


# --------------------------------------------------------------------------------------------------------- tokens


def test_tokens_come_with_log_probabilities_of_what_they_were_drawn_from(engine, server):
    turns = asyncio.run(say(engine, PROMPT, (6, 7), (8,)))[0]
    assert [turn.weights_version for turn in turns] == [0, 0, 0]
    for before, turn in zip((5, 7, 8), turns, strict=True):
        assert turn.tokens
        np.testing.assert_allclose(turn.logprobs, expected(server.weights, before, turn, 0.5), atol=1e-6)


def test_a_turn_sends_the_whole_conversation_in_tokens(engine, server):
    (first, _), session = asyncio.run(say(engine, PROMPT, (6, 7)))
    bodies = [body for body in server.bodies if body.get("stream")]
    assert bodies[0]["token_ids"] == list(PROMPT)
    assert bodies[1]["token_ids"] == [*PROMPT, *first.tokens, 6, 7]
    assert session.tokens[: len(PROMPT)] == list(PROMPT)
    assert bodies[0]["sampling_params"]["seed"] != bodies[1]["sampling_params"]["seed"]
    settings = bodies[0]["sampling_params"]
    assert (settings["top_p"], settings["top_k"], settings["repetition_penalty"]) == (1.0, 0, 1.0)
    assert settings["ignore_eos"] and settings["stop_token_ids"] == [STOP]


def test_a_seed_says_what_is_drawn_and_reasons_say_why_it_ended(engine):
    long = SamplingParams(temperature=1.0, max_new_tokens=60)
    results = [asyncio.run(say(engine, PROMPT, sampling=long, seed=seed))[0][0] for seed in (1, 1, 2, 3, 4, 5)]
    assert results[0] == results[1] and len({one.tokens for one in results}) == 5
    stopped = next(one for one in results if one.finish_reason is FinishReason.STOP)
    assert stopped.tokens[-1] == STOP and STOP not in stopped.tokens[:-1]
    short = SamplingParams(temperature=0.5, max_new_tokens=1)
    assert asyncio.run(say(engine, PROMPT, sampling=short, seed=2))[0][0].finish_reason is FinishReason.LENGTH
    full, none = asyncio.run(say(engine, (2,) * 63, (3,), sampling=long, seed=2))[0]
    assert (full.finish_reason, len(full.tokens)) == (FinishReason.CONTEXT, 1)
    assert (none.finish_reason, none.tokens) == (FinishReason.CONTEXT, ())


def test_an_abort_returns_what_was_generated(engine, server):
    server.faults.add("slow")

    async def converse() -> tuple[Completion, VllmSession]:
        session = await engine.open("one", 2)
        asyncio.get_running_loop().call_later(0.4, session.abort)
        completion = await session.generate((2,), SamplingParams(temperature=0.5, max_new_tokens=60))
        assert session.tokens == [2, *completion.tokens]
        session.close()
        return completion, session

    completion, _ = asyncio.run(converse())
    assert completion.finish_reason is FinishReason.ABORT
    assert 0 < len(completion.tokens) < 10
    np.testing.assert_allclose(completion.logprobs, expected(server.weights, 2, completion, 0.5), atol=1e-6)
    assert server.hung_up.wait(5)


def test_an_episode_that_is_cancelled_stays_cancelled(engine, server):
    server.faults.add("hangs")

    async def converse() -> None:
        task = asyncio.create_task(say(engine, (2,), sampling=SamplingParams(temperature=0.5, max_new_tokens=60)))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(converse())
    engine.refit({"table": table(1)}, 1)  # no session is left open


# --------------------------------------------------------------------------------------------------------- faults


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("cuts", "/inference/v1/generate"),
        ("hangs", "not a word in 0.3 s"),
        ("swaps", "log-probabilities are not those of the tokens"),
        ("omits", "comes without a log-probability"),
    ],
)
def test_a_server_that_fails_is_named(server, tmp_path, fault, message):
    engine = make_engine(tmp_path, server, request_timeout_s=0.3)
    engine.warmup()
    server.faults.add(fault)
    began = time.monotonic()
    with pytest.raises(EngineError, match=message) as caught:
        asyncio.run(say(engine, PROMPT))
    assert server.url in str(caught.value)
    assert time.monotonic() - began < 3
    server.faults.clear()
    assert asyncio.run(say(engine, PROMPT))[0][0].tokens


def test_a_dead_server_is_told_at_once_and_gets_no_more_sessions(tmp_path):
    with serving() as alive:
        with serving() as dead:
            engine = make_engine(tmp_path, dead, alive)
            engine.warmup()

        async def converse() -> list[str]:
            with pytest.raises(EngineError, match=f"{dead.url}: .*refused"):
                await say(engine, PROMPT)
            sessions = [await engine.open(f"s{index}", index) for index in range(3)]
            urls = [session.url for session in sessions]
            for session in sessions:
                session.close()
            return urls

        began = time.monotonic()
        assert asyncio.run(converse()) == [alive.url] * 3
        assert time.monotonic() - began < 2
        with pytest.raises(EngineError, match=dead.url):
            engine.refit({"table": table(1)}, 1)


def test_sessions_are_spread_and_each_keeps_to_its_server(tmp_path):
    with serving() as left, serving() as right:
        engine = make_engine(tmp_path, left, right)
        engine.warmup()

        async def converse() -> None:
            sessions = [await engine.open(f"s{index}", index) for index in range(4)]
            assert [session.url for session in sessions] == [left.url, right.url] * 2
            for turn in ((2, 3), (4,)):
                await asyncio.gather(*(session.generate(turn, SHARP) for session in sessions))
            for session in sessions:
                session.close()
                session.close()

        asyncio.run(converse())
        for server in (left, right):
            assert sum(bool(body.get("stream")) for body in server.bodies) == 4


def test_sessions_wait_for_a_place(engine):
    async def converse() -> None:
        sessions = [await engine.open(f"s{index}", index) for index in range(8)]
        ninth = asyncio.create_task(engine.open("s8", 8))
        await asyncio.sleep(0.05)
        assert not ninth.done()
        with pytest.raises(SwerveError, match="no tokens to continue from"):
            await sessions[0].generate((), SHARP)
        sessions[0].close()
        (await ninth).close()
        with pytest.raises(SwerveError, match="s1 is already open"):
            await engine.open("s1", 1)
        for session in sessions:
            session.close()
        with pytest.raises(SwerveError, match="s1 is closed"):
            await sessions[1].generate(PROMPT, SHARP)

    asyncio.run(converse())


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raw", "start it with --logprobs-mode processed_logprobs"),
        ("old", "404.*VLLM_SERVER_DEV_MODE=1"),
        ("narrow", "404.*--enable-scale-out"),
    ],
)
def test_a_server_that_cannot_serve_is_refused_with_the_remedy(server, tmp_path, fault, message):
    server.faults.add(fault)
    with pytest.raises(SwerveError, match=message):
        make_engine(tmp_path, server).warmup()


def test_a_server_of_another_model_or_a_shorter_context_is_refused(tmp_path):
    with serving(max_model_len=63) as short:
        with pytest.raises(SwerveError, match=r"rollout\.context_length = 64: .* holds 63 tokens"):
            make_engine(tmp_path, short).warmup()
        with pytest.raises(SwerveError, match=r'engine\.model = "big": .* serves tiny'):
            make_engine(tmp_path, short, model="big").warmup()


# -------------------------------------------------------------------------------------------------------- weights


def score(weights: np.ndarray, tokens: Any) -> np.ndarray:
    pairs = itertools.pairwise(tokens)
    return np.array([0.0, *(logprobs(weights, last)[token] for last, token in pairs)], np.float32)


class Meant:
    """Weights that an engine is meant to serve, and the publisher that holds it to them."""

    def __init__(self, engine: VllmEngine, tolerance: float = 1e-4) -> None:
        self.weights = table(0)
        self.publisher = WeightsPublisher(
            engine,
            score=lambda tokens: score(self.weights, tokens),
            probe_tokens=PROMPT,
            tolerance=tolerance,
            digests=False,
        )

    def publish(self, seed: int, number: int) -> None:
        self.weights = table(seed)
        self.publisher.publish({"table": self.weights}, number)


def test_a_refit_is_served_under_its_own_name(server, tmp_path):
    engine = make_engine(tmp_path, server)
    engine.warmup()
    before = asyncio.run(say(engine, PROMPT))[0][0]
    server.calls.clear()
    engine.refit({"table": table(1)}, 1)
    assert [call.partition("?")[0] for call in server.calls] == [
        "/pause",
        "/collective_rpc",
        "/reset_prefix_cache",
        "/update_weight_version",
        "/weight_info",
        "/resume",
    ]
    after = asyncio.run(say(engine, PROMPT))[0][0]
    assert (before.weights_version, after.weights_version) == (0, 1)
    np.testing.assert_allclose(after.logprobs, expected(table(1), 5, after, 0.5), atol=1e-6)
    salts = [body["cache_salt"] for body in server.bodies if body.get("stream")]
    assert len(set(salts)) == 2
    assert [path.name for path in (tmp_path / "weights").iterdir()] == [f"version_{engine.label}"]
    engine.shutdown()
    assert list((tmp_path / "weights").iterdir()) == []


def test_versions_rise_and_sessions_are_closed_before_a_refit(engine):
    async def refit_too_early() -> None:
        session = await engine.open("one", 1)
        with pytest.raises(RefitError, match="1 sessions are open"):
            engine.refit({"table": table(1)}, 1)
        session.close()

    asyncio.run(refit_too_early())
    with pytest.raises(RefitError, match="must be greater than the present 0"):
        engine.refit({"table": table(1)}, 0)


def test_a_reload_that_fails_is_loud(engine, server, tmp_path):
    server.faults.add("fails")
    with pytest.raises(EngineError, match=f"{server.url}: /collective_rpc answers 500: no memory"):
        engine.refit({"table": table(1)}, 1)
    assert engine.weights_version == 0
    engine.shutdown()
    assert list((tmp_path / "weights").iterdir()) == []


@pytest.mark.parametrize(
    ("tolerance", "message"), [(1e-4, "it serves other weights"), (99.0, "it serves the old ones")]
)
def test_a_reload_that_changes_nothing_is_caught_however_wide_the_tolerance(engine, server, tolerance, message):
    meant = Meant(engine, tolerance)
    for number, seed in enumerate((1, 0, 1), 1):
        meant.publish(seed, number)
    server.faults.add("keeps")
    with pytest.raises(WeightsError, match=message):
        meant.publish(2, 4)


def test_servers_that_differ_are_caught(tmp_path):
    with serving() as left, serving() as right:
        engine = make_engine(tmp_path, left, right)
        engine.warmup()
        right.faults.add("keeps")
        engine.refit({"table": table(1)}, 1)
        with pytest.raises(EngineError, match=f"{right.url} and {left.url} answer the probe differently"):
            engine.probe(PROMPT)


def test_a_server_that_was_started_anew_is_caught(engine, server):
    server.label = "default"
    with pytest.raises(EngineError, match=r"sampled with weights default, not 0-.*started anew"):
        asyncio.run(say(engine, PROMPT))


# --------------------------------------------------------------------------------------- servers started here

COMMAND = f"{sys.executable} {Path(__file__).with_name('stand_in_server.py')} {{weights}} {{port}}"


@pytest.fixture
def url():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_a_server_is_started_on_each_version_and_nothing_is_left(tmp_path, url):
    engine = make_engine(tmp_path, urls=(url,), command=COMMAND, refit="restart")
    try:
        engine.warmup()
        np.testing.assert_allclose(engine.probe(PROMPT), score(table(0), PROMPT), atol=1e-6)
        engine.refit({"table": table(1)}, 1)
        np.testing.assert_allclose(engine.probe(PROMPT), score(table(1), PROMPT), atol=1e-6)
        assert asyncio.run(say(engine, PROMPT))[0][0].weights_version == 1
        with pytest.raises(SwerveError, match="something answers there already"):
            make_engine(tmp_path, urls=(url,), command=COMMAND).warmup()
        (process,) = [one._process for one in engine._processes.values()]
        assert process is not None
    finally:
        engine.shutdown()
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)


def test_a_server_that_ends_at_once_says_why(tmp_path, url):
    command = shlex.join([sys.executable, "-c", "import sys; sys.exit('no such device')", "{weights}", "{port}"])
    engine = make_engine(tmp_path, urls=(url,), command=command)
    with pytest.raises(EngineError, match=f"{url}: the server ended: no such device"):
        engine.warmup()
    engine.shutdown()
