"""The epilogue of a forward that keeps: statistics, and exponentials that the backward reads."""

from functools import partial
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint16

from cute_lce import maths
from cute_lce.kernels import row_stats
from cute_lce.kernels.epilogues.dlogits import zero_ignored
from cute_lce.kernels.epilogues.statistics import NOTHING, ForwardEpilogue, ForwardState, ForwardTensors
from cute_lce.kernels.epilogues.store import store_columns
from cute_lce.kernels.fragment import (
    SHARED,
    Fragment,
    first_row_of_warp,
    fold,
    highest_of_column,
    owns_element,
    spread,
)
from cute_lce.kernels.keep import KeepTensors
from cute_lce.kernels.row_stats import fma


class KeepForwardTensors(NamedTuple):
    """The forward's tensors, and those of what it keeps; ignored rows are kept as zeros."""

    forward: ForwardTensors
    keep: KeepTensors


class KeepState(NamedTuple):
    """The forward's state; K of each token that a lane owns, and in bits which of them are ignored; the least
    K of the warp's tokens, and whether any of them is ignored."""

    forward: ForwardState
    reference: cute.Tensor
    ignored: Int32
    least: Float32
    any_ignored: Boolean


class KeepEpilogue:
    """The forward's epilogue, which also keeps the exponentials of the first columns; see kernels.keep.

    A kept element's exponential is computed once, relative to its token's K, for the operand and for the
    statistics. A token has one j for a warp's rows of a tile, a unit. Whether any element of a warp needs a
    j other than 0 is a maximum and a vote: j is then found column by column.
    """

    def __init__(self, fragment: Fragment, warps: int):
        self.fragment = fragment
        self.forward = ForwardEpilogue(fragment, warps)

    @cute.jit
    def begin(self, tensors: KeepForwardTensors, column: Int32) -> KeepState:
        fragment = self.fragment
        count = fragment.slabs * fragment.owned
        reference = cute.make_rmem_tensor(count, Float32)
        least, ignored = Float32(maths.FAR), Int32(0)
        for slab in cutlass.range_constexpr(fragment.slabs):
            for i in cutlass.range_constexpr(fragment.owned):
                own = slab * fragment.owned + i
                reference[own] = Float32(0.0)
                token, owns = fragment.owned_column(column, slab, i)
                if Boolean(owns) and token < cute.size(tensors.forward.target):
                    reference[own] = tensors.keep.reference[token]
                    least = cute.arch.fmin(least, reference[own])
                    if Int64(tensors.forward.target[token]) == tensors.forward.loss.ignore_index:
                        ignored = ignored | (1 << own)
        return KeepState(
            self.forward.begin(tensors.forward, column),
            reference,
            ignored,
            cute.arch.warp_reduction(least, cute.arch.fmin),
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
        forward = tensors.forward
        self.forward.mask_and_catch(forward, state.forward, frag, row, column, slab)
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
        highest = frag[0, 0]
        for c in cutlass.range_constexpr(fragment.count):
            for r in cutlass.range_constexpr(len(fragment.rows)):
                highest = cute.arch.fmax(highest, frag[r, c])
        raised = cute.arch.vote_any_sync(maths.kept_exponent(highest, state.least, fma) > maths.HEADROOM)
        if raised:
            self._raise(tensors, state, frag, row, column, slab)
        else:
            self._note(tensors, None, row, column, slab)
        for i in cutlass.range_constexpr(fragment.owned):
            base = state.reference[slab * fragment.owned + i]
            row_max, total = fold(partial(exponentials, fragment, frag, base, SHARED * i), highest_and_sum)
            # From 2^base to exp(row_max). If nothing lies near K, the sum is 0 and the exponent may exceed
            # fp32.
            back = maths.base_exponent(row_stats.finite_max(row_max), base, fma)
            total = total * cute.math.exp2(cute.arch.fmin(back, Float32(126.0)), fastmath=True)
            self.forward.update(state.forward, slab * fragment.owned + i, row_max, total)
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
        frag: cute.Tensor,
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
    ):
        """Find j of every token that the lane owns, in this unit, store it, and raise K for this fragment."""
        fragment = self.fragment
        steps = cute.make_rmem_tensor(fragment.owned, Float32)
        steps.fill(0.0)
        for c in cutlass.range_constexpr(fragment.count):
            highest = frag[0, c]
            for r in cutlass.range_constexpr(1, len(fragment.rows)):
                highest = cute.arch.fmax(highest, frag[r, c])
            highest = highest_of_column(highest)
            reference = spread(state.reference[slab * fragment.owned + c // SHARED], c)
            needed = maths.raise_steps(highest, reference, fma, cute.math.ceil)
            needed = cute.arch.fmin(cute.arch.fmax(needed, Float32(0.0)), Float32(maths.MOST_STEPS))
            if owns_element(c):
                steps[c // SHARED] = needed
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


def exponentials(fragment: Fragment, frag: cute.Tensor, base: Float32, first: int, j: int):
    """Replace a thread's elements of a column by 2^(z log2 e - K); returns (maximum of z, sum of those).

    base: K of the column that this lane owns among the 32 with elements first, first + 1, ...
    """
    c, heights = first + j, len(fragment.rows)
    if c >= fragment.count:
        return NOTHING
    base = spread(base, j)
    highest, total = frag[0, c], Float32(0.0)
    for r in range(heights):
        highest = cute.arch.fmax(highest, frag[r, c])
        frag[r, c] = cute.math.exp2(maths.kept_exponent(frag[r, c], base, fma), fastmath=True)
        total = frag[r, c] if r == 0 else total + frag[r, c]
    return highest, total


def highest_and_sum(a_max: Float32, a_sum: Float32, b_max: Float32, b_sum: Float32):
    """Merge (maximum, sum) of sums relative to the same base."""
    return cute.arch.fmax(a_max, b_max), a_sum + b_sum
