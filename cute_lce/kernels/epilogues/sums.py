"""The epilogue of a forward that is asked for nothing of a token but the sum of its exponentials."""

import functools
import struct
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from cute_lce import maths
from cute_lce.arguments import TERMS
from cute_lce.kernels import row_stats
from cute_lce.kernels.epilogues.leaves import add_each, exponentials, fmax_each, highest
from cute_lce.kernels.epilogues.logits import ForwardTensors, LogitsEpilogue
from cute_lce.kernels.epilogues.partials import store_partials
from cute_lce.kernels.epilogues.store import Staging
from cute_lce.kernels.epilogues.tokens import catch_targets, targets
from cute_lce.kernels.fragment import SHARED, fold

LEAST, MOST = 2.0**-40, 2.0**maths.HEADROOM
"""Between which a token's sum lies relative to 2^base, else the base is changed."""

AT_ONCE = 4
"""Columns that a lane owns whose sums are looked at together where registers are scarce."""


def suffices(terms: tuple[str, ...]) -> bool:
    """Whether the sum is all that a forward with these terms wants of a token. Not with given ids: one of
    these may have nearly all probability, and none is to exceed 1."""
    return not any("more_partials" in TERMS[term] or term == "topk" for term in terms)


class SumState(NamedTuple):
    """For each token that a lane owns: the sum of the exponentials that its warp has seen in this run, but
    for the target's, relative to 2^base, with an integer base; and its target, as in epilogues.tokens."""

    row_sum: cute.Tensor
    base: cute.Tensor
    target: cute.Tensor


class SumEpilogue(LogitsEpilogue):
    """Sums of exponentials, and the target's logit, whose exponential the combine kernel adds.

    No maximum is looked for: exponentials are relative to 2^0 until a token's sum lies too far from it. Then
    they are computed again, relative to the tile's maximum. What a token's base is depends on nothing but
    its logits.
    """

    @cute.jit
    def begin(self, tensors: ForwardTensors, column: Int32, staging: Staging) -> SumState:
        """Sums of nothing. The column may lie beyond n."""
        if cutlass.const_expr(tensors.arrived is not None):
            if column == 0:
                tensors.arrived[0] = Int32(0)
        fragment = self.fragment
        count = fragment.slabs * fragment.owned
        row_sum, base, target = (
            self._numbers(staging, i, count, kind) for i, kind in enumerate((Float32, Float32, Int32))
        )
        base.fill(0.0)
        n = cute.size(tensors.target)
        for slab in cutlass.range_constexpr(fragment.slabs):
            own = targets(fragment, tensors.target, column, slab, Int32(0), tensors.vocab)
            for i in cutlass.range_constexpr(fragment.owned):
                # Sums of what is no token's, which begin at 1, seldom ask for another base.
                _, exists = fragment.owned_column(column, slab, i, n)
                row_sum[slab * fragment.owned + i] = Float32(
                    cutlass.select_(exists, Float32(0.0), Float32(1.0))
                )
                target[slab * fragment.owned + i] = own[i]
        return SumState(row_sum, base, target)

    @cute.jit
    def visit(
        self,
        tensors: ForwardTensors,
        staging: Staging,
        state: SumState,
        frag: cute.Tensor,  # (rows, cols) fp32
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
        split: Int32,
    ):
        self.to_masked_logits(tensors, state, frag, row, column, slab)
        owned = self.fragment.owned
        target = cute.make_rmem_tensor(owned, Int32)
        for i in cutlass.range_constexpr(owned):
            target[i] = state.target[slab * owned + i]
        catch_targets(self.fragment, tensors.target_logit, frag, target, row, column, slab, takes=True)
        step = AT_ONCE if self.words else owned
        for first in cutlass.range_constexpr(0, owned, step):
            self._add(state, frag, slab, range(owned)[first : first + step])

    @cute.jit
    def _add(
        self,
        state: SumState,
        frag: cute.Tensor,
        slab: cutlass.Constexpr[int],
        owned: cutlass.Constexpr[range],
    ):
        """Add a fragment's exponentials, of the columns `owned` by lanes, to the sums."""
        fragment = self.fragment
        terms = cute.make_rmem_tensor(fragment.owned, Float32)
        self._sum(state, frag, terms, slab, owned)
        strays = Boolean(False)
        for i in cutlass.range_constexpr(owned.start, owned.stop):
            strays = strays | _strays(state.row_sum[slab * fragment.owned + i] + terms[i])
        if cute.arch.vote_any_sync(strays):
            for i in cutlass.range_constexpr(owned.start, owned.stop):
                own = slab * fragment.owned + i
                (most,) = fold(functools.partial(highest, fragment, frag, SHARED * i), fmax_each)
                if _strays(state.row_sum[own] + terms[i]):
                    _change_base(state, own, most)
            self._sum(state, frag, terms, slab, owned)
        for i in cutlass.range_constexpr(owned.start, owned.stop):
            state.row_sum[slab * fragment.owned + i] += terms[i]

    def _sum(self, state: SumState, frag: cute.Tensor, terms: cute.Tensor, slab: int, owned: range):
        """terms (owned,): the sums of a fragment's exponentials."""
        fragment = self.fragment
        for i in owned:
            base = state.base[slab * fragment.owned + i]
            leaf = functools.partial(exponentials, fragment, frag, base, SHARED * i, in_place=False)
            (terms[i],) = fold(leaf, add_each)

    @cute.jit
    def end(self, tensors: ForwardTensors, staging: Staging, state: SumState, column: Int32, partial: Int32):
        """Exponents of two instead of maxima; of nothing -inf."""
        count = self.fragment.slabs * self.fragment.owned
        own = cute.make_rmem_tensor((2, count), Float32)
        for i in cutlass.range_constexpr(count):
            nothing = state.row_sum[i] == 0
            own[0, i] = Float32(cutlass.select_(nothing, -Float32.inf, state.base[i]))
            own[1, i] = state.row_sum[i]
        number = self.number(partial)
        store_partials(tensors, staging, own, column, number, self.fragment, False, row_stats.exp2)


def _strays(row_sum: Float32) -> Boolean:
    """Whether a sum, which is not negative, asks for another base, as inf and nan do. Numbers are in the
    order of their bits."""
    above = row_sum.bitcast(Int32) - _bits(LEAST)
    return Boolean(Uint32(above) > _bits(MOST) - _bits(LEAST))


def _bits(number: float) -> int:
    """Of an fp32."""
    return struct.unpack("i", struct.pack("f", number))[0]


@cute.jit
def _change_base(state: SumState, own: cutlass.Constexpr[int], most: Float32):
    """Change a token's base to that of the tile's maximum, or of its sum if this is higher."""
    row_sum, base = state.row_sum[own], state.base[own]
    changed = cute.arch.fmax(
        cute.math.floor(most * Float32(maths.LOG2_E)),
        base + cute.math.floor(cute.math.log2(row_sum, fastmath=True)),
    )
    # Logits far below are as -inf; of some far above, or of +inf, the row becomes nan.
    if changed > -maths.FARTHEST:
        # A sum of nothing has any base, perhaps one so far that the factor is inf.
        moved = row_sum * row_stats.exp2(base - changed)
        moved = Float32(cutlass.select_(row_sum == 0, row_sum, moved))
        state.row_sum[own] = Float32(cutlass.select_(changed >= maths.FARTHEST, Float32.nan, moved))
        state.base[own] = changed
