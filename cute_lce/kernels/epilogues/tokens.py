"""What epilogues know of the tokens that a lane owns: their targets, and which are ignored."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_lce.kernels.fragment import Fragment, first_row_of_warp, opaque, spread

NO_ROW = -(2**30)  # a target that no tile contains


@cute.jit
def targets(
    fragment: cutlass.Constexpr[Fragment],
    target: cute.Tensor,
    column: Int32,
    slab: cutlass.Constexpr[int],
    start: Int32,
    end: Int32,
) -> cute.Tensor:
    """The targets of the tokens that this lane owns in a slab, relative to `start`; NO_ROW for one outside
    [start, end)."""
    own = cute.make_rmem_tensor(fragment.owned, Int32)
    own.fill(NO_ROW)
    for i in cutlass.range_constexpr(fragment.owned):
        token, exists = fragment.owned_column(column, slab, i, cute.size(target))
        if exists:
            index = target[token]
            if index >= start and index < end:
                own[i] = Int32(index) - start
    return own


@cute.jit
def has_target(fragment: cutlass.Constexpr[Fragment], own: cute.Tensor, row: Int32) -> Boolean:
    """Whether a token's target may be among this warp's rows, the same in all of its lanes.

    own: targets of the tokens that this lane owns in a slab.
    """
    first = first_row_of_warp(row)
    found = Boolean(False)
    for i in cutlass.range_constexpr(fragment.owned):
        found = found or (own[i] >= first and own[i] < first + fragment.span)
    return cute.arch.vote_any_sync(found)


class Ignored(NamedTuple):
    """Which of the tokens that a lane owns are ignored, a bit for each, and whether any of the warp's is."""

    bits: Int32
    any: Boolean


@cute.jit
def ignored_tokens(
    fragment: cutlass.Constexpr[Fragment], target: cute.Tensor, ignore_index: Int64, column: Int32
) -> Ignored:
    bits = Int32(0)
    for own, token, exists in fragment.owned_columns(column, cute.size(target)):
        if exists:
            if Int64(target[token]) == ignore_index:
                bits = bits | (1 << own)
    return Ignored(bits, cute.arch.vote_any_sync(bits != 0))


@cute.jit
def zero_ignored(
    fragment: cutlass.Constexpr[Fragment],
    ignored: Ignored,
    frag: cute.Tensor,  # (rows, cols) fp32
    slab: cutlass.Constexpr[int],
    i: cutlass.Constexpr[int],
):
    """Set the elements that belong to ignored tokens to 0, of a slab's i-th 32 columns."""
    # Opaque, since the compiler would keep each column's bit in a register of its own.
    own = (opaque(ignored.bits) >> (slab * fragment.owned + i)) & 1
    for c in fragment.shared(i):
        if spread(own, c) != 0:
            for r in cutlass.range_constexpr(len(fragment.rows)):
                frag[r, c] = Float32(0.0)
