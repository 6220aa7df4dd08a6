"""The epilogue of the backward's logits: dlogits, rounded and stored."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_lce import maths
from cute_lce.arguments import LossArguments
from cute_lce.kernels import row_stats
from cute_lce.kernels.epilogues.statistics import NO_COLUMN
from cute_lce.kernels.epilogues.store import store_rows


class DlogitsTensors(NamedTuple):
    """Global memory that the epilogue of a stripe's logits accesses, and sizes.

    target (n,) int32 or int64. row_max, row_sum (n,) fp32: the forward's. dloss (n,) fp32, any stride (0:
    one number). num_valid (1,) int64. dlogits (n, columns) in the operands' dtype, rows 16-byte aligned:
    what is written.
    first, columns: the stripe's first column, and how many it has.
    """

    target: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    dloss: cute.Tensor
    num_valid: cute.Tensor
    dlogits: cute.Tensor
    loss: LossArguments
    first: Int32
    columns: Int32


class DlogitsState(NamedTuple):
    """For each row of a thread: what logits are relative to, the factors of exponentials and of the onehot,
    the target's column in the stripe, and whether the row is valid."""

    ref: cute.Tensor
    factor: cute.Tensor
    onehot: cute.Tensor
    target: cute.Tensor
    valid: cute.Tensor


class DlogitsEpilogue:
    """dlogits = grad_scale (softmax - onehot), rounded once; 0 in ignored rows, whatever their logits.

    Args:
        tile_n: columns of a tile.
        threads_per_row: threads that share a row, adjacent lanes.
        has_grad_scale: whether dlogits include grad_scale. The range of float16 is too small for it: there
            the gradients' epilogues apply it.
    """

    def __init__(self, tile_n: int, threads_per_row: int, has_grad_scale: bool):
        self.tile_n = tile_n
        self.threads_per_row = threads_per_row
        self.has_grad_scale = has_grad_scale

    @cute.jit
    def begin(self, tensors: DlogitsTensors, rows: cute.Tensor) -> DlogitsState:
        count = cute.size(rows)
        ref, factor, onehot = (cute.make_rmem_tensor(count, Float32) for _ in range(3))
        target, valid = cute.make_rmem_tensor(count, Int32), cute.make_rmem_tensor(count, Int32)
        for r in cutlass.range_constexpr(count):
            ref[r], factor[r], onehot[r] = Float32(0.0), Float32(0.0), Float32(0.0)
            target[r], valid[r] = Int32(NO_COLUMN), Int32(0)
            if rows[r] < cute.size(tensors.target):
                index = Int64(tensors.target[rows[r]])
                if index != tensors.loss.ignore_index:
                    valid[r] = Int32(1)
                    scale = Float32(1.0)
                    if cutlass.const_expr(self.has_grad_scale):
                        scale = row_stats.grad_scale(tensors.dloss, tensors.num_valid, tensors.loss, rows[r])
                    ref[r] = row_stats.finite_max(tensors.row_max[rows[r]])
                    factor[r] = maths.softmax_factor(scale, tensors.row_sum[rows[r]])
                    onehot[r] = scale
                    index = index - tensors.first
                    if index >= 0 and index < tensors.columns:
                        target[r] = Int32(index)
        return DlogitsState(ref, factor, onehot, target, valid)

    @cute.jit
    def visit(
        self,
        tensors: DlogitsTensors,
        state: DlogitsState,
        frag: cute.Tensor,  # (rows, cols) fp32
        rows: cute.Tensor,
        cols: cute.Tensor,
        tile: Int32,
    ):
        first = tile * self.tile_n
        frag.store(maths.logits(frag.load(), tensors.loss))
        for r in cutlass.range_constexpr(cute.size(rows)):
            for c in cutlass.range_constexpr(cute.size(cols)):
                frag[r, c] = state.factor[r] * maths.exponential(frag[r, c], state.ref[r], row_stats.exp)
            column = state.target[r] - first
            if column >= 0 and column < self.tile_n:
                for c in cutlass.range_constexpr(cute.size(cols)):
                    if cols[c] == column:
                        frag[r, c] = maths.dlogits(frag[r, c], state.onehot[r])
            if state.valid[r] == 0:
                for c in cutlass.range_constexpr(cute.size(cols)):
                    frag[r, c] = Float32(0.0)
        store_rows(tensors.dlogits, frag, rows, cols, first, self.threads_per_row)

    @cute.jit
    def end(self, tensors: DlogitsTensors, state: DlogitsState, rows: cute.Tensor, window: Int32):
        pass
