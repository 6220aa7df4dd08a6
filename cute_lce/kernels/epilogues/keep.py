"""The epilogue of a forward that keeps: statistics, and exponentials that the backward reads."""

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint16

from cute_lce import maths
from cute_lce.kernels.epilogues.dlogits import zero_ignored
from cute_lce.kernels.epilogues.statistics import (
    ForwardEpilogue,
    ForwardState,
    ForwardTensors,
    exponentials,
    fmax_each,
    highest,
)
from cute_lce.kernels.epilogues.store import store_columns
from cute_lce.kernels.fragment import (
    SHARED,
    Fragment,
    first_row_of_warp,
    fold,
)
from cute_lce.kernels.keep import KeepTensors
from cute_lce.kernels.row_stats import fma


class KeepForwardTensors(NamedTuple):
    """The forward's tensors, and those of what it keeps; ignored rows are kept as zeros."""

    forward: ForwardTensors
    keep: KeepTensors


class KeepState(NamedTuple):
    """The forward's state; K of each token that a lane owns, and in bits which of them are ignored; whether
    any of the warp's tokens is ignored."""

    forward: ForwardState
    reference: cute.Tensor
    ignored: Int32
    any_ignored: Boolean


class KeepEpilogue:
    """The forward's epilogue, which also keeps the exponentials of the first columns; see kernels.keep.

    A kept element's exponential is computed once, relative to its token's K, for the operand and for the
    statistics. A token has one j for a warp's rows of a tile, a unit; a vote says whether any of a warp's
    tokens needs one other than 0.
    """

    def __init__(self, fragment: Fragment, warps: int):
        self.fragment = fragment
        self.forward = ForwardEpilogue(fragment, warps)

    @cute.jit
    def begin(self, tensors: KeepForwardTensors, column: Int32) -> KeepState:
        fragment = self.fragment
        count = fragment.slabs * fragment.owned
        reference = cute.make_rmem_tensor(count, Float32)
        ignored = Int32(0)
        for slab in cutlass.range_constexpr(fragment.slabs):
            for i in cutlass.range_constexpr(fragment.owned):
                own = slab * fragment.owned + i
                reference[own] = Float32(0.0)
                token, owns = fragment.owned_column(column, slab, i)
                if Boolean(owns) and token < cute.size(tensors.forward.target):
                    reference[own] = tensors.keep.reference[token]
                    if Int64(tensors.forward.target[token]) == tensors.forward.loss.ignore_index:
                        ignored = ignored | (1 << own)
        return KeepState(
            self.forward.begin(tensors.forward, column),
            reference,
            ignored,
            cute.arch.vote_any_sync(ignored != 0),
        )

    @cute.jit
    def visit(
        self,
        tensors: KeepForwardTensors,
        state: KeepState,
        frag: cute.Tensor,  # (rows, cols) fp32
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
        split: Int32,
    ):
        self.forward.mask_and_catch(tensors.forward, frag, row, column, slab)
        # A tile is kept whole or, the vocabulary's last, up to the vocabulary's end.
        if first_row_of_warp(row) < tensors.keep.columns:
            self._keep(tensors, state, frag, row, column, slab)
        else:
            self.forward.accumulate(state.forward, frag, slab)

    @cute.jit
    def _keep(
        self,
        tensors: KeepForwardTensors,
        state: KeepState,
        frag: cute.Tensor,
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
    ):
        """Exponentials instead of the fragment's logits, stored, and their statistics."""
        fragment = self.fragment
        row_max = cute.make_rmem_tensor(fragment.owned, Float32)
        exceeds = Boolean(False)
        for i in cutlass.range_constexpr(fragment.owned):
            (row_max[i],) = fold(partial(highest, fragment, frag, SHARED * i), fmax_each)
            above = maths.kept_exponent(row_max[i], state.reference[slab * fragment.owned + i], fma)
            exceeds = exceeds or above > maths.HEADROOM
        raised = cute.arch.vote_any_sync(exceeds)
        if raised:
            self._raise(tensors, state, row_max, row, column, slab)
        else:
            self._note(tensors, None, row, column, slab)
        for i in cutlass.range_constexpr(fragment.owned):
            base = state.reference[slab * fragment.owned + i]
            leaf = partial(exponentials, fragment, frag, base, SHARED * i, in_place=True)
            (terms,) = fold(leaf, lambda a, b: (a + b,))
            self.forward.update(state.forward, slab * fragment.owned + i, row_max[i], terms, base)
            if state.any_ignored:
                own = (state.ignored >> (slab * fragment.owned + i)) & 1
                zero_ignored(fragment, own, frag, fragment.shared(i))
            store_columns(
                tensors.keep.kept,
                frag,
                row,
                column + slab * fragment.columns,
                fragment,
                fragment.shared(i),
            )
        if raised:
            for i in cutlass.range_constexpr(fragment.owned):
                token, owns = fragment.owned_column(column, slab, i)
                if Boolean(owns) and token < cute.size(tensors.forward.target):
                    state.reference[slab * fragment.owned + i] = tensors.keep.reference[token]

    @cute.jit
    def _raise(
        self,
        tensors: KeepForwardTensors,
        state: KeepState,
        row_max: cute.Tensor,
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
    ):
        """Find j of every token that the lane owns, in this unit, store it, and raise K for this fragment."""
        fragment = self.fragment
        steps = cute.make_rmem_tensor(fragment.owned, Float32)
        steps.fill(0.0)
        for i in cutlass.range_constexpr(fragment.owned):
            reference = state.reference[slab * fragment.owned + i]
            needed = maths.raise_steps(row_max[i], reference, fma, cute.math.ceil)
            steps[i] = cute.arch.fmin(cute.arch.fmax(needed, Float32(0.0)), Float32(maths.MOST_STEPS))
        self._note(tensors, steps, row, column, slab)
        for i in cutlass.range_constexpr(fragment.owned):
            own = slab * fragment.owned + i
            state.reference[own] = maths.raised(state.reference[own], steps[i])

    @cute.jit
    def _note(
        self,
        tensors: KeepForwardTensors,
        steps: cutlass.Constexpr,
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
    ):
        """Store j of the tokens that the lane owns; steps: None for zeros."""
        unit = self.fragment.unit(first_row_of_warp(row))
        for i in cutlass.range_constexpr(self.fragment.owned):
            token, owns = self.fragment.owned_column(column, slab, i)
            if Boolean(owns) and token < cute.size(tensors.forward.target):
                if cutlass.const_expr(steps is None):
                    tensors.keep.notes[unit, token] = Uint16(0)
                else:
                    tensors.keep.notes[unit, token] = Uint16(Int32(steps[i]))
                    if steps[i] > 0:
                        cute.arch.red(
                            (tensors.keep.most_raised.iterator + token),
                            Int32(steps[i]),
                            op="max",
                            dtype="s32",
                            sem="relaxed",
                            scope="gpu",
                        )

    @cute.jit
    def end(self, tensors: KeepForwardTensors, state: KeepState, column: Int32, number: Int32):
        self.forward.end(tensors.forward, state.forward, column, number)
