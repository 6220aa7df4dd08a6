"""Sums over the rows of a matrix: of slabs of rows, and then of these, so that their order depends on the
shape alone; and the products of rows with a vector of such sums."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_lce.arguments import SUMMED_COLUMNS
from cute_lce.kernels import pdl
from cute_lce.kernels.adjacent import AT_ONCE, LANES, adjacent, load_chunks
from cute_lce.kernels.logits import numbers
from cute_lce.kernels.rows import Compacted, computed

ELEMENTS = 8  # of a thread at once
THREADS = SUMMED_COLUMNS // ELEMENTS
WARPS = 4
TOGETHER = 2
"""Rows of a warp, which share what it reads of the vector."""


class SlabSums:
    """The sums of each slab of rows, times the rows' factors. A thread has 8 columns of a slab. Reads 2 bytes
    an element.

    Args:
        scale: of the sums.
        skips: whether rows with the factor 0 count for nothing, whatever they hold.
    """

    def __init__(self, scale: float = 1.0, *, skips: bool = False):
        self.scale = scale
        self.skips = skips

    @cute.jit
    def __call__(
        self,
        matrix: cute.Tensor,
        factor,
        partials: Int64,
        slab: Int32,
        rows: Compacted | None,
        stream: cuda.CUstream,
    ):
        """matrix (rows, columns) 16-bit; factor (rows,) fp32, or None: ones. slab: its rows. rows: which are
        computed; None: all. Written: (slabs, columns) fp32 at partials."""
        count, columns = matrix.shape
        grid = (_slabs(count, slab), cute.ceil_div(columns, SUMMED_COLUMNS), 1)
        self.kernel(matrix, factor, partials, slab, rows).launch(
            grid=grid, block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        matrix: cute.Tensor,
        factor,
        partials: Int64,
        slab: Int32,
        rows: Compacted | None,
    ):
        pdl.begin()
        number, block, _ = cute.arch.block_idx()
        column = (block * THREADS + cute.arch.thread_idx()[0]) * ELEMENTS
        columns = cute.size(matrix, mode=[1])
        first = number * slab
        end = cutlass.min(first + slab, _count(cute.size(matrix, mode=[0]), rows))
        if column < columns and first < end:
            sums = cute.make_rmem_tensor(ELEMENTS, Float32)
            sums.fill(0.0)
            for row in cutlass.range(first, end, unroll=8):
                values = cute.make_rmem_tensor(ELEMENTS, matrix.element_type)
                cute.autovec_copy(adjacent(matrix, row, column, ELEMENTS), values)
                own = Float32(1.0)
                if cutlass.const_expr(factor is not None):
                    own = factor[row]
                for i in cutlass.range_constexpr(ELEMENTS):
                    term = values[i].to(Float32) * own
                    if cutlass.const_expr(self.skips):
                        term = Float32(cutlass.select_(own == 0, Float32(0.0), term))
                    sums[i] += term
            out = numbers(partials + 4 * (Int64(number) * columns), columns)
            for i in cutlass.range_constexpr(ELEMENTS):
                if column + i < columns:
                    out[column + i] = sums[i] * Float32(self.scale)


class AddSlabs:
    """A thread a column, which adds up its slabs in their order. Reads 4 bytes for each of these.

    Args:
        scale: of the sums.
    """

    def __init__(self, scale: float = 1.0):
        self.scale = scale

    @cute.jit
    def __call__(
        self,
        partials: Int64,
        out: cute.Tensor,
        before: cute.Tensor,
        adds: Boolean,
        slab: Int32,
        count: Int32,
        rows: Compacted | None,
        stream: cuda.CUstream,
    ):
        """partials: as SlabSums', of `count` rows, or those that are computed among them. Written: out
        (columns,) fp32; with `adds` it is more by before (columns,), which may be out."""
        blocks = cute.ceil_div(cute.size(out), THREADS)
        self.kernel(partials, out, before, adds, slab, count, rows).launch(
            grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(
        self,
        partials: Int64,
        out: cute.Tensor,
        before: cute.Tensor,
        adds: Boolean,
        slab: Int32,
        count: Int32,
        rows: Compacted | None,
    ):
        pdl.begin()
        own, columns = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0], cute.size(out)
        if own < columns:
            total = Float32(0.0)
            for number in cutlass.range(_slabs(_count(count, rows), slab), unroll=8):
                total += numbers(partials + 4 * (Int64(number) * columns), columns)[own]
            total *= Float32(self.scale)
            if adds:
                total += before[own]
            out[own] = total


class RowProducts:
    """The product of each row with one vector; a warp has TOGETHER rows. Reads 2 bytes an element."""

    @cute.jit
    def __call__(self, matrix: cute.Tensor, vector: cute.Tensor, out: cute.Tensor, stream: cuda.CUstream):
        """matrix (rows, columns) 16-bit, columns a multiple of 8; vector (columns,) fp32, 16-byte aligned.
        Written: out (rows,) fp32."""
        blocks = cute.ceil_div(cute.size(out), WARPS * TOGETHER)
        self.kernel(matrix, vector, out).launch(
            grid=(blocks, 1, 1), block=(LANES * WARPS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, matrix: cute.Tensor, vector: cute.Tensor, out: cute.Tensor):
        pdl.begin()
        lane, count = cute.arch.lane_idx(), cute.size(out)
        first = (cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()) * TOGETHER
        if first < count:
            # The last warp reads a row twice rather than one that is not there.
            rows = [cutlass.min(first + i, count - 1) for i in range(TOGETHER)]
            sums = cute.make_rmem_tensor(TOGETHER, Float32)
            sums.fill(0.0)
            chunks = cute.size(matrix, mode=[1]) // 8
            layout = cute.make_layout((1, cute.size(vector)), stride=(0, 1))
            row_of_vector = cute.make_tensor(vector.iterator, layout)
            for chunk in cutlass.range(lane, chunks, LANES * AT_ONCE, unroll=1):
                each = load_chunks([(matrix, row) for row in rows], chunk, chunks, True)
                for part in cutlass.range_constexpr(AT_ONCE):
                    at = chunk + part * LANES
                    if at < chunks:
                        for half in cutlass.range_constexpr(2):
                            own = cute.make_rmem_tensor(4, Float32)
                            cute.autovec_copy(adjacent(row_of_vector, 0, at * 8 + half * 4, 4), own)
                            for i in cutlass.range_constexpr(4):
                                for k in cutlass.range_constexpr(TOGETHER):
                                    sums[k] += each[k][half * 4 + i, part].to(Float32) * own[i]
            for k in cutlass.range_constexpr(TOGETHER):
                total = cute.arch.warp_reduction(sums[k], lambda a, b: a + b)
                if lane == 0 and first + k < count:
                    out[first + k] = total


def _count(rows: Int32, compacted: Compacted | None) -> Int32:
    return rows if compacted is None else computed(compacted)


def _slabs(rows: Int32, slab: Int32) -> Int32:
    """cute.ceil_div cannot be traced where one branch has a constant and the other a variable."""
    return (rows + slab - 1) // slab
