"""The forward's second kernel, one for both architectures: partials -> row statistics and the loss."""

from typing import Any, NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Float64, Int32, Int64

from cute_lce import maths
from cute_lce.arguments import COMBINE_ROWS, REDUCTIONS, LossArguments
from cute_lce.kernels import pdl, row_stats
from cute_lce.kernels.logits import has_slope
from cute_lce.kernels.rows import Compacted, computed, origin
from cute_lce.kernels.totals import TotalTensors, sums_of, write_total

WARPS = 8
LANES = 32
STEP = WARPS * (LANES // COMBINE_ROWS)
"""Lanes of a row: each has every STEP-th partial."""
MOST_OTHERS = 1.0
"""The most that the others' sum may be, over the target's term, for the target's logit to be row_max."""
LOWEST = -maths.FARTHEST / maths.LOG2_E
"""A target's logit below which others that count as nothing (epilogues.sums) may be as low."""
FAR = 2.0**22
"""Exponents below it stay whole numbers of fp32 when the sum's own is added."""
AT_ONCE = 8
"""Partials that a lane loads before it merges them."""


class CombineTensors(NamedTuple):
    """Global memory that the combine kernel accesses, and the numbers that it needs.

    vocab: V; a target outside [0, V) that is not ignore_index makes its row's loss and row_sum nan. shard: 1
    where it may be in another shard: then its row of logit_out is nan instead, and losses are 0.
    loss: the reduction, of which "mean" divides by max(num_valid, 1), and ignore_index.
    rows: which tokens these are; n of them.
    Read: target (n,) int32 or int64, partials (partials, n, 2) fp32, target_logit (n,) fp32.
    Written: row_max and row_sum fp32, row_sum nan where the target is out of range, 0 and 1 where the token
    is not computed; losses fp32, if the reduction gives each token's; blocks (blocks, 2) fp32, the loss and
    the valid targets of each block; of a shard, and with a term that has slopes, logit_out (n,) fp32, the
    target's logit, nan where the target is no class. What is of each token lies at its origin.
    arrived: (1,) int32, zero before the launch, counts the blocks that are done; then one loss and num_valid
    (1,) int64, the targets that are not ignored, are written too. None: a launch after this one does that.
    bases: (n,) fp32, K of what is kept, where partials' exponents are relative to it; else None.
    Partials of epilogues.sums, and of what is kept plain, have exponents of two in the place of maxima.
    """

    vocab: Int32
    shard: Int32
    loss: LossArguments
    rows: Compacted
    target: cute.Tensor
    partials: cute.Tensor
    target_logit: cute.Tensor
    logit_out: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    losses: cute.Tensor
    num_valid: cute.Tensor
    blocks: cute.Tensor
    arrived: Any
    bases: Any = None


class Combine:
    """One block of 8 warps for 8 rows: a lane has every 32nd partial of a row. Six such blocks fit an SM,
    so that some 6,000 tokens are in flight together.

    Timeline of a block: what the launch before, the GEMM, does not write is loaded before that ends -> each
    lane merges its partials in registers -> the 4 lanes of a row by shuffles -> shared memory -> warp 0
    merges the 8 results, adds the targets' terms where sums lack them, writes the rows' statistics and losses
    and, by shuffles, the block's loss and count
    -> if blocks count their arrivals, the last adds up all of them (kernels.totals).
    Shared memory: 512 bytes of partials and 128 of sums. Bytes read: 8 a partial, once, of which a lane has
    AT_ONCE in flight.
    """

    def __init__(self, *, without_targets: bool = False):
        """without_targets: whether partials have exponents of two in the place of maxima, and sums lack the
        targets' terms."""
        self.without_targets = without_targets

    @cute.jit
    def __call__(self, tensors: CombineTensors, stream: cuda.CUstream):
        @cute.struct
        class SharedStorage:
            maxima: cute.struct.MemRange[Float32, WARPS * COMBINE_ROWS]
            sums: cute.struct.MemRange[Float32, WARPS * COMBINE_ROWS]
            totals: cute.struct.MemRange[Float64, WARPS * 2]
            last: cute.struct.MemRange[Int32, 1]

        self.storage = SharedStorage
        blocks = cute.ceil_div(cute.size(tensors.target), COMBINE_ROWS)
        self.kernel(tensors).launch(
            grid=(blocks, 1, 1), block=(LANES * WARPS, 1, 1), stream=stream, use_pdl=True
        )

    @cute.kernel
    def kernel(self, tensors: CombineTensors):
        lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx()
        block = cute.arch.block_idx()[0]
        blocks = cute.arch.grid_dim()[0]
        n = cute.size(tensors.target)
        line, share = lane % COMBINE_ROWS, lane // COMBINE_ROWS
        row = block * COMBINE_ROWS + line
        storage = cutlass.memory.SmemAllocator().allocate(self.storage)
        maxima = storage.maxima.get_tensor(cute.make_layout((WARPS, COMBINE_ROWS), stride=(COMBINE_ROWS, 1)))
        sums = storage.sums.get_tensor(cute.make_layout((WARPS, COMBINE_ROWS), stride=(COMBINE_ROWS, 1)))
        last = storage.last.get_tensor(cute.make_layout(1))

        exp = row_stats.exp
        if cutlass.const_expr(self.without_targets or tensors.bases is not None):
            exp = row_stats.exp2
        row_max, row_sum = -Float32.inf, Float32(0.0)
        is_computed = row < computed(tensors.rows, True)
        # These lanes complete a row, and load what they need for that before the launch before has ended.
        completes = warp == 0 and row < n and share == 0
        target, token, base = Int64(0), Int32(0), Float32(0.0)
        if completes:
            target, token = Int64(pdl.load(tensors.target, row)), origin(tensors.rows, row, True)
            if cutlass.const_expr(tensors.bases is not None):
                base = pdl.load(tensors.bases, row)
        pdl.begin()
        target_logit = Float32.nan
        if completes and target >= 0 and target < tensors.vocab:
            target_logit = tensors.target_logit[row]
        if is_computed:
            first, count = warp * (LANES // COMBINE_ROWS) + share, cute.size(tensors.partials, mode=[0])
            for number in cutlass.range(first, count, AT_ONCE * STEP, unroll=1):
                own_maxima, own_sums = load_partials(tensors.partials, number, row)
                for i in cutlass.range_constexpr(AT_ONCE):
                    if number + i * STEP < count:
                        row_max, row_sum = row_stats.merge(row_max, row_sum, own_maxima[i], own_sums[i], exp)
        for offset in cutlass.range_constexpr(2):
            other_max = cute.arch.shuffle_sync_bfly(row_max, offset=COMBINE_ROWS << offset)
            other_sum = cute.arch.shuffle_sync_bfly(row_sum, offset=COMBINE_ROWS << offset)
            row_max, row_sum = row_stats.merge(row_max, row_sum, other_max, other_sum, exp)
        if share == 0:
            maxima[warp, line] = row_max
            sums[warp, line] = row_sum
        cute.arch.sync_threads()
        if warp == 0:
            for other in cutlass.range_constexpr(1, WARPS):
                row_max, row_sum = row_stats.merge(
                    row_max, row_sum, maxima[other, line], sums[other, line], exp
                )
            loss, valid = Float32(0.0), Float32(0.0)
            if completes:
                if cutlass.const_expr(tensors.bases is not None):
                    if is_computed:
                        row_max, row_sum = _of_powers(row_max, row_sum, target_logit, base)
                if cutlass.const_expr(self.without_targets):
                    has_target = target >= 0 and target < tensors.vocab
                    row_max, row_sum = _with_target(row_max, row_sum, target_logit, has_target)
                if cutlass.const_expr(has_slope(tensors.loss)):
                    tensors.logit_out[token] = target_logit
                if tensors.shard != 0:
                    tensors.logit_out[token] = target_logit
                elif target != tensors.loss.ignore_index:
                    valid = Float32(1.0)
                    if target >= 0 and target < tensors.vocab:
                        loss = maths.row_loss(cute.math.log(row_sum), row_max, target_logit)
                    else:
                        row_sum = Float32.nan
                        loss = Float32.nan
                if not is_computed:
                    row_max, row_sum = Float32(0.0), Float32(1.0)
                tensors.row_max[token] = row_max
                tensors.row_sum[token] = row_sum
                if tensors.loss.reduction == REDUCTIONS["none"]:
                    tensors.losses[token] = loss
                if tensors.loss.reduction == REDUCTIONS["logprob"]:
                    # Not -loss, which is -0.0 in ignored rows.
                    tensors.losses[token] = Float32(0.0) - loss
            loss = cute.arch.warp_reduction(loss, lambda a, b: a + b)
            valid = cute.arch.warp_reduction(valid, lambda a, b: a + b)
            if lane == 0:
                tensors.blocks[block, 0] = loss
                tensors.blocks[block, 1] = valid
                if cutlass.const_expr(tensors.arrived is not None):
                    before = cute.arch.atomic_add(
                        tensors.arrived.iterator, Int32(1), sem="acq_rel", scope="gpu"
                    )
                    last[0] = Int32(before == blocks - 1)
        if cutlass.const_expr(tensors.arrived is not None):
            cute.arch.sync_threads()
            if last[0] == 1:
                cute.arch.fence_acq_rel_gpu()
                write_total(total_tensors(tensors), sums_of(storage.totals, WARPS))


def total_tensors(tensors: CombineTensors) -> TotalTensors:
    return TotalTensors(tensors.loss, tensors.blocks, tensors.losses, tensors.num_valid)


def _of_powers(exponent: Float32, row_sum: Float32, logit: Float32, base: Float32):
    """(row_max, row_sum) of a sum relative to 2^exponent: row_max is the target's logit if it has a share of
    the sum, or a number near the sum's logarithm.

    logit: nan if it is not known. base: that of its own term, which becomes exactly 1, so that a row whose
    target has nearly all probability loses no digits, and no loss is negative.
    """
    one = row_stats.exp2(maths.kept_exponent(logit, base, row_stats.fma))
    lift = exponent - base
    has_share = (one > 2.0**-30) & (one < 2.0**30) & (lift > -60.0) & (lift < 60.0)
    base = Float32(cutlass.select_(has_share, base, row_stats.finite_max(exponent)))
    row_max = Float32(cutlass.select_(has_share, logit, base * Float32(1 / maths.LOG2_E)))
    one = row_stats.exp2(maths.kept_exponent(row_max, base, row_stats.fma))
    power = row_stats.exp2(cutlass.select_(has_share, lift, Float32(0.0)))
    row_max = Float32(cutlass.select_(exponent == -Float32.inf, exponent, row_max))
    return row_max, row_sum * power / one


def _with_target(exponent: Float32, row_sum: Float32, logit: Float32, has_target: Boolean):
    """(row_max, row_sum) of a sum relative to 2^exponent and the target's term beside it. If the target has
    most of the sum, row_max is its logit, whose own term is exactly 1, so that a row whose target has nearly
    all probability loses no digits, and no loss is negative. Else it is a number near the sum's logarithm.

    The row becomes nan if a logit is nan or +inf, or if nothing is above LOWEST.
    """
    # A power near the sum, unless it would be no whole number of fp32.
    near = cute.math.floor(cute.math.log2(row_sum, fastmath=True))
    is_near = (row_sum > 0) & (row_sum < Float32.inf) & (exponent > -FAR) & (exponent < FAR)
    near = Float32(cutlass.select_(is_near, near, Float32(0.0)))
    exponent, row_sum = exponent + near, row_sum * row_stats.exp2(-near)
    others = row_sum * row_stats.exp2(maths.base_exponent(logit, exponent, row_stats.fma))
    has_share = has_target & (others < MOST_OTHERS)
    base = row_stats.finite_max(exponent)
    row_max = base * Float32(1 / maths.LOG2_E)
    one = row_stats.exp2(maths.kept_exponent(row_max, base, row_stats.fma))
    own = row_stats.exp2(maths.kept_exponent(logit, base, row_stats.fma))
    row_sum += Float32(cutlass.select_(has_target, own, Float32(0.0)))
    row_sum = Float32(cutlass.select_(has_share, Float32(1.0) + others, row_sum / one))
    # Of a target's logit that is nan or +inf nan, of others 0.
    is_strange = has_target & ~(logit == -Float32.inf)
    row_sum += Float32(cutlass.select_(is_strange, logit - logit, Float32(0.0)))
    row_sum = Float32(cutlass.select_(has_share & (logit < LOWEST), Float32.nan, row_sum))
    row_max = Float32(cutlass.select_(exponent == -Float32.inf, exponent, row_max))
    return Float32(cutlass.select_(has_share, logit, row_max)), row_sum


@cute.jit
def load_partials(partials: cute.Tensor, number: Int32, row: Int32) -> tuple[cute.Tensor, cute.Tensor]:
    """(maxima, sums) of a row's partials `number`, `number` + STEP, ..., AT_ONCE of them, all in flight
    together. Behind the last one it is loaded again: the compiler would delay loads under a condition."""
    maxima, sums = (cute.make_rmem_tensor(AT_ONCE, Float32) for _ in range(2))
    for i in cutlass.range_constexpr(AT_ONCE):
        at = cutlass.min(number + i * STEP, cute.size(partials, mode=[0]) - 1)
        maxima[i], sums[i] = partials[at, row, 0], partials[at, row, 1]
    return maxima, sums
