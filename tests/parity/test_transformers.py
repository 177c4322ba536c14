"""Our model against `transformers`' own: logits, log-probs, left padding, cached decoding, gradients.

The golden files are made by `make_goldens.py`.
"""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swerve import models
from swerve.models.hf import to_hf_tensors

from .sketch import sketch

GOLDENS = Path(__file__).resolve().parent / "goldens"
CASES = ("untied", "tied")
EXECUTION = models.Execution(attention_block=16, delta_chunk=8, expert_block=8)


@functools.cache
def load(case: str) -> tuple[models.Qwen35MoeConfig, Any, dict[str, np.ndarray]]:
    config, params = models.load_hf(GOLDENS / case)
    with np.load(GOLDENS / case / "expected.npz") as golden:
        return config, params, dict(golden)


def difference(found: Any, expected: np.ndarray) -> float:
    """Largest difference, relative to the largest entry."""
    return float(np.abs(np.asarray(found) - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_agree(case: str) -> None:
    config, params, golden = load(case)
    tokens = jnp.asarray(golden["tokens"])
    segments, positions = jnp.ones_like(tokens), jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)

    def loss(params: Any) -> tuple[jax.Array, jax.Array]:
        hidden = models.forward(params, config, tokens, segments, positions, execution=EXECUTION).hidden
        lp, _ = models.token_logprobs(params, config, hidden, tokens, segments, execution=EXECUTION)
        return -lp[:, 1:].mean(), models.logits(params, config, hidden)

    (value, logits), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    assert difference(logits, golden["logits"]) < 1e-4
    assert abs(float(value) - float(golden["loss"])) < 1e-5
    named = to_hf_tensors(config, gradient)
    checked = 0
    for name, expected in golden.items():
        if name.startswith("gradient."):
            found = sketch(named[name.removeprefix("gradient.")])
            assert difference(found, expected) < 3e-4, name
            checked += 1
    assert checked == len(named)


@pytest.mark.parametrize("case", CASES)
def test_left_padding_and_cached_decoding_agree(case: str) -> None:
    config, params, golden = load(case)
    tokens = golden["tokens"]
    rows, time = tokens.shape
    padded = jnp.asarray(np.pad(tokens, ((0, 0), (7, 0))))
    segments = jnp.asarray(np.pad(np.ones_like(tokens), ((0, 0), (7, 0))))
    positions = jnp.asarray(np.pad(np.broadcast_to(np.arange(time, dtype=np.int32), tokens.shape), ((0, 0), (7, 0))))

    @jax.jit
    def left_padded(params: Any) -> jax.Array:
        hidden = models.forward(params, config, padded, segments, positions, execution=EXECUTION).hidden
        return models.logits(params, config, hidden[:, 7:])

    assert difference(left_padded(params), golden["left_padded_logits"]) < 1e-4

    @jax.jit
    def extend(tokens: jax.Array, state: models.DecodeState) -> tuple[jax.Array, models.DecodeState]:
        whole = jnp.full(rows, tokens.shape[1], jnp.int32)
        hidden, state = models.extend(params, config, tokens, whole, state, execution=EXECUTION)
        return models.logits(params, config, hidden), state

    state = models.init_state(config, rows, time)
    for start, end in ((0, 13), *((t, t + 1) for t in range(13, time))):
        logits, state = extend(jnp.asarray(tokens[:, start:end]), state)
        assert difference(logits, golden["cached_logits"][:, end - 1]) < 1e-4
