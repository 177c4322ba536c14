"""Normalisers: how token losses become one number, without dividing.

Each returns a weight per token and a count. The loss is (sum of weight * token loss) / (sum of counts), both sums over
*all* micro-batches of the batch, so the division happens once and gradients do not depend on how the batch was cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Protocol

import jax
import jax.numpy as jnp

from swerve.algorithms.segments import per_token, segment_counts


class Normaliser(Protocol):
    """Weights and count of a micro-batch."""

    def __call__(self, mask: jax.Array, segment_ids: jax.Array, constant: float = 1.0) -> tuple[jax.Array, jax.Array]:
        """Return the weight of each token, float32 `[rows, time]`, and the count, a float32 scalar."""
        ...


def token_normaliser(mask: jax.Array, segment_ids: jax.Array, constant: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Every token weighs the same: the mean over all tokens of the batch (DAPO, and the MLPerf reference).

    Args:
        mask: float32 `[rows, time]`, 1 where the token is trained on.
        segment_ids: int32 `[rows, time]`; not used.
        constant: Not used.

    Returns:
        The mask, and the number of tokens.
    """
    del segment_ids, constant
    return mask, jnp.sum(mask)


def sequence_normaliser(mask: jax.Array, segment_ids: jax.Array, constant: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Every sequence weighs the same: the mean over sequences of the mean over tokens (GRPO as published, GSPO).

    Args:
        mask: float32 `[rows, time]`, 1 where the token is trained on.
        segment_ids: int32 `[rows, time]`.
        constant: Not used.

    Returns:
        The mask divided by the sequence's number of tokens, and the number of sequences with a token.
    """
    del constant
    counts = segment_counts(mask, segment_ids)
    return mask / jnp.maximum(per_token(counts, segment_ids), 1.0), jnp.sum(counts > 0).astype(jnp.float32)


def constant_normaliser(mask: jax.Array, segment_ids: jax.Array, constant: float = 1.0) -> tuple[jax.Array, jax.Array]:
    """Sum over a sequence's tokens, divided by a constant, mean over sequences (Dr.GRPO, arXiv:2503.20783).

    Args:
        mask: float32 `[rows, time]`, 1 where the token is trained on.
        segment_ids: int32 `[rows, time]`.
        constant: Tokens every sequence is divided by, for example the generation limit.

    Returns:
        The mask divided by the constant, and the number of sequences with a token.
    """
    return mask / constant, jnp.sum(segment_counts(mask, segment_ids) > 0).astype(jnp.float32)


def count_without_mask(normaliser: str, num_sequences: int, num_tokens: int) -> int:
    """Return what a normaliser counts of sequences of which no mask is at hand.

    Args:
        normaliser: By its name.
        num_sequences: How many, each with a token that is trained on.
        num_tokens: Those tokens.
    """
    return {"token": num_tokens, "sequence": num_sequences, "constant": num_sequences}[normaliser]


NORMALISERS: Mapping[str, Normaliser] = MappingProxyType(
    {"token": token_normaliser, "sequence": sequence_normaliser, "constant": constant_normaliser}
)
"""Every normaliser by the name recipes call it."""
