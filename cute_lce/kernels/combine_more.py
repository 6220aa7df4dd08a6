"""What terms add to the statistics of rows: partials -> numbers of each token."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_lce import maths
from cute_lce.arguments import COMBINE_ROWS
from cute_lce.kernels import row_stats
from cute_lce.kernels.combine import LANES, WARPS, CombineTensors
from cute_lce.kernels.logits import numbers
from cute_lce.kernels.rows import computed, origin


class CombineMore:
    """After kernels.combine, whose row_max and row_sum it reads; blocks, rows and lanes as there.

    Timeline of a block: each lane adds up its partials, gaps relative to the row's maximum -> the 4 lanes of
    a row by shuffles -> shared memory -> warp 0 adds up 16 results, and writes. The order of a row's partials
    is fixed. Shared memory: 512 bytes for each number of a token.
    """

    @cute.jit
    def __call__(self, tensors: CombineTensors, stream: cuda.CUstream):
        terms = tensors.loss.terms
        # Of a token, and of a partial, which has the weights that a total is of.
        self.count = ("entropy" in terms) + ("total" in terms)
        self.parts = ("entropy" in terms) + 2 * ("total" in terms)

        @cute.struct
        class SharedStorage:
            sums: cute.struct.MemRange[Float32, WARPS * COMBINE_ROWS * self.count]

        self.storage = SharedStorage
        blocks = cute.ceil_div(cute.size(tensors.target), COMBINE_ROWS)
        self.kernel(tensors).launch(grid=(blocks, 1, 1), block=(LANES * WARPS, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, tensors: CombineTensors):
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        loss, n = tensors.loss, cute.size(tensors.target)
        line, share = lane % COMBINE_ROWS, lane // COMBINE_ROWS
        row = cute.arch.block_idx()[0] * COMBINE_ROWS + line
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        layout = cute.make_layout((WARPS, COMBINE_ROWS, self.count))
        shared = storage.sums.get_tensor(layout)
        sums = cute.make_rmem_tensor(self.count, Float32)
        sums.fill(0.0)
        token = Int32(0)
        if row < n:
            token = origin(tensors.rows, row)
        if row < computed(tensors.rows):
            row_max = row_stats.finite_max(tensors.row_max[token])
            first, step = warp * (LANES // COMBINE_ROWS) + share, WARPS * (LANES // COMBINE_ROWS)
            for number in cutlass.range(first, cute.size(tensors.partials, mode=[0]), step, unroll=4):
                at = (Int64(number) * n + row) * self.parts
                more = numbers(loss.more_partials + 4 * at, self.parts)
                own_max, own_sum = tensors.partials[number, row, 0], tensors.partials[number, row, 1]
                if cutlass.const_expr("entropy" in loss.terms):
                    if own_sum > 0:
                        gap = more[0] + (row_max - own_max) * own_sum
                        sums[0] += maths.rescaled(gap, own_max, row_max, row_stats.exp)
                if cutlass.const_expr("total" in loss.terms):
                    rise = row_max - row_stats.finite_max(own_max)
                    sums[self.count - 1] += more[self.parts - 2] + rise * more[self.parts - 1]
        for i in cutlass.range_constexpr(self.count):
            for step in cutlass.range_constexpr(2):
                sums[i] += cute.arch.shuffle_sync_bfly(sums[i], offset=COMBINE_ROWS << step)
            if share == 0:
                shared[warp, line, i] = sums[i]
        cute.arch.sync_threads()
        if warp == 0 and share == 0 and row < n:
            for i in cutlass.range_constexpr(self.count):
                for other in cutlass.range_constexpr(1, WARPS):
                    sums[i] += shared[other, line, i]
            if cutlass.const_expr("entropy" in loss.terms):
                mean_gap = numbers(loss.mean_gap, cute.size(tensors.row_max))
                mean_gap[token] = sums[0] / tensors.row_sum[token]
            if cutlass.const_expr("total" in loss.terms):
                total_gap = numbers(loss.total_gap, cute.size(tensors.row_max))
                total_gap[token] = sums[self.count - 1]
