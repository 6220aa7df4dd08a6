"""The epilogue of a forward that keeps: statistics, and exponentials that the backward reads."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint16

from cute_lce.kernels import row_stats
from cute_lce.kernels.epilogues.statistics import ForwardEpilogue, ForwardState, ForwardTensors
from cute_lce.kernels.epilogues.store import store_rows
from cute_lce.kernels.keep import KeepTensors


class KeepForwardTensors(NamedTuple):
    """The forward's tensors, and those of what it keeps; ignored rows are kept as zeros."""

    forward: ForwardTensors
    keep: KeepTensors


class KeepState(NamedTuple):
    """The forward's state and, for each row, K and whether the row is valid."""

    forward: ForwardState
    reference: cute.Tensor
    valid: cute.Tensor


class KeepEpilogue:
    """The forward's epilogue, which also keeps the exponentials of the first columns; see kernels.keep.

    A kept fragment's exponentials are computed once, relative to the row's K, for the operand and for the
    statistics. A row of a fragment has one j: `unit` columns, those of one call of visit.
    """

    def __init__(self, tile_n: int, unit: int, threads_per_row: int):
        self.tile_n = tile_n
        self.unit = unit
        self.threads_per_row = threads_per_row
        self.forward = ForwardEpilogue(tile_n, threads_per_row)

    @cute.jit
    def begin(self, tensors: KeepForwardTensors, rows: cute.Tensor) -> KeepState:
        count = cute.size(rows)
        reference, valid = cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Int32)
        for r in cutlass.range_constexpr(count):
            reference[r], valid[r] = Float32(0.0), Int32(0)
            if rows[r] < cute.size(tensors.forward.target):
                reference[r] = tensors.keep.reference[rows[r]]
                if Int64(tensors.forward.target[rows[r]]) != tensors.forward.loss.ignore_index:
                    valid[r] = Int32(1)
        return KeepState(self.forward.begin(tensors.forward, rows), reference, valid)

    @cute.jit
    def visit(
        self,
        tensors: KeepForwardTensors,
        state: KeepState,
        frag: cute.Tensor,  # (rows, cols) fp32
        rows: cute.Tensor,
        cols: cute.Tensor,
        tile: Int32,
    ):
        first = tile * self.tile_n
        self.forward.mask_and_catch(tensors.forward, state.forward, frag, rows, cols, first)
        if first < tensors.keep.columns:
            for r in cutlass.range_constexpr(cute.size(rows)):
                steps = row_stats.update_relative(
                    state.forward.row_max,
                    state.forward.row_sum,
                    frag,
                    state.reference[r],
                    r,
                    self.threads_per_row,
                )
                if state.valid[r] == 0:
                    for c in cutlass.range_constexpr(cute.size(cols)):
                        frag[r, c] = Float32(0.0)
                if rows[r] < cute.size(tensors.forward.target):
                    if self._notes(tensors, cols, first):
                        tensors.keep.notes[(first + cols[0]) // self.unit, rows[r]] = Uint16(steps)
                        if steps > 0:
                            cute.arch.red(
                                (tensors.keep.most_raised.iterator + rows[r]),
                                steps,
                                op="max",
                                dtype="s32",
                                sem="relaxed",
                                scope="gpu",
                            )
            store_rows(tensors.keep.kept, frag, rows, cols, first, self.threads_per_row)
        else:
            row_stats.update(state.forward.row_max, state.forward.row_sum, frag)

    def _notes(self, tensors: KeepForwardTensors, cols: cute.Tensor, first: Int32):
        """Whether this thread, of those that share a row, stores its j."""
        if self.unit < self.tile_n:
            # A thread has the whole row; a slab of its tile may lie beyond the columns, where there is no j.
            return first + cols[0] < tensors.keep.columns
        return cols[0] % 8 == 0

    @cute.jit
    def end(self, tensors: KeepForwardTensors, state: KeepState, rows: cute.Tensor, window: Int32):
        self.forward.end(tensors.forward, state.forward, rows, window)
