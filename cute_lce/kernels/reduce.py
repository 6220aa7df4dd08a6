"""dhidden as the caller gets it: sums of splits added up in their order, rows where their tokens are."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_lce.kernels import pdl
from cute_lce.kernels.adjacent import adjacent
from cute_lce.kernels.rows import Compacted, origin

THREADS = 128
ELEMENTS = 8  # of a thread at once


class Reduce:
    """A thread has 8 elements of all sums at once. Reads and writes each once."""

    @cute.jit
    def __call__(
        self,
        out: cute.Tensor,
        sums: cute.Tensor,
        rows: Compacted,
        stream: cuda.CUstream,
        beside: Int32 | int = 0,
    ):
        """out (.., d), sums (splits, tokens, d), contiguous, d a multiple of 8; the row of out at a token's
        origin is the sum of its rows, rounded once, or 0 where compacted tokens are ignored. beside: 1 if the
        launch before accesses none of these but `rows`, which it only reads: what it leaves of SMs, as its
        last tiles are computed, serves."""
        chunks = cute.size(out, mode=[1]) // ELEMENTS
        self.kernel(out, sums, rows, Int32(beside)).launch(
            grid=(cute.ceil_div(rows.tokens * chunks, THREADS), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, out: cute.Tensor, sums: cute.Tensor, rows: Compacted, beside: Int32):
        if beside == 0:
            pdl.wait()
        chunks = cute.size(out, mode=[1]) // ELEMENTS
        number = cute.arch.block_idx()[0] * THREADS + cute.arch.thread_idx()[0]
        row = number // chunks
        column = (number - row * chunks) * ELEMENTS
        splits = cute.size(sums, mode=[0])
        if rows.count.iterator.toint() != 0:
            if rows.first + row >= rows.count[0]:
                splits = Int32(0)
        if row < rows.tokens:
            total = cute.make_rmem_tensor(ELEMENTS, Float32)
            total.fill(0.0)
            for split in cutlass.range(splits, unroll=2):
                part = cute.make_rmem_tensor(ELEMENTS, sums.element_type)
                cute.autovec_copy(adjacent(sums[split, None, None], row, column, ELEMENTS), part)
                total.store(total.load() + part.load().to(Float32))
            rounded = cute.make_rmem_tensor(ELEMENTS, out.element_type)
            rounded.store(total.load().to(out.element_type))
            cute.autovec_copy(rounded, adjacent(out, origin(rows, row), column, ELEMENTS))
        pdl.begin()
