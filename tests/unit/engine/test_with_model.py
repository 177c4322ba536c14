"""The engine on the real model, small: what it samples is what the training forward pass would say."""

from __future__ import annotations

import asyncio
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swerve import models
from swerve.engine import EmbeddedEngine
from swerve.types import Completion, SamplingParams

CONFIG = models.Qwen35MoeConfig(
    vocab_size=40,
    hidden_size=32,
    num_hidden_layers=2,
    full_attention_interval=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    partial_rotary_factor=0.5,
    rope_theta=10_000.0,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=16,
    shared_expert_intermediate_size=16,
    initializer_range=0.5,
)
CONTEXT, STOP, PAD = 128, 1, 0
TEMPERATURE = 0.8
SAMPLING = SamplingParams(temperature=TEMPERATURE, max_new_tokens=12)


@pytest.fixture(scope="module")
def params() -> Any:
    return models.initialise(CONFIG, jax.random.key(0))


@pytest.fixture(scope="module")
def engine(params: Any) -> EmbeddedEngine:
    """Two batch sizes, so that rounds move rows about."""
    return make_engine(params, batch_sizes=(4, 8))


@pytest.fixture(scope="module")
def single_size(params: Any) -> EmbeddedEngine:
    return make_engine(params, batch_sizes=(8,))


def make_engine(params: Any, **options: Any) -> EmbeddedEngine:
    return EmbeddedEngine(
        CONFIG, params, num_slots=8, context_length=CONTEXT, end_of_turn_id=STOP, pad_id=PAD, segment_steps=5, **options
    )


def prompts(i: int) -> list[list[int]]:
    rng = np.random.default_rng(i // 2)  # neighbours share their first prompt
    own = np.random.default_rng(100 + i)
    return [
        rng.integers(2, 40, 9 + 5 * (i // 2)).tolist(),
        own.integers(2, 40, 6 + i).tolist(),
        own.integers(2, 40, 1).tolist(),
    ]


def run(engine: EmbeddedEngine, members: list[int]) -> dict[int, tuple[list[int], list[Completion]]]:
    async def episode(i: int) -> tuple[list[int], list[Completion]]:
        session = await engine.open(f"{i:02d}", 7 * i)
        completions = [await session.generate(prompt, SAMPLING) for prompt in prompts(i)]
        session.close()
        return session.tokens, completions

    async def main() -> list[tuple[list[int], list[Completion]]]:
        return await asyncio.gather(*(episode(i) for i in members))

    return dict(zip(members, asyncio.run(main()), strict=True))


def test_turns_with_kept_state_equal_one_long_forward_pass(engine: EmbeddedEngine, params: Any) -> None:
    score = jax.jit(_score)
    for i, (tokens, completions) in run(engine, list(range(8))).items():
        expected = np.asarray(score(params, padded(tokens), np.int32(len(tokens)), TEMPERATURE))
        at = 0
        for prompt, completion in zip(prompts(i), completions, strict=True):
            at += len(prompt)
            n = len(completion.tokens)
            assert tokens[at : at + n] == list(completion.tokens)
            np.testing.assert_allclose(completion.logprobs, expected[at : at + n], atol=1e-4)
            at += n
        assert at == len(tokens)


def padded(tokens: list[int]) -> np.ndarray:
    return np.pad(np.asarray(tokens, np.int32), (0, CONTEXT - len(tokens)))


def _score(params: Any, tokens: jax.Array, num_tokens: jax.Array, temperature: jax.Array) -> jax.Array:
    places = jnp.arange(CONTEXT, dtype=jnp.int32)[None]
    segments = (places < num_tokens).astype(jnp.int32)
    hidden = models.forward(params, CONFIG, tokens[None], segments, places * segments).hidden
    return models.token_logprobs(params, CONFIG, hidden, tokens[None], segments, temperature)[0][0]


def test_runs_repeat_bit_for_bit(engine: EmbeddedEngine) -> None:
    assert run(engine, list(range(8))) == run(engine, list(range(8)))


def test_company_changes_nothing_where_shapes_are_equal(single_size: EmbeddedEngine) -> None:
    together = run(single_size, list(range(8)))
    for i in (0, 3, 6):
        assert run(single_size, [i])[i] == together[i]


def test_company_changes_no_more_than_round_off_where_shapes_differ(engine: EmbeddedEngine) -> None:
    together = run(engine, list(range(8)))
    for i in (0, 3, 6):
        tokens, alone = run(engine, [i])[i]
        assert tokens == together[i][0]
        for one, other in zip(alone, together[i][1], strict=True):
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)


def test_idle_rows_keep_every_bit(params: Any) -> None:
    engine = make_engine(params, batch_sizes=(8,), max_wait_s=0.01)

    async def main() -> None:
        sessions = [await engine.open(str(i), i) for i in range(3)]
        await asyncio.gather(*(s.generate(prompts(i)[0], SAMPLING) for i, s in enumerate(sessions)))
        before = jax.tree.map(np.array, engine._runner._full)
        await sessions[1].generate(prompts(1)[1], SAMPLING)
        after = jax.tree.map(np.array, engine._runner._full)
        for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
            for i in (0, 2):
                np.testing.assert_array_equal(a[sessions[i].row], b[sessions[i].row])
        assert after.lengths[sessions[1].row] > before.lengths[sessions[1].row]
        for session in sessions:
            session.close()

    asyncio.run(main())


def test_a_refit_answers_like_a_cold_engine(single_size: EmbeddedEngine, params: Any) -> None:
    others = models.initialise(CONFIG, jax.random.key(1))
    cold = make_engine(others, batch_sizes=(8,), weights_version=1)
    before = run(single_size, [0, 1])
    probe = single_size.probe(prompts(0)[0])
    single_size.refit(others, 1)
    after = run(single_size, [0, 1])
    assert after == run(cold, [0, 1])
    assert after != before
    np.testing.assert_array_equal(single_size.probe(prompts(0)[0]), cold.probe(prompts(0)[0]))
    single_size.refit(params, 2)
    np.testing.assert_array_equal(single_size.probe(prompts(0)[0]), probe)
    again = run(single_size, [0, 1])
    assert [c.logprobs for _, cs in again.values() for c in cs] == [c.logprobs for _, cs in before.values() for c in cs]


def test_the_probe_equals_the_forward_pass(engine: EmbeddedEngine, params: Any) -> None:
    tokens = prompts(4)[0]
    expected = np.asarray(jax.jit(_score)(params, padded(tokens), np.int32(len(tokens)), 1.0))
    np.testing.assert_allclose(engine.probe(tokens), expected[: len(tokens)], atol=1e-4)
