"""What terms add to the statistics of rows: partials -> numbers of each token."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_lce.arguments import COMBINE_ROWS, NO_CLASS
from cute_lce.kernels import more_sums, pdl, row_stats
from cute_lce.kernels.combine import AT_ONCE, LANES, STEP, WARPS, CombineTensors, load_partials
from cute_lce.kernels.logits import numbers
from cute_lce.kernels.rows import computed, origin


class CombineMore:
    """After kernels.combine, whose row_max and row_sum it reads; blocks, rows and lanes as there.

    Timeline of a block: each lane adds up its partials, relative to the row's maximum -> the 4 lanes of a row
    by shuffles -> shared memory -> warp 0 adds up 8 results, and writes. The order of a row's partials is
    fixed; of argmax it does not matter. Shared memory: 256 bytes for each number of a token, and for an
    argmax.
    """

    @cute.jit
    def __call__(self, tensors: CombineTensors, stream: cuda.CUstream):
        self.at, self.parts = more_sums.places(tensors.loss.terms)

        @cute.struct
        class SharedStorage:
            sums: cute.struct.MemRange[Float32, WARPS * COMBINE_ROWS * self.parts]
            first: cute.struct.MemRange[Int32, WARPS * COMBINE_ROWS]

        self.storage = SharedStorage
        blocks = cute.ceil_div(cute.size(tensors.target), COMBINE_ROWS)
        self.kernel(tensors).launch(
            grid=(blocks, 1, 1), block=(LANES * WARPS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, tensors: CombineTensors):
        pdl.begin()
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        loss, n = tensors.loss, cute.size(tensors.target)
        line, share = lane % COMBINE_ROWS, lane // COMBINE_ROWS
        row = cute.arch.block_idx()[0] * COMBINE_ROWS + line
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        shared = storage.sums.get_tensor(cute.make_layout((WARPS, COMBINE_ROWS, self.parts)))
        shared_first = storage.first.get_tensor(cute.make_layout((WARPS, COMBINE_ROWS)))
        sums = cute.make_rmem_tensor(self.parts, Float32)
        sums.fill(0.0)
        first_class, token = Int32(NO_CLASS), Int32(0)
        if row < n:
            token = origin(tensors.rows, row)
        if row < computed(tensors.rows):
            highest = tensors.row_max[token]
            row_max = row_stats.finite_max(highest)
            first, count = warp * (LANES // COMBINE_ROWS) + share, cute.size(tensors.partials, mode=[0])
            for number in cutlass.range(first, count, AT_ONCE * STEP, unroll=1):
                own_maxima, own_sums = load_partials(tensors.partials, number, row)
                more = cute.make_rmem_tensor((self.parts, AT_ONCE), Float32)
                for i in cutlass.range_constexpr(AT_ONCE):
                    at = cutlass.min(number + i * STEP, count - 1)
                    given = numbers(loss.more_partials + 4 * ((Int64(at) * n + row) * self.parts), self.parts)
                    for part in cutlass.range_constexpr(self.parts):
                        more[part, i] = given[part]
                for i in cutlass.range_constexpr(AT_ONCE):
                    if number + i * STEP < count:
                        more_sums.add(self.at, sums, more[None, i], own_maxima[i], own_sums[i], row_max)
                        if cutlass.const_expr("argmax" in self.at):
                            if own_maxima[i] == highest:
                                own_first = more[self.at["argmax"], i].bitcast(Int32)
                                first_class = cutlass.min(first_class, own_first)
        for step in cutlass.range_constexpr(2):
            for i in cutlass.range_constexpr(self.parts):
                sums[i] += cute.arch.shuffle_sync_bfly(sums[i], offset=COMBINE_ROWS << step)
            other_first = cute.arch.shuffle_sync_bfly(first_class, offset=COMBINE_ROWS << step)
            first_class = cutlass.min(first_class, other_first)
        if share == 0:
            for i in cutlass.range_constexpr(self.parts):
                shared[warp, line, i] = sums[i]
            shared_first[warp, line] = first_class
        cute.arch.sync_threads()
        if warp == 0 and share == 0 and row < n:
            for other in cutlass.range_constexpr(1, WARPS):
                for i in cutlass.range_constexpr(self.parts):
                    sums[i] += shared[other, line, i]
                first_class = cutlass.min(first_class, shared_first[other, line])
            self._write(tensors, sums, first_class, row, token)

    @cute.jit
    def _write(
        self, tensors: CombineTensors, sums: cute.Tensor, first_class: Int32, row: Int32, token: Int32
    ):
        """A token's numbers."""
        loss, count = tensors.loss, cute.size(tensors.row_max)
        if cutlass.const_expr("entropy" in self.at):
            numbers(loss.mean_gap, count)[token] = sums[self.at["entropy"]] / tensors.row_sum[token]
        if cutlass.const_expr("squares" in self.at):
            numbers(loss.square_sum, count)[token] = sums[self.at["squares"]]
        if cutlass.const_expr("total" in self.at):
            total = sums[self.at["total"]]
            if tensors.shard == 0:
                total += cute.math.log(tensors.row_sum[token]) * sums[self.at["total"] + 1]
                if Int64(tensors.target[row]) == loss.ignore_index:
                    total = Float32(0.0)
            numbers(loss.total, count)[token] = total
        if cutlass.const_expr("logits" in self.at):
            numbers(loss.logit_sum, count)[token] = sums[self.at["logits"]]
        if cutlass.const_expr("argmax" in self.at):
            numbers(loss.argmax, count)[token] = first_class.bitcast(Float32)
