"""The forward's epilogue: row statistics of the logits, and the target's logit."""

import functools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_lce import maths
from cute_lce.arguments import LossArguments
from cute_lce.kernels import row_stats
from cute_lce.kernels.epilogues.store import Staging
from cute_lce.kernels.epilogues.tokens import has_target, targets
from cute_lce.kernels.fragment import SHARED, Fragment, fold, spread
from cute_lce.kernels.row_stats import fma

LOWEST = -3.4e38  # a base that every finite logit exceeds


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
    """For each token that a lane owns: the maximum of the classes that its warp has seen in this run, their
    sum relative to 2^base, with an integer base."""

    row_max: cute.Tensor
    row_sum: cute.Tensor
    base: cute.Tensor


class ForwardEpilogue:
    """Row statistics of the logits, and the target's logit.

    Each warp has partials of its own: of its rows of its warpgroup's tiles of a window.
    """

    stores = False

    def __init__(self, fragment: Fragment, warps: int):
        """warps: that share a tile; their numbers in the CTA differ modulo `warps`."""
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
        base = cute.make_rmem_tensor(count, Float32)
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        base.fill(LOWEST)
        return ForwardState(row_max, row_sum, base)

    @cute.jit
    def visit(
        self,
        tensors: ForwardTensors,
        staging: Staging,
        state: ForwardState,
        frag: cute.Tensor,  # (rows, cols) fp32
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
        split: Int32,
    ):
        self.mask_and_catch(tensors, frag, row, column, slab)
        self.accumulate(state, frag, slab)

    @cute.jit
    def accumulate(self, state: ForwardState, frag: cute.Tensor, slab: cutlass.Constexpr[int]):
        """Add a fragment of logits to the statistics.

        Terms are relative to 2^base of their token. A token that exceeds its base by HEADROOM, as every one
        does at first, gets a new one.
        """
        fragment = self.fragment
        row_max, terms = (cute.make_rmem_tensor(fragment.owned, Float32) for _ in range(2))
        exceeds = Boolean(False)
        for i in cutlass.range_constexpr(fragment.owned):
            (row_max[i],) = fold(functools.partial(highest, fragment, frag, SHARED * i), fmax_each)
            above = maths.kept_exponent(row_max[i], state.base[slab * fragment.owned + i], fma)
            exceeds = exceeds or above > maths.HEADROOM
        if cute.arch.vote_any_sync(exceeds):
            for i in cutlass.range_constexpr(fragment.owned):
                own = slab * fragment.owned + i
                if maths.kept_exponent(row_max[i], state.base[own], fma) > maths.HEADROOM:
                    base = cute.math.floor(row_max[i] * Float32(maths.LOG2_E))
                    state.row_sum[own] *= cute.math.exp2(state.base[own] - base, fastmath=True)
                    state.base[own] = base
        self._terms(state, frag, terms, slab)
        for i in cutlass.range_constexpr(fragment.owned):
            own = slab * fragment.owned + i
            state.row_max[own] = cute.arch.fmax(state.row_max[own], row_max[i])
            state.row_sum[own] += terms[i]

    def _terms(self, state: ForwardState, frag: cute.Tensor, terms: cute.Tensor, slab: int):
        """A fragment's sum of each token that the lane owns."""
        for i in range(self.fragment.owned):
            base = state.base[slab * self.fragment.owned + i]
            leaf = functools.partial(exponentials, self.fragment, frag, base, SHARED * i, in_place=False)
            (terms[i],) = fold(leaf, lambda a, b: (a + b,))

    def update(self, state: ForwardState, own: int, row_max: Float32, terms: Float32, base: Float32):
        """Add a maximum, and a sum relative to 2^base, to the statistics of a token that the lane owns."""
        higher = cute.arch.fmax(state.base[own], base)
        before = state.row_sum[own] * cute.math.exp2(state.base[own] - higher, fastmath=True)
        state.row_sum[own] = before + terms * cute.math.exp2(base - higher, fastmath=True)
        state.row_max[own] = cute.arch.fmax(state.row_max[own], row_max)
        state.base[own] = higher

    @cute.jit
    def mask_and_catch(
        self,
        tensors: ForwardTensors,
        frag: cute.Tensor,
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
    ):
        """Products become logits, rows beyond the vocabulary -inf; the targets' logits in the fragment are
        stored."""
        fragment = self.fragment
        row_stats.to_logits(frag, tensors.loss)
        if row + fragment.rows[-1] >= tensors.vocab:
            for r in cutlass.range_constexpr(len(fragment.rows)):
                if row + fragment.rows[r] >= tensors.vocab:
                    for c in cutlass.range_constexpr(fragment.count):
                        frag[r, c] = -Float32.inf
        # Read again for every tile: registers are scarcer than loads.
        own = targets(fragment, tensors.target, column, slab, Int32(0), tensors.vocab)
        if has_target(fragment, own, row):
            for c in cutlass.range_constexpr(fragment.count):
                target = spread(own[c // SHARED], c)
                for r in cutlass.range_constexpr(len(fragment.rows)):
                    if row + fragment.rows[r] == target:
                        token = column + (slab * fragment.columns + fragment.offset(c))
                        tensors.target_logit[token] = frag[r, c]

    @cute.jit
    def end(self, tensors: ForwardTensors, state: ForwardState, column: Int32, partial: Int32):
        warp = cute.arch.warp_idx() % self.warps
        for own, token, exists in self.fragment.owned_columns(column, cute.size(tensors.target)):
            if exists:
                row_max = state.row_max[own]
                # From 2^base to exp(row_max), whose own term becomes exactly 1. If all lies far below the
                # base, the sum is 0.
                exponent = maths.kept_exponent(row_stats.finite_max(row_max), state.base[own], fma)
                one = cute.math.exp2(cute.arch.fmax(exponent, Float32(-126.0)), fastmath=True)
                number = partial * self.warps + warp
                tensors.partials[number, token, 0] = row_max
                tensors.partials[number, token, 1] = state.row_sum[own] / one


def highest(fragment: Fragment, frag: cute.Tensor, first: int, j: int):
    """The maximum of a thread's elements of a column, element first + j of a row."""
    if first + j >= fragment.count:
        return (-Float32.inf,)
    return (row_stats.tree([frag[r, first + j] for r in range(len(fragment.rows))], cute.arch.fmax),)


def fmax_each(a: Float32, b: Float32):
    return (cute.arch.fmax(a, b),)


def exponentials(fragment: Fragment, frag: cute.Tensor, base: Float32, first: int, j: int, *, in_place: bool):
    """The sum of 2^(z log2 e - base) of a thread's elements of a column, element first + j of a row.

    base: of the column that this lane owns among the 32 with elements first, first + 1, ...
    in_place: whether the exponentials replace the fragment's elements.
    """
    c = first + j
    if c >= fragment.count:
        return (Float32(0.0),)
    base = spread(base, j)
    terms = []
    for r in range(len(fragment.rows)):
        terms.append(cute.math.exp2(maths.kept_exponent(frag[r, c], base, fma), fastmath=True))
        if in_place:
            frag[r, c] = terms[r]
    return (row_stats.tree(terms, lambda a, b: a + b),)
