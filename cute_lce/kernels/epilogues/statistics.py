"""The forward's epilogue: row statistics of the logits, and the target's logit."""

import functools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from cute_lce import maths
from cute_lce.arguments import LossArguments
from cute_lce.kernels import more_sums, row_stats
from cute_lce.kernels.epilogues.ids import visit_ids
from cute_lce.kernels.epilogues.leaves import (
    SQUARED,
    TotalOf,
    add_each,
    exponentials,
    first_of,
    fmax_each,
    highest,
    min_each,
    sum_of,
)
from cute_lce.kernels.epilogues.logits import ForwardTensors, LogitsEpilogue
from cute_lce.kernels.epilogues.partials import store_partials
from cute_lce.kernels.epilogues.store import Staging
from cute_lce.kernels.epilogues.tokens import catch_targets, targets
from cute_lce.kernels.fragment import SHARED, fold
from cute_lce.kernels.logits import of_classes
from cute_lce.kernels.row_stats import fma

LOWEST = -3.4e38  # a base that every finite logit exceeds
APART = frozenset({"total", "linear_bias", "logit_scale"})
"""With no terms but these, tiles that are all in the vocabulary have code of their own; else that spills."""


class ForwardState(NamedTuple):
    """For each token that a lane owns: the maximum of the classes that its warp has seen in this run, their
    sum relative to 2^base, with an integer base.

    With terms, of the exponents x = z log2 e - base: gap, the sum of x 2^x; squares, of (SQUARED 2^x)^2;
    total, of x times the class's weight; and seen (1,), that of the weights, the same for all tokens. logits:
    the sum of z. argmax: the first class with the maximum, int32.
    """

    row_max: cute.Tensor
    row_sum: cute.Tensor
    base: cute.Tensor
    gap: Any = None
    squares: Any = None
    total: Any = None
    seen: Any = None
    logits: Any = None
    argmax: Any = None


