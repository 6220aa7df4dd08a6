"""Counters by which clusters keep pace, before the GEMMs that count, where no kernel before zeroes them."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Int32

from cute_lce.kernels import pdl

LANES = 32


@cute.jit
def clear(counters: cute.Tensor, stream: cuda.CUstream):
    """Zero int32 counters, by a warp."""
    _clear(counters).launch(grid=(1, 1, 1), block=(LANES, 1, 1), stream=stream, use_pdl=True)


@cute.kernel
def _clear(counters: cute.Tensor):
    pdl.begin()
    for i in cutlass.range(cute.arch.thread_idx()[0], cute.size(counters), LANES, unroll=1):
        counters[i] = Int32(0)
