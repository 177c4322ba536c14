"""Fast paths of the model's inner computations, each beside the naive twin that tests hold it against.

This package owns the Gated DeltaNet (chunked; recurrence), softmax attention over packed rows and caches (blocked;
naive; parts that merge; splash on TPUs), the causal convolution, and routed experts (sorted blocks; grouped products on
TPUs; dense). Functions of arrays only: no names of parameters, no configuration, no mesh.
"""

from swerve.kernels.attention import cached_attention, packed_attention, packed_attention_naive
from swerve.kernels.convolution import causal_convolution, causal_convolution_naive
from swerve.kernels.delta import delta_chunked, delta_recurrent, delta_step
from swerve.kernels.experts import Load, Routing, capacity_of, experts_dense, experts_sorted, route
from swerve.kernels.grouped import experts_grouped, row_tile
from swerve.kernels.linear import matmul
from swerve.kernels.parts import Part, attend_part
from swerve.kernels.splash import splash_attention

__all__ = [
    "Load",
    "Part",
    "Routing",
    "attend_part",
    "cached_attention",
    "capacity_of",
    "causal_convolution",
    "causal_convolution_naive",
    "delta_chunked",
    "delta_recurrent",
    "delta_step",
    "experts_dense",
    "experts_grouped",
    "experts_sorted",
    "matmul",
    "packed_attention",
    "packed_attention_naive",
    "route",
    "row_tile",
    "splash_attention",
]
