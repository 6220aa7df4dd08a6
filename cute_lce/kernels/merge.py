"""What a shard of the vocabulary adds to a forward: targets counted from the shard's first class before it,
and the merge of the ranks' statistics after their gather. One kernel each.

A rank's statistics are `3 n + 1` fp32: its number of classes if its first class was derived from its rank,
else 0; row_max, row_sum and the target's logit of each token, nan where the target is not in its shard. Terms
append theirs (exchange.RowSums): mean_gap of each token; total_gap of each, and one weight for all.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Float64, Int32, Int64

from cute_lce import maths
from cute_lce.arguments import ELSEWHERE, IGNORED, MERGE_ROWS, REDUCTIONS, LossArguments
from cute_lce.kernels import pdl, row_stats
from cute_lce.kernels.totals import TotalTensors, add_up, sums_of, write_total

WARPS = MERGE_ROWS // 32


class LocalizeTensors(NamedTuple):
    """Global memory and numbers of Localize.

    Read: target (n,). Written: local (n,) in its dtype, ELSEWHERE for a class outside [start, start +
    columns), IGNORED for ignore_index; header (1,) fp32, `count`; arrived (1,) int32, 0.
    """

    target: cute.Tensor
    local: cute.Tensor
    header: cute.Tensor
    arrived: cute.Tensor
    start: Int64
    columns: Int32
    count: Int32
    ignore_index: Int64


class Localize:
    """A thread a token, which reads and writes a target. No shared memory."""

    @cute.jit
    def __call__(self, tensors: LocalizeTensors, stream: cuda.CUstream):
        blocks = cute.ceil_div(cute.size(tensors.target), MERGE_ROWS)
        self.kernel(tensors).launch(
            grid=(blocks, 1, 1), block=(MERGE_ROWS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, tensors: LocalizeTensors):
        pdl.begin()
        row = cute.arch.block_idx()[0] * MERGE_ROWS + cute.arch.thread_idx()[0]
        if row == 0:
            tensors.header[0] = Float32(tensors.count)
            tensors.arrived[0] = Int32(0)
        if row < cute.size(tensors.target):
            target = Int64(tensors.target[row])
            here = target - tensors.start
            if here < 0 or here >= Int64(tensors.columns):
                here = Int64(ELSEWHERE)
            if target == tensors.ignore_index:
                here = Int64(IGNORED)
            tensors.local[row] = here.to(tensors.local.element_type)


class MergeTensors(NamedTuple):
    """Global memory and numbers of Merge.

    Read: gathered (ranks, 3 n + 1 and more) fp32; local (n,), of which only IGNORED matters.
    Written: row_max, row_sum (n,) fp32; losses fp32, (n,) or (1,); num_valid (1,) int64. A row's loss and
    row_sum are nan, unless it is ignored, where no shard or several have its target, or the ranks' numbers of
    classes differ. target_logit, mean_gap, total_gap (n,) fp32: at address 0 they are not written, and the
    latter two not read.
    Scratch: blocks (blocks, 2) fp32; arrived (1,) int32, zero before the launch.
    """

    gathered: cute.Tensor
    local: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    losses: cute.Tensor
    num_valid: cute.Tensor
    blocks: cute.Tensor
    arrived: cute.Tensor
    loss: LossArguments
    target_logit: cute.Tensor
    mean_gap: cute.Tensor
    total_gap: cute.Tensor


class Merge:
    """A thread a token, which folds the ranks in their order, so that every rank has the same bits.

    Timeline of a block of 256 threads: each reads 12 bytes of each rank, 20 with both gaps, and writes its
    row -> sums of the block by shuffles and shared memory (132 bytes) -> the block that arrives last adds up
    all blocks in a fixed order, in float64.
    """

    @cute.jit
    def __call__(self, tensors: MergeTensors, stream: cuda.CUstream):
        @cute.struct
        class SharedStorage:
            sums: cute.struct.MemRange[Float64, WARPS * 2]
            last: cute.struct.MemRange[Int32, 1]

        self.storage = SharedStorage
        blocks = cute.ceil_div(cute.size(tensors.local), MERGE_ROWS)
        self.kernel(tensors).launch(
            grid=(blocks, 1, 1), block=(MERGE_ROWS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, tensors: MergeTensors):
        pdl.begin()
        thread, block = cute.arch.thread_idx()[0], cute.arch.block_idx()[0]
        blocks, n = cute.arch.grid_dim()[0], cute.size(tensors.local)
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        sums = sums_of(storage.sums, WARPS)
        last = storage.last.get_tensor(cute.make_layout(1))
        row = block * MERGE_ROWS + thread
        loss, valid = Float64(0.0), Float64(0.0)
        if row < n:
            own, is_valid = self._row(tensors, row, n)
            loss, valid = Float64(own), Float64(is_valid)
            if tensors.loss.reduction == REDUCTIONS["none"]:
                tensors.losses[row] = own
        loss, valid = add_up(loss, valid, sums)
        if thread == 0:
            tensors.blocks[block, 0] = Float32(loss)
            tensors.blocks[block, 1] = Float32(valid)
            before = cute.arch.atomic_add(tensors.arrived.iterator, Int32(1), sem="acq_rel", scope="gpu")
            last[0] = Int32(before == blocks - 1)
        cute.arch.sync_threads()
        if last[0] == 1:
            cute.arch.fence_acq_rel_gpu()
            total = TotalTensors(tensors.loss, tensors.blocks, tensors.losses, tensors.num_valid)
            write_total(total, sums)

    @cute.jit
    def _row(self, tensors: MergeTensors, row: Int32, n: Int32):
        """(a row's loss, 1 if it is valid)."""
        ranks = cute.size(tensors.gathered, mode=[0])
        row_max = -Float32.inf
        for rank in cutlass.range(ranks, unroll=1):
            row_max = cute.arch.fmax(row_max, tensors.gathered[rank, 1 + row])
        reference = row_stats.finite_max(row_max)
        row_sum, logit = Float32(0.0), Float32.nan
        owners, uneven = Int32(0), Int32(0)
        for rank in cutlass.range(ranks, unroll=1):
            term = tensors.gathered[rank, 1 + n + row]
            row_sum += maths.rescaled(term, tensors.gathered[rank, 1 + row], reference, row_stats.exp)
            other = tensors.gathered[rank, 1 + 2 * n + row]
            if other == other:
                logit = other
                owners += 1
            if tensors.gathered[rank, 0] != tensors.gathered[0, 0]:
                uneven = Int32(1)
        if owners != 1 or uneven != 0:
            logit = Float32.nan
        loss, valid = Float32(0.0), Float32(0.0)
        if Int64(tensors.local[row]) != Int64(IGNORED):
            if logit != logit:
                row_sum = Float32.nan
            loss = maths.row_loss(cute.math.log(row_sum), row_max, logit)
            valid = Float32(1.0)
        tensors.row_max[row] = row_max
        tensors.row_sum[row] = row_sum
        if tensors.target_logit.iterator.toint() != 0:
            tensors.target_logit[row] = logit
        behind = 1 + 3 * n
        if tensors.mean_gap.iterator.toint() != 0:
            tensors.mean_gap[row] = self._gap(tensors.gathered, row, n, reference) / row_sum
            behind += n
        if tensors.total_gap.iterator.toint() != 0:
            total = Float32(0.0)
            for rank in cutlass.range(ranks, unroll=1):
                rise = reference - row_stats.finite_max(tensors.gathered[rank, 1 + row])
                total += tensors.gathered[rank, behind + row] + rise * tensors.gathered[rank, behind + n]
            tensors.total_gap[row] = total
        return loss, valid

    @cute.jit
    def _gap(self, gathered: cute.Tensor, row: Int32, n: Int32, reference: Float32) -> Float32:
        """The sum of exp(z - reference) (reference - z)."""
        gap = Float32(0.0)
        for rank in cutlass.range(cute.size(gathered, mode=[0]), unroll=1):
            row_max = gathered[rank, 1 + row]
            weight = maths.rescaled(gathered[rank, 1 + n + row], row_max, reference, row_stats.exp)
            # A shard without any probability may have any gap.
            if weight > 0:
                gap += weight * (gathered[rank, 1 + 3 * n + row] + (reference - row_max))
        return gap
