"""A model small enough for tests that still has every part: blocks, grouped heads, partial rotary, shared expert."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from swerve import models

CONFIG = models.Qwen35MoeConfig(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=4,
    full_attention_interval=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    partial_rotary_factor=0.5,
    rope_theta=100.0,
    linear_num_key_heads=1,
    linear_num_value_heads=2,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    shared_expert_intermediate_size=12,
)
FAST = models.Execution(attention_block=8, delta_chunk=4, expert_block=8, logprob_chunk=16)
SLOW = models.Execution(attention="naive", delta="recurrent", experts="dense", layers="unroll", logprob_chunk=1024)


@functools.cache
def make_params(tied: bool = False) -> Any:
    """Random parameters, nothing at a special value."""
    config = dataclasses.replace(CONFIG, tie_word_embeddings=tied)
    shapes = jax.eval_shape(lambda: models.initialise(config, jax.random.key(0)))
    rng = np.random.default_rng(0)

    def values(path: Any, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        name = path[-1].key
        if name in ("embedding", "head"):
            scale = 1.0
        elif "norm" in name or name in ("dt_bias", "A_log"):
            scale = 0.3
        else:
            scale = 2 / np.sqrt(shape.shape[-2])
        return (scale * rng.standard_normal(shape.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(values, shapes)


def pack(sequences: Sequence[Sequence[np.ndarray]], time: int, left: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rows of sequences as tokens, segment ids and positions, with `left` places of padding before."""
    tokens, segments, positions = (np.zeros((len(sequences), time), np.int32) for _ in range(3))
    for row, parts in enumerate(sequences):
        at = left
        for number, part in enumerate(parts, 1):
            here = slice(at, at + len(part))
            tokens[row, here], segments[row, here], positions[row, here] = part, number, np.arange(len(part))
            at += len(part)
    return jnp.asarray(tokens), jnp.asarray(segments), jnp.asarray(positions)


def draw(rng: np.random.Generator, *lengths: int) -> list[np.ndarray]:
    """Random sequences of these lengths."""
    return [rng.integers(1, CONFIG.vocab_size, n) for n in lengths]


@functools.partial(jax.jit, static_argnames=("execution", "config"))
def forward(
    params: Any,
    tokens: jax.Array,
    segments: jax.Array,
    positions: jax.Array,
    routing: jax.Array | None = None,
    execution: models.Execution = FAST,
    config: models.Qwen35MoeConfig = CONFIG,
) -> jax.Array:
    """Hidden states of packed rows."""
    return models.forward(params, config, tokens, segments, positions, routing=routing, execution=execution).hidden


@functools.partial(jax.jit, static_argnames=("execution", "config"))
def scores(
    params: Any,
    tokens: jax.Array,
    segments: jax.Array,
    positions: jax.Array,
    temperature: float = 1.0,
    execution: models.Execution = FAST,
    config: models.Qwen35MoeConfig = CONFIG,
) -> tuple[jax.Array, jax.Array]:
    """Log-probabilities and entropies of packed rows."""
    hidden = forward(params, tokens, segments, positions, execution=execution, config=config)
    return models.token_logprobs(params, config, hidden, tokens, segments, temperature, execution=execution)


@functools.partial(jax.jit, static_argnames=("execution", "config"))
def gradients(
    params: Any,
    tokens: jax.Array,
    segments: jax.Array,
    positions: jax.Array,
    weights: jax.Array,
    execution: models.Execution = FAST,
    config: models.Qwen35MoeConfig = CONFIG,
) -> Any:
    """Gradient of a weighted sum of log-probabilities and entropies."""

    def loss(params: Any) -> jax.Array:
        lp, entropy = scores(params, tokens, segments, positions, 0.7, execution, config)
        return (weights * lp + 0.3 * weights**2 * entropy).sum()

    return jax.grad(loss)(params)


def assert_close(found: Any, expected: Any, rtol: float = 2e-5) -> None:
    """Leaves agree within `rtol` of the expected leaf's largest entry."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * float(np.abs(b).max()) + 1e-7)
