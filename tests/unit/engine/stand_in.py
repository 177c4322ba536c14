"""A decoder whose state is a rolling hash of every token it consumed: exact in any batch, and wrong if one is lost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

MODULUS = 97
PAD, STOP = 0, 1


@dataclass(frozen=True)
class HashConfig:
    vocab_size: int = 12


class HashModel:
    """Implements `DecoderModel`; parameters are a table `[MODULUS, V]` of logits by hash."""

    def unstack_blocks(self, params: Any) -> Any:
        return params

    def init_state(self, config: Any, batch: int, max_length: int) -> Any:
        return {
            "history": jnp.zeros((2, batch, max_length), jnp.int32),
            "hash": jnp.zeros(batch, jnp.int32),
            "length": jnp.zeros(batch, jnp.int32),
        }

    def extend(self, params: Any, config: Any, tokens: Any, num_valid: Any, state: Any) -> tuple[Any, Any]:
        def step(carry: Any, column: Any) -> tuple[Any, None]:
            value, length, history = carry
            token, index = column
            valid = index < num_valid
            places = jnp.arange(history.shape[-1])[None, :] == length[:, None]
            history = jnp.where((places & valid[:, None])[None], token[None, :, None], history)
            value = jnp.where(valid, (value * 31 + token + 7) % MODULUS, value)
            return (value, length + valid, history), None

        start = (state["hash"], state["length"], state["history"])
        columns = (tokens.T, jnp.arange(tokens.shape[1], dtype=jnp.int32))
        (value, length, history), _ = jax.lax.scan(step, start, columns)
        return jax.nn.one_hot(value, MODULUS), {"history": history, "hash": value, "length": length}

    def grow_state(self, state: Any, max_length: int) -> Any:
        more = max_length - state["history"].shape[-1]
        return {**state, "history": jnp.pad(state["history"], ((0, 0), (0, 0), (0, more)))}

    def reset_rows(self, state: Any, mask: Any) -> Any:
        return {
            "history": jnp.where(mask[None, :, None], 0, state["history"]),
            "hash": jnp.where(mask, 0, state["hash"]),
            "length": jnp.where(mask, 0, state["length"]),
        }

    def logits(self, params: Any, config: Any, hidden: Any) -> Any:
        return hidden @ params["table"]


def table(seed: int = 0, *, stop_logit: float = 0.0, vocab_size: int = 12) -> dict[str, Any]:
    """Random logits; `stop_logit` is added to those of the stop token."""
    values = np.random.default_rng(seed).normal(size=(MODULUS, vocab_size)).astype(np.float32)
    values[:, STOP] += stop_logit
    return {"table": jnp.asarray(values)}


def expected_logprobs(params: dict[str, Any], context: list[int], tokens: list[int], temperature: float) -> list[float]:
    """Log-probabilities that tokens have after a context, by the definition."""
    value, scores = 0, []
    for token in context:
        value = (value * 31 + token + 7) % MODULUS
    for token in tokens:
        logits = np.asarray(params["table"], np.float64)[value] / temperature
        scores.append(float(logits[token] - np.logaddexp.reduce(logits)))
        value = (value * 31 + token + 7) % MODULUS
    return scores
