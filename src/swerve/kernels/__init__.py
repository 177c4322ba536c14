"""Fast paths of the model's inner computations, each beside the naive twin that tests hold it against.

This package owns the Gated DeltaNet (chunked; recurrence), softmax attention over packed rows and caches (blocked;
naive), the causal convolution, and routed experts (sorted blocks; dense). Functions of arrays only: no names of
parameters, no configuration.
"""

from swerve.kernels.attention import cached_attention, packed_attention, packed_attention_naive
from swerve.kernels.convolution import causal_convolution, causal_convolution_naive
from swerve.kernels.delta import delta_chunked, delta_recurrent, delta_step
from swerve.kernels.experts import Routing, experts_dense, experts_sorted, route
from swerve.kernels.linear import matmul

__all__ = [
    "Routing",
    "cached_attention",
    "causal_convolution",
    "causal_convolution_naive",
    "delta_chunked",
    "delta_recurrent",
    "delta_step",
    "experts_dense",
    "experts_sorted",
    "matmul",
    "packed_attention",
    "packed_attention_naive",
    "route",
]
