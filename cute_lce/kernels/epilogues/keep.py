"""The epilogue of a forward that keeps: statistics, and exponentials that the backward reads."""

import functools
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint16

from cute_lce import maths
from cute_lce.arguments import KEPT_TILE, LossArguments
from cute_lce.kernels import row_stats
from cute_lce.kernels.epilogues.leaves import (
    add_each,
    exponentials,
    fmax_each,
    greatest_bits,
    highest,
)
from cute_lce.kernels.epilogues.logits import ForwardTensors
from cute_lce.kernels.epilogues.partials import store_partials
from cute_lce.kernels.epilogues.statistics import ForwardEpilogue, ForwardState
from cute_lce.kernels.epilogues.store import Output, Staging, store_columns
from cute_lce.kernels.epilogues.tokens import Ignored, fill_ignored, ignored_tokens, mask_beyond
from cute_lce.kernels.fragment import SHARED, Fragment, first_row_of_warp, fold, opaque
from cute_lce.kernels.keep import KeepTensors
from cute_lce.kernels.logits import has_slope, slopes
from cute_lce.kernels.row_stats import fma, tree

AT_ONCE = 2
"""Columns that a lane owns whose exponentials are computed before any is stored: many of a thread's
instructions are then independent, and few values alive."""
FEW = 6
"""The most columns that a lane owns, in tiles of 192, of which AT_ONCE are computed at once; of more one is:
there are no registers for two."""
FEW_OF_TERMS = 5
"""The same beside what terms ask of logits; with an entropy one is in any tile."""

IN_REGISTERS = 176
"""ForwardEpilogue's, beside what it takes to keep."""
LARGEST = 64.0
"""The most of a partial's sum that goes into its exponent, whose power of two is then a normal number."""


def is_plain(loss: LossArguments) -> bool:
    """Whether a forward that keeps exponentials is asked for nothing of a token but their sum."""
    return {"entropy", "logits", "argmax"}.isdisjoint(loss.terms) and not has_slope(loss)


class KeepForwardTensors(NamedTuple):
    """The forward's tensors, those of what it keeps, and where to: ignored rows are kept as zeros."""

    forward: ForwardTensors
    keep: KeepTensors
    out: Output


class KeepState(NamedTuple):
    """plain: is_plain. Then no maximum is known: forward.base, that of the sum and of what is kept, is K as
    raised so far in this run; steps, in the place of the maxima, by how many steps that is; and limit (1,)
    the bits of a logit from which on a thread's columns may ask for more."""

    forward: ForwardState
    ignored: Ignored
    plain: bool
    steps: cute.Tensor
    limit: cute.Tensor


