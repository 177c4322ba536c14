"""How a forward pass is computed, as opposed to what: the choices that change speed and memory but no result."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Choice of fast paths and of their sizes; hashable, so it can be a static argument.

    Attributes:
        attention: `blocked`, or the `naive` oracle.
        attention_block: Queries of one block.
        delta: `chunked`, or the `recurrent` oracle.
        delta_chunk: Tokens of one chunk of the DeltaNet.
        experts: `sorted` blocks, or the `dense` oracle.
        expert_block: Places of one block of sorted tokens at most.
        layers: `scan` compiles one layer of each kind and loops over them; `unroll` compiles all of them.
        remat: Keep only the input of each layer for the backward pass.
        logprob_chunk: Tokens whose logits are live at a time.
    """

    attention: Literal["blocked", "naive"] = "blocked"
    attention_block: int = 128
    delta: Literal["chunked", "recurrent"] = "chunked"
    delta_chunk: int = 16
    experts: Literal["sorted", "dense"] = "sorted"
    expert_block: int = 128
    layers: Literal["scan", "unroll"] = "unroll"
    remat: bool = False
    logprob_chunk: int = 1024


DEFAULT = Execution()
