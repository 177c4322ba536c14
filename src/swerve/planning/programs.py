"""The programs of a recipe's optimizer step, with what the model itself needs by the usual rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """A program to plan.

    Attributes:
        jitted: From `jax.jit`.
        arguments: Abstract arrays with their shardings.
        kinds: What each argument is: `parameters`, `optimizer`, `gradients` or `batch`.
        reference_flops: What the model needs on all devices together by the usual rule; 0 where there is none.
    """

    jitted: Any
    arguments: tuple[Any, ...]
    kinds: tuple[str, ...]
    reference_flops: float = 0.0
