"""The forward's epilogue: row statistics of the logits, and the target's logit."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_lce import maths
from cute_lce.arguments import LossArguments
from cute_lce.kernels import row_stats
from cute_lce.kernels.fragment import SHARED, Fragment, first_row_of_warp, fold, spread

NO_ROW = -(2**30)  # a target that no tile contains


class ForwardTensors(NamedTuple):
    """Global memory that the forward's epilogue accesses, and sizes.

    target (n,) int32 or int64. partials (partials, n, 2) fp32: maximum and sum of every window and warp.
    target_logit (n,) fp32: written for tokens whose target lies in [0, vocab). arrived (1,) int32: the
    combine kernel's counter, zeroed here.
    vocab: V; rows of tiles at and beyond it are masked with -inf. loss: the loss's numbers.
    """

    target: cute.Tensor
    partials: cute.Tensor
    target_logit: cute.Tensor
    arrived: cute.Tensor
    vocab: Int32
    loss: LossArguments


class ForwardState(NamedTuple):
    """For each token that a lane owns: statistics of the classes that its warp has seen in this run, and the
    target."""

    row_max: cute.Tensor
    row_sum: cute.Tensor
    target: cute.Tensor


class ForwardEpilogue:
    """Row statistics of the logits, and the target's logit.

    Each warp has partials of its own: of its rows of its warpgroup's tiles of a window.
    """

    def __init__(self, fragment: Fragment, warps: int):
        """warps: that share a tile; the numbers of their warps in the CTA differ modulo `warps`."""
        self.fragment = fragment
        self.warps = warps

    @cute.jit
    def begin(self, tensors: ForwardTensors, column: Int32) -> ForwardState:
        """Statistics of nothing: maximum -inf, sum 0. The column may lie beyond n."""
        if column == 0:
            tensors.arrived[0] = Int32(0)
        count = self.fragment.slabs * self.fragment.owned
        row_max = cute.make_rmem_tensor(count, Float32)
        row_sum = cute.make_rmem_tensor(count, Float32)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        return ForwardState(row_max, row_sum, targets(self.fragment, tensors.target, column, tensors.vocab))

    @cute.jit
    def visit(
        self,
        tensors: ForwardTensors,
        state: ForwardState,
        frag: cute.Tensor,  # (rows, cols) fp32
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
        split: Int32,
    ):
        self.mask_and_catch(tensors, state, frag, row, column, slab)
        self.accumulate(state, frag, slab)

    def accumulate(self, state: ForwardState, frag: cute.Tensor, slab: int):
        """Merge a fragment of logits into the statistics."""
        heights = len(self.fragment.rows)
        for i in range(self.fragment.owned):
            values = [
                row_stats.column_statistics([frag[r, c] for r in range(heights)])
                for c in self.fragment.shared(i)
            ]
            values += [(-Float32.inf, Float32(0.0))] * (SHARED - len(values))
            self.update(state, slab * self.fragment.owned + i, *fold(values, row_stats.merge))

    def update(self, state: ForwardState, own, row_max: Float32, row_sum: Float32):
        """Merge statistics into those of a token that this lane owns."""
        state.row_max[own], state.row_sum[own] = row_stats.merge(
            state.row_max[own], state.row_sum[own], row_max, row_sum
        )

    @cute.jit
    def mask_and_catch(
        self,
        tensors: ForwardTensors,
        state: ForwardState,
        frag: cute.Tensor,
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
    ):
        """Products become logits, rows beyond the vocabulary -inf; the targets' logits in the fragment are
        stored."""
        fragment = self.fragment
        frag.store(maths.logits(frag.load(), tensors.loss))
        if row + fragment.rows[-1] >= tensors.vocab:
            for r in cutlass.range_constexpr(len(fragment.rows)):
                if row + fragment.rows[r] >= tensors.vocab:
                    for c in cutlass.range_constexpr(fragment.count):
                        frag[r, c] = -Float32.inf
        if has_target(fragment, state.target, row, slab):
            for c in cutlass.range_constexpr(fragment.count):
                target = spread(state.target[slab * fragment.owned + c // SHARED], c)
                for r in cutlass.range_constexpr(len(fragment.rows)):
                    if row + fragment.rows[r] == target:
                        token = column + (slab * fragment.columns + fragment.offset(c))
                        tensors.target_logit[token] = frag[r, c]

    @cute.jit
    def end(self, tensors: ForwardTensors, state: ForwardState, column: Int32, partial: Int32):
        warp = cute.arch.warp_idx() % self.warps
        for slab in cutlass.range_constexpr(self.fragment.slabs):
            for i in cutlass.range_constexpr(self.fragment.owned):
                token, owns = self.fragment.owned_column(column, slab, i)
                if Boolean(owns) and token < cute.size(tensors.target):
                    own = slab * self.fragment.owned + i
                    tensors.partials[partial * self.warps + warp, token, 0] = state.row_max[own]
                    tensors.partials[partial * self.warps + warp, token, 1] = state.row_sum[own]


@cute.jit
def targets(
    fragment: cutlass.Constexpr[Fragment], target: cute.Tensor, column: Int32, vocab: Int32
) -> cute.Tensor:
    """The targets of the tokens that this lane owns; NO_ROW for one outside [0, vocab)."""
    own = cute.make_rmem_tensor(fragment.slabs * fragment.owned, Int32)
    own.fill(NO_ROW)
    for slab in cutlass.range_constexpr(fragment.slabs):
        for i in cutlass.range_constexpr(fragment.owned):
            token, owns = fragment.owned_column(column, slab, i)
            if Boolean(owns) and token < cute.size(target):
                index = target[token]
                if index >= 0 and index < vocab:
                    own[slab * fragment.owned + i] = Int32(index)
    return own


@cute.jit
def has_target(
    fragment: cutlass.Constexpr[Fragment], target: cute.Tensor, row: Int32, slab: cutlass.Constexpr[int]
) -> Boolean:
    """Whether a target of a slab's tokens may be among this warp's rows, the same in all of its lanes.

    target: of the tokens that this lane owns.
    """
    first = first_row_of_warp(row)
    found = Boolean(False)
    for i in cutlass.range_constexpr(fragment.owned):
        own = target[slab * fragment.owned + i]
        found = found or (own >= first and own < first + fragment.span)
    return cute.arch.vote_any_sync(found)
