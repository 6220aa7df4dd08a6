"""The forward's epilogue: row statistics of the logits, and the target's logit."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_lce import maths
from cute_lce.arguments import LossArguments
from cute_lce.kernels import row_stats

NO_COLUMN = -(2**30)  # a target column that no tile contains


class ForwardTensors(NamedTuple):
    """Global memory that the forward's epilogue accesses, and sizes.

    target (n,) int32 or int64. partials (windows, n, 2) fp32: maximum and sum of every window. target_logit
    (n,) fp32: written for rows whose target lies in [0, vocab). arrived (1,) int32: the combine kernel's
    counter, zeroed here.
    vocab: V; columns at and beyond it are masked with -inf. loss: the loss's numbers.
    """

    target: cute.Tensor
    partials: cute.Tensor
    target_logit: cute.Tensor
    arrived: cute.Tensor
    vocab: Int32
    loss: LossArguments


class ForwardState(NamedTuple):
    """For each row of a thread: statistics of the columns seen in this run, and the target's column."""

    row_max: cute.Tensor
    row_sum: cute.Tensor
    target: cute.Tensor


class ForwardEpilogue:
    """Row statistics of the logits, and the target's logit.

    Args:
        tile_n: columns of a tile.
        threads_per_row: 4 for WGMMA's accumulators, 1 for TMEM.
    """

    def __init__(self, tile_n: int, threads_per_row: int):
        self.tile_n = tile_n
        self.threads_per_row = threads_per_row

    @cute.jit
    def begin(self, tensors: ForwardTensors, rows: cute.Tensor) -> ForwardState:
        """Statistics of nothing: maximum -inf, sum 0. rows (rows,) int32, which may lie beyond n."""
        if rows[0] == 0:
            tensors.arrived[0] = Int32(0)
        count = cute.size(rows)
        row_max = cute.make_rmem_tensor(count, Float32)
        row_sum = cute.make_rmem_tensor(count, Float32)
        target = cute.make_rmem_tensor(count, Int32)
        for r in cutlass.range_constexpr(count):
            row_max[r] = -Float32.inf
            row_sum[r] = Float32(0.0)
            target[r] = Int32(NO_COLUMN)
            if rows[r] < cute.size(tensors.target):
                index = tensors.target[rows[r]]
                if index >= 0 and index < tensors.vocab:
                    target[r] = Int32(index)
        return ForwardState(row_max, row_sum, target)

    @cute.jit
    def visit(
        self,
        tensors: ForwardTensors,
        state: ForwardState,
        frag: cute.Tensor,  # (rows, cols) fp32
        rows: cute.Tensor,
        cols: cute.Tensor,
        tile: Int32,
    ):
        self.mask_and_catch(tensors, state, frag, rows, cols, tile * self.tile_n)
        row_stats.update(state.row_max, state.row_sum, frag)

    @cute.jit
    def mask_and_catch(
        self,
        tensors: ForwardTensors,
        state: ForwardState,
        frag: cute.Tensor,
        rows: cute.Tensor,
        cols: cute.Tensor,
        first: Int32,
    ):
        """Products become logits, columns beyond the vocabulary -inf; the target's logit is stored if the
        fragment has it."""
        frag.store(maths.logits(frag.load(), tensors.loss))
        if first + self.tile_n > tensors.vocab:
            for c in cutlass.range_constexpr(cute.size(cols)):
                if first + cols[c] >= tensors.vocab:
                    for r in cutlass.range_constexpr(cute.size(rows)):
                        frag[r, c] = -Float32.inf
        for r in cutlass.range_constexpr(cute.size(rows)):
            column = state.target[r] - first
            if column >= 0 and column < self.tile_n:
                for c in cutlass.range_constexpr(cute.size(cols)):
                    if cols[c] == column:
                        tensors.target_logit[rows[r]] = frag[r, c]

    @cute.jit
    def end(self, tensors: ForwardTensors, state: ForwardState, rows: cute.Tensor, window: Int32):
        row_stats.merge_threads(state.row_max, state.row_sum, self.threads_per_row)
        if cute.arch.lane_idx() % self.threads_per_row == 0:
            for r in cutlass.range_constexpr(cute.size(rows)):
                if rows[r] < cute.size(tensors.target):
                    tensors.partials[window, rows[r], 0] = state.row_max[r]
                    tensors.partials[window, rows[r], 1] = state.row_sum[r]
