"""dhidden as the caller gets it: sums of splits added up in their order, rows where their tokens are."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64

from cute_lce.kernels import pdl
from cute_lce.kernels.adjacent import adjacent, load_from_l2
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
        overlaps: Int32 | int = 0,
    ):
        """out (.., d), sums (splits, tokens, d), contiguous, d a multiple of 8; the row of out at a token's
        origin is the sum of its rows, rounded once, or 0 where compacted tokens are ignored. overlaps: 1 if
        this may run while the launch before does, on SMs that it leaves idle: that one only reads `rows`, and
        touches neither out nor sums."""
        chunks = rows.tokens * (Int64(cute.size(out, mode=[1])) // ELEMENTS)
        self.kernel(out, sums, rows, Int32(overlaps)).launch(
            grid=(Int32(cute.ceil_div(chunks, THREADS)), 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, out: cute.Tensor, sums: cute.Tensor, rows: Compacted, overlaps: Int32):
        if overlaps == 0:
            pdl.begin()
        chunks = Uint32(cute.size(out, mode=[1])) // ELEMENTS
        first = Uint64(cute.arch.block_idx()[0]) * THREADS
        above = Uint32(first // chunks)
        right = Uint32(first - Uint64(above) * chunks) + cute.arch.thread_idx()[0]
        row, column = Int32(above + right // chunks), Int32(right % chunks) * ELEMENTS
        splits = cute.size(sums, mode=[0])
        if rows.count.iterator.toint() != 0:
            if rows.first + row >= pdl.load(rows.count, 0):
                splits = Int32(0)
        if row < rows.tokens:
            total = cute.make_rmem_tensor(ELEMENTS, Float32)
            total.fill(0.0)
            for split in cutlass.range(splits, unroll=2):
                part = cute.make_rmem_tensor(ELEMENTS, sums.element_type)
                load_from_l2(sums[split, None, None], row, column, part)
                total.store(total.load() + part.load().to(Float32))
            rounded = cute.make_rmem_tensor(ELEMENTS, out.element_type)
            rounded.store(total.load().to(out.element_type))
            cute.autovec_copy(rounded, adjacent(out, origin(rows, row, True), column, ELEMENTS))
        # Only now, since the next launch relies on the end of the one before this.
        if overlaps != 0:
            pdl.begin()
