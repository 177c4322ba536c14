"""How a forward pass is computed, as opposed to what: the choices that change speed and memory but no result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from swerve.config.schema import Keeping
from swerve.parallel import ONE_DEVICE, MeshShape

REMAT_NAMES = (
    "layer_input",
    "attention_query",
    "attention_key",
    "attention_value",
    "attention_mixed",
    "delta_projected",
    "delta_mixed",
    "mixer_output",
    "expert_hidden",
    "expert_output",
    "shared_hidden",
)
"""Intermediate tensors of a layer that `Remat` can name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Remat:
    """What a layer keeps for its backward pass; what is neither kept nor offloaded is computed again.

    Attributes:
        keep: Names out of `REMAT_NAMES`.
        offload: Likewise, moved to the host's memory and back.
    """

    keep: tuple[str, ...] = ("layer_input",)
    offload: tuple[str, ...] = ()

    @classmethod
    def from_settings(cls, settings: Mapping[str, Keeping]) -> Remat:
        """By a choice for each name."""
        return cls(
            keep=tuple(name for name in REMAT_NAMES if settings[name] == "keep"),
            offload=tuple(name for name in REMAT_NAMES if settings[name] == "offload"),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Execution:
    """Choice of fast paths and of their sizes; hashable, so it can be a static argument.

    Attributes:
        attention: `blocked`, `splash` for TPUs, or the `naive` oracle.
        attention_block: Queries of one block; 0 chooses by the row's length.
        context_attention: Where a row is split: `gather` all keys and values, or pass them round a `ring`.
        delta: `chunked`, or the `recurrent` oracle.
        delta_chunk: Tokens of one chunk of the DeltaNet; 0 chooses by the width of its keys.
        delta_precision: Of the products that compose states across the devices of a row.
        experts: `sorted` blocks, `grouped` products for TPUs, or the `dense` oracle.
        expert_block: Places of one block of sorted tokens at most.
        expert_chunks: Parts in which a device's tokens visit the experts, one after the other.
        buffer_factor: Pairs that a device computes at most, in multiples of its balanced load; `None` for all.
        layers: `scan` compiles one layer of each kind and loops over them; `unroll` compiles all of them.
        remat: What a layer keeps for the backward pass; `None` keeps everything.
        head: `sharded`, or the `plain` oracle, which is written for whole arrays.
        logprob_chunk: Tokens whose logits are live at a time; of the plain head, columns.
        gradient_sum_dtype: Type in which gradients of parameters are added up over devices: the `parameter`'s, or
            `float32`.
        mesh: Devices that compute together; the functions of the model are then called inside a manual program.
        interpret: Run TPU kernels as plain JAX, for tests where there is no TPU.
    """

    attention: Literal["blocked", "splash", "naive"] = "blocked"
    attention_block: int = 0
    context_attention: Literal["gather", "ring"] = "gather"
    delta: Literal["chunked", "recurrent"] = "chunked"
    delta_chunk: int = 0
    delta_precision: Literal["default", "high", "highest"] = "highest"
    experts: Literal["sorted", "grouped", "dense"] = "sorted"
    expert_block: int = 128
    expert_chunks: int = 1
    buffer_factor: float | None = None
    layers: Literal["scan", "unroll"] = "unroll"
    remat: Remat | None = None
    head: Literal["sharded", "plain"] = "sharded"
    logprob_chunk: int = 1024
    gradient_sum_dtype: Literal["parameter", "float32"] = "parameter"
    mesh: MeshShape = ONE_DEVICE
    interpret: bool = False

    @property
    def sum_in_float32(self) -> bool:
        """Whether gradients are cast to float32 before, rather than after, they are added up over devices."""
        return self.gradient_sum_dtype == "float32"


DEFAULT = Execution()