class KeepEpilogue:
    """The forward's epilogue, which also keeps the exponentials of the first columns; see kernels.keep. Not
    with squares, for whose range relative to K that of float32 is too small.

    A kept element's exponential is computed once, relative to its token's K, for the operand and for the
    statistics. A token has one j for a warp's rows of a tile, a unit.
    """

    stores = True
    streams = False
    scarce_registers = True

    def __init__(self, fragment: Fragment, warps: int, kept: maths.KeptRange):
        if len(fragment.rows) != 4:
            raise ValueError(f"config: got {len(fragment.rows)} blocks of a warp's rows, want 4 to keep")
        self.fragment = fragment
        self.kept = kept
        self.forward = ForwardEpilogue(fragment, warps, IN_REGISTERS)
        self.words = self.forward.words

    @cute.jit
    def begin(self, tensors: KeepForwardTensors, column: Int32, staging: Staging) -> KeepState:
        forward = tensors.forward
        ignored = ignored_tokens(self.fragment, forward.target, forward.loss.ignore_index, column)
        state = self.forward.begin(forward, column, staging)
        plain = is_plain(forward.loss)
        if cutlass.const_expr(plain):
            n = cute.size(forward.target)
            for own, token, _ in self.fragment.owned_columns(column, n):
                state.base[own] = tensors.keep.reference[cutlass.min(token, n - 1)]
            state.row_max.fill(0.0)
        keeping = KeepState(state, ignored, plain, state.row_max, cute.make_rmem_tensor(1, Int32))
        if cutlass.const_expr(plain):
            self._set_limit(keeping)
        return keeping

    @cute.jit
    def visit(
        self,
        tensors: KeepForwardTensors,
        staging: Staging,
        state: KeepState,
        frag: cute.Tensor,  # (rows, cols) fp32
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
        split: Int32,
    ):
        # A tile is kept whole or, the vocabulary's last, up to the vocabulary's end; all warps keep together.
        keeps = first_row_of_warp(row) // KEPT_TILE * KEPT_TILE < tensors.keep.columns
        if cutlass.const_expr(state.plain):
            self.forward.to_logits(tensors.forward, state.forward, frag, row, column, slab)
            self.forward.catch(tensors.forward, frag, row, column, slab)
            self._raise_bases(tensors, state, frag, row, column, slab)
            for owned in self._at_once(state):
                self._sum(tensors, staging, state, frag, row, column, slab, owned, keeps)
            if keeps:
                # Behind the copies' fences, which would wait for these stores.
                self._note(tensors, state, row, column, slab)
        else:
            self.forward.mask_and_catch(tensors.forward, state.forward, frag, row, column, slab)
            self._keep_or_add(tensors, staging, state, frag, row, column, slab, keeps)

    @cute.jit
    def _keep_or_add(
        self,
        tensors: KeepForwardTensors,
        staging: Staging,
        state: KeepState,
        frag: cute.Tensor,
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
        keeps: Boolean,
    ):
        """What terms want of logits or of maxima, of a tile that is kept or not."""
        if keeps:
            for owned in self._at_once(state):
                self._keep(tensors, staging, state, frag, row, column, slab, owned)
        else:
            every = range(self.fragment.owned)
            self.forward.accumulate(state.forward, frag, row, tensors.forward.vocab, slab, None, every)

    @cute.jit
    def _set_limit(self, state: KeepState):
        """Of the logits of a thread's columns, above which one may exceed its token's headroom."""
        base = state.forward.base
        least = tree([base[own] for own in range(cute.size(base))], cute.arch.fmin)
        for step in cutlass.range_constexpr(3):
            least = cute.arch.fmin(least, cute.arch.shuffle_sync_bfly(least, offset=4 << step))
        limit = (least + self.kept.headroom) * Float32(1 / maths.LOG2_E)
        # As greatest_bits compares: where it is not positive, every tile is looked at.
        state.limit[0] = Int32(cutlass.select_(limit > 0, limit.bitcast(Int32), Int32(-(2**31))))

    @cute.jit
    def _raise_bases(
        self,
        tensors: KeepForwardTensors,
        state: KeepState,
        frag: cute.Tensor,
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
    ):
        """Where a logit exceeds the headroom, as none does in nearly every tile, its token's base is raised.
        Those beyond the vocabulary and of ignored tokens become -inf."""
        fragment, vocab = self.fragment, tensors.forward.vocab
        exceeds = Boolean(False)
        for i in cutlass.range_constexpr(fragment.owned):
            every = [frag[r, c] for c in fragment.shared(i) for r in range(len(fragment.rows))]
            exceeds = exceeds | (greatest_bits(every) >= state.limit[0])
        # One branch for all three, since the compiler copies many registers at each that changes logits.
        beyond = cute.arch.vote_any_sync(row + fragment.rows[-1] >= vocab)
        exceeds = cute.arch.vote_any_sync(exceeds)
        if exceeds or beyond or state.ignored.any:
            if beyond:
                mask_beyond(fragment, frag, row, vocab)
            if exceeds:
                n = cute.size(tensors.forward.target)
                for i in cutlass.range_constexpr(fragment.owned):
                    self._raise(tensors.keep, state, frag, opaque(column), slab, i, n)
                self._set_limit(state)
            if state.ignored.any:
                for i in cutlass.range_constexpr(fragment.owned):
                    fill_ignored(fragment, state.ignored, frag, slab, i, -Float32.inf)

    @cute.jit
    def _raise(
        self,
        keep: KeepTensors,
        state: KeepState,
        frag: cute.Tensor,
        column: Int32,
        slab: cutlass.Constexpr[int],
        i: cutlass.Constexpr[int],
        n: Int32,
    ):
        """Raise the base of the token that this lane owns in a slab's i-th 32 columns by the steps that its
        logits ask for; perhaps none."""
        fragment, forward = self.fragment, state.forward
        own = slab * fragment.owned + i
        (most,) = fold(functools.partial(highest, fragment, frag, SHARED * i), fmax_each)
        steps = maths.raise_steps(most, forward.base[own], self.kept, fma, cute.math.ceil)
        left = Float32(maths.MOST_STEPS) - state.steps[own]
        steps = cute.arch.fmin(cute.arch.fmax(steps, Float32(0.0)), left)
        rise = steps * Float32(self.kept.step)
        state.steps[own] += steps
        forward.base[own] += rise
        # Twice the root, since a step of bf16 is no normal number of fp32.
        root = cute.math.exp2(rise * Float32(-0.5), fastmath=True)
        forward.row_sum[own] = forward.row_sum[own] * root * root
        token, exists = fragment.owned_column(column, slab, i, n)
        if exists and steps > 0:
            self._note_raise(keep, token, state.steps[own])

    @cute.jit
    def _sum(
        self,
        tensors: KeepForwardTensors,
        staging: Staging,
        state: KeepState,
        frag: cute.Tensor,
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
        owned: cutlass.Constexpr[range],
        keeps: Boolean,
    ):
        """Exponentials instead of the logits of the columns that lanes own with these numbers, their sums,
        and, if the tile is kept, their storage."""
        fragment, forward = self.fragment, state.forward
        for i in cutlass.range_constexpr(owned.start, owned.stop):
            own = slab * fragment.owned + i
            leaf = functools.partial(
                exponentials, fragment, frag, forward.base[own], SHARED * i, in_place=True
            )
            (terms,) = fold(leaf, add_each)
            forward.row_sum[own] += terms
        if keeps:
            # Offsets that were computed of it are computed again: registers are scarcer, on Hopper at least.
            column, at_once = opaque(column), self._step(state)
            store_columns(tensors.out, staging, frag, row, column, fragment, slab, owned, at_once)

    @cute.jit
    def _note(
        self,
        tensors: KeepForwardTensors,
        state: KeepState,
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
    ):
        """By how many steps the bases are raised to which what a slab has stored is relative."""
        fragment, n = self.fragment, cute.size(tensors.forward.target)
        unit, column = fragment.unit(first_row_of_warp(row)), opaque(column)
        for i in cutlass.range_constexpr(fragment.owned):
            token, exists = fragment.owned_column(column, slab, i, n)
            if exists:
                steps = state.steps[slab * fragment.owned + i]
                tensors.keep.notes[unit, token] = Uint16(Int32(steps))

    @cute.jit
    def _keep(
        self,
        tensors: KeepForwardTensors,
        staging: Staging,
        state: KeepState,
        frag: cute.Tensor,
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
        owned: cutlass.Constexpr[range],
    ):
        """Exponentials instead of the logits of the columns that lanes own with these numbers, stored, and
        their statistics."""
        fragment, keep = self.fragment, tensors.keep
        # Offsets that were computed of it are computed again: registers are scarcer, on Hopper at least.
        column = opaque(column)
        unit = fragment.unit(first_row_of_warp(row))
        n = cute.size(tensors.forward.target)
        row_max, base, terms = (cute.make_rmem_tensor(fragment.owned, Float32) for _ in range(3))
        gap: Any = None
        if cutlass.const_expr(state.forward.gap is not None):
            gap = cute.make_rmem_tensor(fragment.owned, Float32)
        raises = Boolean(False)
        for i in cutlass.range_constexpr(owned.start, owned.stop):
            # Read for every tile: registers are scarcer than loads.
            token, _ = fragment.owned_column(column, slab, i, n)
            base[i] = keep.reference[cutlass.min(token, n - 1)]
        for i in cutlass.range_constexpr(owned.start, owned.stop):
            (row_max[i],) = fold(functools.partial(highest, fragment, frag, SHARED * i), fmax_each)
            token, exists = fragment.owned_column(column, slab, i, n)
            steps = maths.raise_steps(row_max[i], base[i], self.kept, fma, cute.math.ceil)
            steps = cute.arch.fmin(cute.arch.fmax(steps, Float32(0.0)), Float32(maths.MOST_STEPS))
            if exists:
                keep.notes[unit, token] = Uint16(Int32(steps))
            raises = raises or steps > 0
            base[i] = maths.raised(base[i], steps, self.kept)
        self.forward.take(state.forward, frag, row_max, row, tensors.forward.vocab, slab, owned)
        if cute.arch.vote_any_sync(raises):
            self._note_raises(keep, base, column, slab, owned, n)
        for i in cutlass.range_constexpr(owned.start, owned.stop):
            above: Any = None
            if cutlass.const_expr(gap is not None):
                above = self._above(state.forward.base[slab * fragment.owned + i], row_max[i], base[i])
            leaf = functools.partial(
                *(exponentials, fragment, frag, base[i], SHARED * i),
                in_place=True,
                gaps=gap is not None,
                above=above,
                slopes=slopes(tensors.forward, column, slab, i, fragment),
            )
            terms[i], *others = fold(leaf, add_each)
            if cutlass.const_expr(gap is not None):
                # From 2^base to the entropy's.
                scale = cute.math.exp2(-above, fastmath=True)
                gap[i], terms[i], base[i] = others[0] * scale, terms[i] * scale, base[i] + above
        for i in cutlass.range_constexpr(owned.start, owned.stop):
            own = slab * fragment.owned + i
            own_gap = None if gap is None else gap[i]
            self.forward.update(state.forward, own, row_max[i], terms[i], base[i], own_gap)
        if state.ignored.any:
            for i in cutlass.range_constexpr(owned.start, owned.stop):
                fill_ignored(fragment, state.ignored, frag, slab, i)
        store_columns(tensors.out, staging, frag, row, column, fragment, slab, owned, self._step(state))

    @cute.jit
    def _above(self, sums: Float32, row_max: Float32, base: Float32) -> Float32:
        """How far the base of a tile's entropy lies above that of what is kept, or below it: a raised tile's
        maximum may lie up to HEADROOM below. sums: the base so far."""
        own = cute.arch.fmax(sums, base - maths.HEADROOM)
        exceeds = maths.kept_exponent(row_max, own, fma) > maths.ENTROPY_HEADROOM
        highest = cute.math.floor(row_max * Float32(maths.LOG2_E))
        return Float32(cutlass.select_(exceeds, highest, own)) - base

    def _at_once(self, state: KeepState) -> list[range]:
        """Which of the columns that a lane owns are kept together."""
        owned, step = range(self.fragment.owned), self._step(state)
        return [owned[first : first + step] for first in owned[::step]]

    def _step(self, state: KeepState) -> int:
        few = FEW if state.plain else FEW_OF_TERMS if state.forward.gap is None else 0
        return AT_ONCE if self.fragment.owned <= few else 1

    @cute.jit
    def _note_raises(
        self,
        keep: KeepTensors,
        base: cute.Tensor,
        column: Int32,
        slab: cutlass.Constexpr[int],
        owned: cutlass.Constexpr[range],
        n: Int32,
    ):
        """Add the raises of the tokens `owned` by this lane in a slab to most_raised."""
        for i in cutlass.range_constexpr(owned.start, owned.stop):
            token, exists = self.fragment.owned_column(column, slab, i, n)
            if exists:
                steps = (base[i] - keep.reference[token]) * Float32(1 / self.kept.step)
                if steps > 0:
                    self._note_raise(keep, token, steps)

    @cute.jit
    def _note_raise(self, keep: KeepTensors, token: Int32, steps: Float32):
        most_raised = keep.most_raised.iterator + token
        cute.arch.red(most_raised, Int32(steps), op="max", dtype="s32", sem="relaxed", scope="gpu")

    @cute.jit
    def end(
        self, tensors: KeepForwardTensors, staging: Staging, state: KeepState, column: Int32, partial: Int32
    ):
        if cutlass.const_expr(state.plain):
            self._end_plain(tensors.forward, staging, state, column, partial)
        else:
            self.forward.end(tensors.forward, staging, state.forward, column, partial, self.stores)

    @cute.jit
    def _end_plain(
        self, tensors: ForwardTensors, staging: Staging, state: KeepState, column: Int32, partial: Int32
    ):
        """Whole exponents of two instead of maxima, near the sums' logarithms; of nothing -inf."""
        forward, bits = state.forward, opaque(state.ignored.bits)
        count = self.fragment.slabs * self.fragment.owned
        partials = cute.make_rmem_tensor((2, count), Float32)
        for own in cutlass.range_constexpr(count):
            # An ignored token's numbers do not matter, but must be finite.
            ignored = ((bits >> own) & 1) != 0
            row_sum = Float32(cutlass.select_(ignored, Float32(1.0), forward.row_sum[own]))
            exponent = cute.math.floor(cute.math.log2(row_sum, fastmath=True))
            exponent = cute.arch.fmin(cute.arch.fmax(exponent, Float32(-LARGEST)), Float32(LARGEST))
            nothing = row_sum == 0
            power = forward.base[own] + exponent
            partials[0, own] = Float32(cutlass.select_(nothing, -Float32.inf, power))
            partials[1, own] = row_sum * row_stats.exp2(-exponent)
        number = self.forward.number(partial)
        store_partials(
            *(tensors, staging, partials, column, number, self.fragment, self.stores, row_stats.exp2)
        )
