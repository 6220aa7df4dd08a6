"""The gradient by a bias: sums over tokens of what was summed by slabs of tokens, by the epilogue of dlogits
or, of what a forward kept, by `KeptSums`."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_lce import maths
from cute_lce.kernels import pdl
from cute_lce.kernels.adjacent import adjacent
from cute_lce.kernels.fragment import Fragment
from cute_lce.kernels.logits import numbers
from cute_lce.kernels.rows import Compacted, computed

THREADS = 128
ELEMENTS = 8  # of a thread at once


class KeptSums:
    """The sums of what was kept, times the rows' factors, or of dlogits, over the tokens of each slab. A
    thread has 8 classes of a slab. Reads 2 bytes an element.

    Args: as BiasGradient's.
    """

    def __init__(self, fragment: Fragment, half: bool):
        self.fragment = fragment
        self.half = half

    @cute.jit
    def __call__(self, kept: cute.Tensor, factor, loss, rows: Compacted, stream: cuda.CUstream):
        """kept (n, columns) 16-bit; factor (n,) fp32, or None: ones, of dlogits."""
        n, columns = kept.shape
        grid = (cute.ceil_div(n, self.fragment.columns), cute.ceil_div(columns, ELEMENTS * THREADS), 1)
        self.kernel(kept, factor, loss, rows).launch(
            grid=grid, block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, kept: cute.Tensor, factor, loss, rows: Compacted):
        pdl.begin()
        slab, block, _ = cute.arch.block_idx()
        column, columns = (block * THREADS + cute.arch.thread_idx()[0]) * ELEMENTS, cute.size(kept, mode=[1])
        first = slab * self.fragment.columns
        end = cutlass.min(first + self.fragment.columns, computed(rows))
        if column < columns and first < end:
            sums = cute.make_rmem_tensor(ELEMENTS, Float32)
            sums.fill(0.0)
            for row in cutlass.range(first, end, unroll=8):
                values = cute.make_rmem_tensor(ELEMENTS, kept.element_type)
                cute.autovec_copy(adjacent(kept, row, column, ELEMENTS), values)
                own = Float32(1.0)
                if cutlass.const_expr(factor is not None):
                    own = factor[row]
                for i in cutlass.range_constexpr(ELEMENTS):
                    sums[i] += values[i].to(Float32) * own
            partials = numbers(loss.column_sums + 4 * (Int64(slab) * columns), columns)
            for i in cutlass.range_constexpr(ELEMENTS):
                total = sums[i]
                if cutlass.const_expr(self.half):
                    # BiasGradient divides by it.
                    total *= Float32(maths.HALF_SCALE)
                if column + i < columns:
                    partials[column + i] = total


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
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, loss, rows: Compacted, first: Int32, columns: Int32):
        pdl.begin()
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
