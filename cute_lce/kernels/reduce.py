"""After the last stripe of a split dhidden: the splits' sums, added in their order, rounded once."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32

from cute_lce.kernels.adjacent import adjacent

THREADS = 128
ELEMENTS = 8  # of a thread at once: 32 bytes of a sum, 16 of the result


class Reduce:
    """A thread has 8 elements of all sums at once. Reads 4 bytes an element and split, writes 2."""

    @cute.jit
    def __call__(self, out: cute.Tensor, sums: cute.Tensor, stream: cuda.CUstream):
        """out (n, d) 16-bit, d a multiple of 8; sums (splits, n, d) fp32, contiguous."""
        blocks = cute.ceil_div(cute.size(out, mode=[1]), ELEMENTS * THREADS)
        self.kernel(out, sums).launch(
            grid=(cute.size(out, mode=[0]), blocks, 1), block=(THREADS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(self, out: cute.Tensor, sums: cute.Tensor):
        row, block, _ = cute.arch.block_idx()
        column = (block * THREADS + cute.arch.thread_idx()[0]) * ELEMENTS
        if column < cute.size(out, mode=[1]):
            total = cute.make_rmem_tensor(ELEMENTS, Float32)
            total.fill(0.0)
            for split in cutlass.range(cute.size(sums, mode=[0]), unroll=4):
                part = cute.make_rmem_tensor(ELEMENTS, Float32)
                cute.autovec_copy(adjacent(sums[split, None, None], row, column, ELEMENTS), part)
                total.store(total.load() + part.load())
            rounded = cute.make_rmem_tensor(ELEMENTS, out.element_type)
            rounded.store(total.load().to(out.element_type))
            cute.autovec_copy(rounded, adjacent(out, row, column, ELEMENTS))