class ForwardEpilogue(LogitsEpilogue):
    """Row statistics of the logits, and the target's logit.

    The warps of a group have one partial: of their rows of its tiles of a window.
    """

    @cute.jit
    def begin(self, tensors: ForwardTensors, column: Int32, staging: Staging) -> ForwardState:
        """Statistics of nothing: maximum -inf, sum 0. The column may lie beyond n."""
        if cutlass.const_expr(tensors.arrived is not None):
            if column == 0:
                tensors.arrived[0] = Int32(0)
        count = self.fragment.slabs * self.fragment.owned
        row_max, row_sum, base = (self._numbers(staging, i, count) for i in range(3))
        row_max.fill(-Float32.inf)
        row_sum.fill(0.0)
        base.fill(LOWEST)
        return ForwardState(row_max, row_sum, base, *self._more(tensors.loss, staging, count))

    def _more(self, loss: LossArguments, staging: Staging, count: int) -> list:
        """gap, squares, total, seen, logits and argmax of ForwardState, zeros."""
        gap, squares, logits, argmax = (
            cute.make_rmem_tensor(count, Int32 if term == "argmax" else Float32)
            if term in loss.terms
            else None
            for term in ("entropy", "squares", "logits", "argmax")
        )
        total = seen = None
        if "total" in loss.terms:
            total, seen = self._numbers(staging, 3, count), cute.make_rmem_tensor(1, Float32)
        found = [gap, squares, total, seen, logits, argmax]
        for each in found:
            if each is not None:
                each.fill(0)
        return found

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
        self.mask_and_catch(tensors, state, frag, row, column, slab)
        of = self.total_of(tensors, row)
        self.accumulate(state, frag, row, tensors.vocab, slab, of, range(self.fragment.owned))
        self.count_seen(state, slab, of)

    def total_of(self, tensors: ForwardTensors, row: Int32) -> Any:
        """None where no total is asked for."""
        if "total" not in tensors.loss.terms:
            return None
        weight = None
        if "class_weight" in tensors.loss.terms:
            weight = of_classes(tensors.loss.class_weight, row, tensors.vocab - 1, self.fragment)
        return TotalOf(weight, tensors.vocab - row, apart=APART.issuperset(tensors.loss.terms))

    def count_seen(self, state: ForwardState, slab: int, of: Any):
        """After a tile's last slab."""
        if of is not None and slab + 1 == self.fragment.slabs:
            state.seen[0] = state.seen[0] + self.count(of)

    @cute.jit
    def count(self, of: Any) -> Float32:
        """A tile's rows or their weights, of which the 8 lanes that share columns have each their own."""
        count = Float32(0.0)
        for r in cutlass.range_constexpr(len(self.fragment.rows)):
            one = Float32(1.0)
            if cutlass.const_expr(of.weight is not None):
                one = of.weight[r]
            count += Float32(cutlass.select_(self.fragment.rows[r] < of.left, one, Float32(0.0)))
        for step in cutlass.range_constexpr(3):
            count += cute.arch.shuffle_sync_bfly(count, offset=4 << step)
        return count

    @cute.jit
    def accumulate(
        self,
        state: ForwardState,
        frag: cute.Tensor,
        row: Int32,
        vocab: Int32,
        slab: cutlass.Constexpr[int],
        of: TotalOf | None,
        owned: cutlass.Constexpr[range],
    ) -> cute.Tensor:
        """Add a fragment's logits of the columns that lanes own with the numbers `owned` to the statistics;
        returns (owned,) their maxima, of other columns nothing. of: where a total is asked for.

        Terms are relative to 2^base of their token. A token that exceeds its base by the headroom, as every
        one does at first, gets a new one.
        """
        fragment = self.fragment
        headroom = self._headroom(state)
        row_max, terms = (cute.make_rmem_tensor(fragment.owned, Float32) for _ in range(2))
        exceeds = Boolean(False)
        for i in cutlass.range_constexpr(owned.start, owned.stop):
            (row_max[i],) = fold(functools.partial(highest, fragment, frag, SHARED * i), fmax_each)
            above = maths.kept_exponent(row_max[i], state.base[slab * fragment.owned + i], fma)
            exceeds = exceeds or above > headroom
        self.take(state, frag, row_max, row, vocab, slab, owned)
        if cute.arch.vote_any_sync(exceeds):
            for i in cutlass.range_constexpr(owned.start, owned.stop):
                own = slab * fragment.owned + i
                if maths.kept_exponent(row_max[i], state.base[own], fma) > headroom:
                    base = cute.math.floor(row_max[i] * Float32(maths.LOG2_E))
                    if cutlass.const_expr(state.gap is not None):
                        step = state.base[own] - base
                        gap = state.gap[own] + step * state.row_sum[own]
                        state.gap[own] = gap * cute.math.exp2(step, fastmath=True)
                    if cutlass.const_expr(state.squares is not None):
                        factor = cute.math.exp2(state.base[own] - base, fastmath=True)
                        state.squares[own] *= factor * factor
                    if cutlass.const_expr(state.total is not None):
                        state.total[own] += (state.base[own] - base) * state.seen[0]
                    state.row_sum[own] *= cute.math.exp2(state.base[own] - base, fastmath=True)
                    state.base[own] = base
        inside = None if of is None else of._replace(left=None)
        if cutlass.const_expr(of is None or not of.apart):
            self._terms(state, frag, terms, slab, of, owned)
        elif cute.arch.vote_any_sync(row + fragment.rows[-1] >= vocab):
            self._terms(state, frag, terms, slab, of, owned)
        else:
            self._terms(state, frag, terms, slab, inside, owned)
        for i in cutlass.range_constexpr(owned.start, owned.stop):
            own = slab * fragment.owned + i
            state.row_max[own] = cute.arch.fmax(state.row_max[own], row_max[i])
            state.row_sum[own] += terms[i]
        return row_max

    def _headroom(self, state: ForwardState) -> float:
        return maths.HEADROOM if state.gap is None else maths.ENTROPY_HEADROOM

    def _terms(
        self,
        state: ForwardState,
        frag: cute.Tensor,
        terms: cute.Tensor,
        slab: int,
        of: TotalOf | None,
        owned: range,
    ):
        """A fragment's sum of each token that the lane owns; the sums of terms are added to the state's."""
        more = [each for each in (state.gap, state.squares, state.total) if each is not None]
        for i in owned:
            own = slab * self.fragment.owned + i
            leaf = functools.partial(
                exponentials,
                *(self.fragment, frag, state.base[own], SHARED * i),
                in_place=False,
                gaps=state.gap is not None,
                squares=state.squares is not None,
                of=of,
            )
            terms[i], *others = fold(leaf, add_each)
            for sums, other in zip(more, others, strict=True):
                sums[own] = sums[own] + other

    @cute.jit
    def take(
        self,
        state: ForwardState,
        frag: cute.Tensor,
        row_max: cute.Tensor,
        row: Int32,
        vocab: Int32,
        slab: cutlass.Constexpr[int],
        owned: cutlass.Constexpr[range],
    ):
        """What terms want of the logits as they are: where a tile's maximum exceeds that of all before, as it
        seldom does, its first row becomes argmax; and their sum, which comes last, where it spills nothing.
        row_max (owned,): of the tokens `owned` by this lane in a slab."""
        if cutlass.const_expr(state.argmax is not None):
            for i in cutlass.range_constexpr(owned.start, owned.stop):
                own = slab * self.fragment.owned + i
                exceeds = row_max[i] > state.row_max[own]
                if cute.arch.vote_any_sync(exceeds):
                    leaf = functools.partial(first_of, self.fragment, frag, row, row_max[i], SHARED * i)
                    (first,) = fold(leaf, min_each)
                    if exceeds:
                        state.argmax[own] = first
        if cutlass.const_expr(state.logits is not None):
            for i in cutlass.range_constexpr(owned.start, owned.stop):
                (total,) = fold(
                    functools.partial(sum_of, self.fragment, frag, vocab - row, SHARED * i), add_each
                )
                state.logits[slab * self.fragment.owned + i] += total

    def update(
        self,
        state: ForwardState,
        own: int,
        row_max: Float32,
        terms: Float32,
        base: Float32,
        own_gap: Float32 | None = None,
    ):
        """Add a maximum, and sums relative to 2^base, to the statistics of a token that the lane owns.
        own_gap: the sum of gaps, with the entropy."""
        higher = cute.arch.fmax(state.base[own], base)
        # Roots, since 2^-128, what kernels.keep raises bf16's by at once, is no normal number of fp32.
        root = cute.math.exp2((state.base[own] - higher) * Float32(0.5), fastmath=True)
        added_root = cute.math.exp2((base - higher) * Float32(0.5), fastmath=True)
        before = state.row_sum[own] * root * root
        if own_gap is not None:
            gap = state.gap[own] * root * root
            gap = gap + before * (state.base[own] - higher)
            added = (own_gap + terms * (base - higher)) * added_root * added_root
            state.gap[own] = gap + added
        state.row_sum[own] = before + terms * added_root * added_root
        state.row_max[own] = cute.arch.fmax(state.row_max[own], row_max)
        state.base[own] = higher

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
        """Products become logits, rows beyond the vocabulary -inf; the targets' logits in the fragment, and
        those of given ids, are stored."""
        self.to_masked_logits(tensors, state, frag, row, column, slab)
        self.catch(tensors, frag, row, column, slab)

    @cute.jit
    def catch(
        self,
        tensors: ForwardTensors,
        frag: cute.Tensor,
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
    ):
        """The targets' logits in the fragment, and those of given ids, are stored."""
        fragment = self.fragment
        # Read again for every tile: registers are scarcer than loads.
        own = targets(fragment, tensors.target, column, slab, Int32(0), tensors.vocab)
        catch_targets(fragment, tensors.target_logit, frag, own, row, column, slab)
        if cutlass.const_expr("topk" in tensors.loss.terms):
            visit_ids(tensors, fragment, frag, row, column, slab, adds=False)

    @cute.jit
    def end(
        self,
        tensors: ForwardTensors,
        staging: Staging,
        state: ForwardState,
        column: Int32,
        partial: Int32,
        stores: cutlass.Constexpr[bool] = False,
    ):
        """stores: whether the boxes are copied from."""
        count = self.fragment.slabs * self.fragment.owned
        own = cute.make_rmem_tensor((2 + more_sums.places(tensors.loss.terms)[1], count), Float32)
        for i in cutlass.range_constexpr(count):
            row_max = state.row_max[i]
            # From 2^base to exp(row_max), whose own term becomes exactly 1. If all lies far below the base,
            # the sum is 0.
            exponent = maths.kept_exponent(row_stats.finite_max(row_max), state.base[i], fma)
            one = cute.math.exp2(cute.arch.fmax(exponent, Float32(-126.0)), fastmath=True)
            for part, each in enumerate(
                (row_max, state.row_sum[i] / one, *self._of_terms(state, i, exponent, one))
            ):
                own[part, i] = each
        store_partials(tensors, staging, own, column, self.number(partial), self.fragment, stores)

    def _of_terms(self, state: ForwardState, own: int, exponent: Float32, one: Float32) -> list[Float32]:
        """What terms have (MORE_PARTS): the sums of gaps row_max - z and of squares, relative to exp(row_max)
        and its square; of gaps times weights, and of the weights; of logits; and the argmax."""
        sums = []
        if state.gap is not None:
            gap = exponent * state.row_sum[own] - state.gap[own]
            sums.append(gap * Float32(1 / maths.LOG2_E) / one)
        if state.squares is not None:
            factor = Float32(1 / SQUARED) / one
            sums.append(state.squares[own] * factor * factor)
        if state.total is not None:
            total = exponent * state.seen[0] - state.total[own]
            sums += [total * Float32(1 / maths.LOG2_E), state.seen[0]]
        if state.logits is not None:
            sums.append(state.logits[own])
        if state.argmax is not None:
            sums.append(state.argmax[own].bitcast(Float32))
        return sums
