"""The gradient by a bias: sums over tokens of what the epilogue of dlogits has summed by slabs of tokens."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_lce import maths
from cute_lce.kernels.fragment import Fragment
from cute_lce.kernels.logits import numbers
from cute_lce.kernels.rows import Compacted, computed

THREADS = 128


class BiasGradient:
    """A thread a class, which adds up its slabs in their order. Reads 4 bytes for each of these.

    Args:
        fragment: of the GEMM of logits.
        half: whether dlogits are float16, HALF_SCALE times what they stand for.
    """

    def __init__(self, fragment: Fragment, half: bool):
        self.fragment = fragment
        self.half = half

    @cute.jit
    def __call__(self, loss, rows: Compacted, first: Int32, columns: Int32, stream: cuda.CUstream):
        """first, columns: classes of the launch."""
        blocks = cute.ceil_div(columns, THREADS)
        self.kernel(loss, rows, first, columns).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, loss, rows: Compacted, first: Int32, columns: Int32):
        own = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        if own < columns:
            total = Float32(0.0)
            slabs = cute.ceil_div(computed(rows), self.fragment.columns)
            for slab in cutlass.range(slabs, unroll=4):
                partials = numbers(loss.column_sums + 4 * (Int64(slab) * columns), columns)
                total += partials[own]
            if cutlass.const_expr(self.half):
                total *= Float32(1 / maths.HALF_SCALE)
            dbias = numbers(loss.dbias + 4 * Int64(first), columns)
            if rows.first > 0:
                total += dbias[own]
            dbias[own] = total
