"""The kernels that "keep" adds to the forward: the rows' references before its GEMM, and the completion of
the kept operand after it.

What is kept is E = bf16(2^(z log2 e - K)) with one integer K for each row. bf16 has fp32's exponent range, so
E is as precise as dlogits rounded to bf16, and with v = grad_scale 2^K exp(-lse) for each row

    dhidden = v (E' weight)        dweight = E'^T (v hidden)        E' = E - onehot 2^(lse log2 e - K)

are plain GEMMs, for any upstream vector. K is the target's logit in base 2, rounded down: no logit that
matters lies far below it. Where a row exceeds K by more than 64 within a unit (32 columns of the vocabulary,
those of one warp in a tile: Fragment.unit), it is stored relative to K + 128 j, and j is noted in 16 bits.
`Finish` rescales such rows, which are rare, to one K, and subtracts the onehot. Both steps are exact in bf16
except for the target's own entry, which is rounded once. A row whose maximum lies that far above K in columns
that are not kept is raised too, since 2^(lse log2 e - K) must be finite.

K is limited to +-FAR, which also stands for a target's logit of -inf, and j to MOST_STEPS. So a kept logit
may lie 2^23 in base 2, 5.8 million nats, above its row's K, and reach 2.9 million nats if the target's logit
is -inf. A row beyond that, or with all logits below -2.9 million nats, becomes nan.
"""

from typing import NamedTuple

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_lce import maths
from cute_lce.arguments import LossArguments
from cute_lce.kernels.adjacent import adjacent
from cute_lce.kernels.fragment import Fragment
from cute_lce.kernels.row_stats import fma
from cute_lce.maths import FAR, LOG2_E, STEP

WARPS = 4
ROWS = 32


class KeepTensors(NamedTuple):
    """Global memory of a forward that keeps.

    kept (n, columns) bf16: E. reference (n,) fp32: K. notes (units, n) uint16: j of a row and a unit of
    columns. most_raised (n,) int32: the largest j of a row. kept_scale (n,) fp32: 2^K exp(-lse) with the
    raised K, which is v without grad_scale. columns: how many are kept: whole tiles, or V.
    """

    kept: cute.Tensor
    reference: cute.Tensor
    notes: cute.Tensor
    most_raised: cute.Tensor
    kept_scale: cute.Tensor
    columns: Int32


class References:
    """K of every row, floor(<hidden, weight of the target> log2 e), and zeros for `most_raised`.

    A warp for each row, 8 elements a lane at once; a row whose target is not a class uses class 0. 4 d bytes
    are read a row.
    """

    @cute.jit
    def __call__(self, hidden, weight, target, keep: KeepTensors, loss: LossArguments, stream: cuda.CUstream):
        n = cute.size(target)
        self.kernel(hidden, weight, target, keep, loss).launch(
            grid=(cute.ceil_div(n, WARPS), 1, 1), block=(32 * WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        hidden: cute.Tensor,
        weight: cute.Tensor,
        target: cute.Tensor,
        keep: KeepTensors,
        loss: LossArguments,
    ):
        lane = cute.arch.lane_idx()
        row = cute.arch.block_idx()[0] * WARPS + cute.arch.warp_idx()
        if row < cute.size(target):
            index = Int64(target[row])
            if index < 0 or index >= cute.size(weight, mode=[0]):
                index = Int64(0)
            total = Float32(0.0)
            for chunk in cutlass.range(lane, cute.size(hidden, mode=[1]) // 8, 32, unroll=1):
                a = cute.make_rmem_tensor(8, hidden.element_type)
                b = cute.make_rmem_tensor(8, weight.element_type)
                cute.autovec_copy(adjacent(hidden, row, chunk * 8, 8), a)
                cute.autovec_copy(adjacent(weight, index, chunk * 8, 8), b)
                for i in cutlass.range_constexpr(8):
                    total += a[i].to(Float32) * b[i].to(Float32)
            total = cute.arch.warp_reduction(total, lambda a, b: a + b)
            if lane == 0:
                total = maths.logits(total, loss)
                bound = cute.arch.fmin(cute.arch.fmax(total * Float32(LOG2_E), Float32(-FAR)), Float32(FAR))
                keep.reference[row] = cute.math.floor(bound)
                keep.most_raised[row] = Int32(0)


class Finish:
    """After the statistics: one K for raised rows, the target's entry, kept_scale. A block for 32 rows."""

    def __init__(self, fragment: Fragment):
        self.fragment = fragment

    @cute.jit
    def __call__(
        self, keep: KeepTensors, target, target_logit, row_max, row_sum, loss, stream: cuda.CUstream
    ):
        self.kernel(keep, target, target_logit, row_max, row_sum, loss).launch(
            grid=(cute.ceil_div(cute.size(target), ROWS), 1, 1), block=(32 * WARPS, 1, 1), stream=stream
        )

    @cute.kernel
    def kernel(
        self,
        keep: KeepTensors,
        target: cute.Tensor,
        target_logit: cute.Tensor,
        row_max: cute.Tensor,
        row_sum: cute.Tensor,
        loss: LossArguments,
    ):
        thread = cute.arch.thread_idx()[0]
        first = cute.arch.block_idx()[0] * ROWS
        for r in cutlass.range(ROWS, unroll=1):
            if first + r < cute.size(target):
                self._level(keep, row_max, first + r, thread)
        cute.arch.sync_threads()
        row = first + thread
        if thread < ROWS and row < cute.size(target):
            k = maths.raised(keep.reference[row], _steps(keep, row_max, row).to(Float32))
            # 2^(lse log2 e - K): what E sums to over the whole vocabulary.
            total = row_sum[row] * cute.math.exp2(maths.kept_exponent(row_max[row], k, fma), fastmath=True)
            keep.kept_scale[row] = maths.softmax_factor(
                cute.math.exp2(maths.base_exponent(row_max[row], k, fma)), row_sum[row]
            )
            index = Int64(target[row])
            if index != loss.ignore_index and index >= 0 and index < keep.columns:
                own = cute.math.exp2(maths.kept_exponent(target_logit[row], k, fma), fastmath=True)
                keep.kept[row, Int32(index)] = maths.dlogits(own, total).to(keep.kept.element_type)

    @cute.jit
    def _level(self, keep: KeepTensors, row_max: cute.Tensor, row: Int32, thread: Int32):
        """Rescale all units of a row to one K."""
        most = _steps(keep, row_max, row)
        if most > 0:
            for column in cutlass.range(thread, keep.columns, 32 * WARPS, unroll=1):
                # The DSL sign-extends even an unsigned type.
                behind = most - (keep.notes[self.fragment.unit(column), row].to(Int32) & 65535)
                if behind > 0:
                    value = (
                        keep.kept[row, column].to(Float32)
                        * Float32(2.0 ** (-STEP / 2))
                        * Float32(2.0 ** (-STEP / 2))
                    )
                    if behind > 1:
                        value = Float32(0.0)
                    keep.kept[row, column] = value.to(keep.kept.element_type)


@cute.jit
def _steps(keep: KeepTensors, row_max: cute.Tensor, row: Int32):
    """j of a whole row: the largest of its units, or what its maximum, kept or not, requires."""
    most = keep.most_raised[row]
    steps = maths.raise_steps(row_max[row], keep.reference[row], fma, cute.math.ceil)
    steps = Int32(cute.arch.fmin(cute.arch.fmax(steps, Float32(0.0)), Float32(FAR)))
    if steps > most:
        most = steps
    return most
