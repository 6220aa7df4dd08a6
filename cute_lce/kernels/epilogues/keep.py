"""The epilogue of a forward that keeps: statistics, and exponentials that the backward reads."""

import functools
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
from cute_lce.kernels.fragment import SHARED, Fragment, first_row_of_warp, fold
from cute_lce.kernels.keep import KeepTensors
from cute_lce.kernels.row_stats import fma


class KeepForwardTensors(NamedTuple):
    """The forward's tensors, and those of what it keeps; ignored rows are kept as zeros."""

    forward: ForwardTensors
    keep: KeepTensors


class KeepState(NamedTuple):
    """The forward's state; in bits which of the tokens that a lane owns are ignored, and whether any of the
    warp's is."""

    forward: ForwardState
    ignored: Int32
    any_ignored: Boolean


class KeepEpilogue:
    """The forward's epilogue, which also keeps the exponentials of the first columns; see kernels.keep.

    A kept element's exponential is computed once, relative to its token's K, for the operand and for the
    statistics. A token has one j for a warp's rows of a tile, a unit.
    """

    def __init__(self, fragment: Fragment, warps: int, kept: maths.KeptRange):
        if len(fragment.rows) != 4:
            raise ValueError(f"config: got {len(fragment.rows)} blocks of a warp's rows, want 4 to keep")
        self.fragment = fragment
        self.kept = kept
        self.forward = ForwardEpilogue(fragment, warps)

    @cute.jit
    def begin(self, tensors: KeepForwardTensors, column: Int32) -> KeepState:
        fragment, target = self.fragment, tensors.forward.target
        ignored = Int32(0)
        for slab in cutlass.range_constexpr(fragment.slabs):
            for i in cutlass.range_constexpr(fragment.owned):
                token, owns = fragment.owned_column(column, slab, i)
                if Boolean(owns) and token < cute.size(target):
                    if Int64(target[token]) == tensors.forward.loss.ignore_index:
                        ignored = ignored | (1 << (slab * fragment.owned + i))
        forward = self.forward.begin(tensors.forward, column)
        return KeepState(forward, ignored, cute.arch.vote_any_sync(ignored != 0))

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
        fragment, keep = self.fragment, tensors.keep
        unit = fragment.unit(first_row_of_warp(row))
        for i in cutlass.range_constexpr(fragment.owned):
            token, owns = fragment.owned_column(column, slab, i)
            has_token = Boolean(owns) and token < cute.size(tensors.forward.target)
            # Read for every tile: registers are scarcer than loads.
            reference = Float32(0.0)
            if has_token:
                reference = keep.reference[token]
            (row_max,) = fold(functools.partial(highest, fragment, frag, SHARED * i), fmax_each)
            steps = maths.raise_steps(row_max, reference, self.kept, fma, cute.math.ceil)
            steps = cute.arch.fmin(cute.arch.fmax(steps, Float32(0.0)), Float32(maths.MOST_STEPS))
            if has_token:
                keep.notes[unit, token] = Uint16(Int32(steps))
                if steps > 0:
                    cute.arch.red(
                        (keep.most_raised.iterator + token),
                        Int32(steps),
                        op="max",
                        dtype="s32",
                        sem="relaxed",
                        scope="gpu",
                    )
            base = maths.raised(reference, steps, self.kept)
            leaf = functools.partial(exponentials, fragment, frag, base, SHARED * i, in_place=True)
            (terms,) = fold(leaf, lambda a, b: (a + b,))
            self.forward.update(state.forward, slab * fragment.owned + i, row_max, terms, base)
            if state.any_ignored:
                ignored = (state.ignored >> (slab * fragment.owned + i)) & 1
                zero_ignored(fragment, ignored, frag, fragment.shared(i))
            store_columns(
                keep.kept,
                frag,
                row,
                column + slab * fragment.columns,
                fragment,
                fragment.shared(i),
            )

    @cute.jit
    def end(self, tensors: KeepForwardTensors, state: KeepState, column: Int32, partial: Int32):
        self.forward.end(tensors.forward, state.forward, column, partial)
