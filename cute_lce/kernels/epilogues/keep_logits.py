"""The epilogue of a forward that keeps logits (kernels/kept_logits.py)."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float16, Float32, Int32

from cute_lce.arguments import KEPT_TILE
from cute_lce.kernels.epilogues.keep import IN_REGISTERS
from cute_lce.kernels.epilogues.leaves import TotalOf
from cute_lce.kernels.epilogues.logits import ForwardTensors
from cute_lce.kernels.epilogues.statistics import ForwardEpilogue, ForwardState
from cute_lce.kernels.epilogues.store import Staging, store_columns
from cute_lce.kernels.fragment import SHARED, Fragment, first_row_of_warp, opaque, spread
from cute_lce.kernels.kept_logits import Notes, note


class KeepLogitsTensors(NamedTuple):
    """The forward's tensors, and what it keeps. Of ignored rows something is kept that nobody reads."""

    forward: ForwardTensors
    keep: Notes


class KeepLogitsEpilogue:
    """The forward's epilogue, behind which a tile's logits are stored relative to their units' notes."""

    stores = True
    streams = False
    scarce_registers = True

    def __init__(self, fragment: Fragment, warps: int, *, total: bool):
        if len(fragment.rows) != 4:
            raise ValueError(f"config: got {len(fragment.rows)} blocks of a warp's rows, want 4 to keep")
        self.fragment = fragment
        self.forward = ForwardEpilogue(fragment, warps, IN_REGISTERS, total=total)
        self.words = self.forward.words

    @cute.jit
    def begin(self, tensors: KeepLogitsTensors, column: Int32, staging: Staging) -> ForwardState:
        return self.forward.begin(tensors.forward, column, staging)

    @cute.jit
    def visit(
        self,
        tensors: KeepLogitsTensors,
        staging: Staging,
        state: ForwardState,
        frag: cute.Tensor,  # (rows, cols) fp32
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
        split: Int32,
    ):
        forward = tensors.forward
        self.forward.mask_and_catch(forward, state, frag, row, column, slab)
        of = self.forward.total_of(forward, row)
        # A tile is kept whole or, the vocabulary's last, up to the vocabulary's end; all warps keep together.
        keeps = first_row_of_warp(row) // KEPT_TILE * KEPT_TILE < tensors.keep.columns
        for i in cutlass.range_constexpr(self.fragment.owned):
            self._column(tensors, staging, state, frag, row, column, slab, of, i, keeps)
        self.forward.count_seen(state, slab, of)

    @cute.jit
    def _column(
        self,
        tensors: KeepLogitsTensors,
        staging: Staging,
        state: ForwardState,
        frag: cute.Tensor,
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
        of: TotalOf | None,
        i: cutlass.Constexpr[int],
        keeps: Boolean,
    ):
        """Add the logits of a slab's i-th 32 columns to the statistics; store them if the tile is kept."""
        fragment, only = self.fragment, range(i, i + 1)
        highest = self.forward.accumulate(state, frag, row, tensors.forward.vocab, slab, of, only)
        if keeps:
            # The maximum of each token that the lane owns, in the warp's rows of the tile, a unit.
            unit = fragment.unit(first_row_of_warp(row))
            column = opaque(column)
            token, exists = fragment.owned_column(column, slab, i, cute.size(tensors.forward.target))
            own = note(highest[i])
            if exists:
                tensors.keep.notes[unit, token] = own.to(Float16)
            for c in fragment.shared(i):
                base = spread(own, c % SHARED)
                for r in cutlass.range_constexpr(len(fragment.rows)):
                    frag[r, c] = Float32(base - frag[r, c])
            store_columns(tensors.keep.out, staging, frag, row, column, fragment, slab, only)

    @cute.jit
    def end(
        self, tensors: KeepLogitsTensors, staging: Staging, state: ForwardState, column: Int32, partial: Int32
    ):
        self.forward.end(tensors.forward, staging, state, column, partial, self.stores)
