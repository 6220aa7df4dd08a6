"""What happens to a tile of fp32 logits in registers. The mainloops move data; the mathematics of the loss is here.

A mainloop calls, for every run (a row of tiles and a range of the vocabulary's tiles):

    state = epilogue.begin(tensors, rows)              # registers that live through the run
    epilogue.visit(tensors, state, frag, cols, tile)   # each slab of columns of each tile, in place
    epilogue.end(tensors, state, rows, window)         # results of the run

`rows` (rows,) and `cols` (cols,) are the thread's coordinates: its global row indices and, inside the tile, its column
indices. The architecture shows only in how many rows a thread has and over how many threads a row is spread.
An epilogue is a compile-time value; what it reads and writes in global memory is in its NamedTuple of tensors.
"""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_lce.kernels import row_stats

NO_COLUMN = -(2**30)  # a target column that no tile contains


class ForwardTensors(NamedTuple):
    """Global memory of the forward's epilogue, and its sizes.

    target (n,) int32 or int64. partials (windows, n, 2) fp32: maximum and sum of every window. target_logit (n,) fp32:
    written for rows whose target lies in [0, vocab). arrived (1,) int32: the combine kernel's counter, set to zero here.
    vocab: V; columns at and beyond it are masked with -inf.
    """

    target: cute.Tensor
    partials: cute.Tensor
    target_logit: cute.Tensor
    arrived: cute.Tensor
    vocab: Int32


class ForwardState(NamedTuple):
    """Per thread: statistics (rows,) of the columns seen in this run, and the rows' target columns."""

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
        first = tile * self.tile_n
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
        row_stats.update(state.row_max, state.row_sum, frag)

    @cute.jit
    def end(self, tensors: ForwardTensors, state: ForwardState, rows: cute.Tensor, window: Int32):
        row_stats.merge_threads(state.row_max, state.row_sum, self.threads_per_row)
        if cute.arch.lane_idx() % self.threads_per_row == 0:
            for r in cutlass.range_constexpr(cute.size(rows)):
                if rows[r] < cute.size(tensors.target):
                    tensors.partials[window, rows[r], 0] = state.row_max[r]
                    tensors.partials[window, rows[r], 1] = state.row_sum[r]
