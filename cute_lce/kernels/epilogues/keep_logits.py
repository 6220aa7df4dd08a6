"""The epilogue of a forward that keeps logits (kernels/kept_logits.py)."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float16, Float32, Int32

from cute_lce.arguments import KEPT_TILE
from cute_lce.kernels.epilogues.statistics import ForwardEpilogue, ForwardState, ForwardTensors
from cute_lce.kernels.epilogues.store import Staging, store_columns
from cute_lce.kernels.fragment import SHARED, Fragment, first_row_of_warp, spread
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

    def __init__(self, fragment: Fragment, warps: int):
        if len(fragment.rows) != 4:
            raise ValueError(f"config: got {len(fragment.rows)} blocks of a warp's rows, want 4 to keep")
        self.fragment = fragment
        self.forward = ForwardEpilogue(fragment, warps)
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
        highest = self.forward.accumulate(state, frag, row, forward.vocab, slab, of)
        self.forward.count_seen(state, slab, of)
        # A tile is kept whole or, the vocabulary's last, up to the vocabulary's end; all warps keep together.
        if first_row_of_warp(row) // KEPT_TILE * KEPT_TILE < tensors.keep.columns:
            self._keep(tensors, staging, frag, highest, row, column, slab)

    @cute.jit
    def _keep(
        self,
        tensors: KeepLogitsTensors,
        staging: Staging,
        frag: cute.Tensor,
        highest: cute.Tensor,
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
    ):
        """Store a slab. highest: of each token that the lane owns, in the warp's rows of the tile, a unit."""
        fragment, notes = self.fragment, tensors.keep.notes
        unit = fragment.unit(first_row_of_warp(row))
        for i in cutlass.range_constexpr(fragment.owned):
            token, exists = fragment.owned_column(column, slab, i, cute.size(tensors.forward.target))
            own = note(highest[i])
            if exists:
                notes[unit, token] = own.to(Float16)
            for c in fragment.shared(i):
                base = spread(own, c % SHARED)
                for r in cutlass.range_constexpr(len(fragment.rows)):
                    frag[r, c] = Float32(base - frag[r, c])
            only = range(i, i + 1)
            store_columns(tensors.keep.out, staging, frag, row, column, fragment, slab, only)

    @cute.jit
    def end(self, tensors: KeepLogitsTensors, state: ForwardState, column: Int32, partial: Int32):
        self.forward.end(tensors.forward, state, column, partial)
