"""What epilogues know of the tokens that a lane owns, their targets and which are ignored, and of the
vocabulary's end."""

import functools
import operator
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32

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
    own, n = cute.make_rmem_tensor(fragment.owned, Int32), cute.size(target)
    # Behind the last token it is read again: the compiler would wait for each load under a condition.
    indices = [
        target[cutlass.min(fragment.owned_column(column, slab, i, n)[0], n - 1)]
        for i in range(fragment.owned)
    ]
    for i in cutlass.range_constexpr(fragment.owned):
        _, exists = fragment.owned_column(column, slab, i, n)
        inside = exists & (indices[i] >= start) & (indices[i] < end)
        own[i] = Int32(cutlass.select_(inside, Int32(indices[i]) - start, Int32(NO_ROW)))
    return own


@cute.jit
def has_target(
    fragment: cutlass.Constexpr[Fragment],
    own: cute.Tensor,
    row: Int32,
    owned: cutlass.Constexpr[range | None] = None,
) -> Boolean:
    """Whether a token's target may be among this warp's rows, the same in all of its lanes.

    own: targets of the tokens that this lane owns in a slab. owned: which of these tokens; None: all.
    """
    first = first_row_of_warp(row)
    # A warp has 16 rows from each of these. The mask also accepts sums of them, such as 192 = 64 + 128: what
    # follows compares exactly.
    blocks = functools.reduce(operator.or_, fragment.rows[::2])
    found = Boolean(False)
    for i in range(fragment.owned) if owned is None else owned:
        behind = (own[i] - first) & ~blocks
        found = found | (Uint32(behind) < 16)
    return cute.arch.vote_any_sync(found)


@cute.jit
def catch_targets(
    fragment: cutlass.Constexpr[Fragment],
    target_logit: cute.Tensor,
    frag: cute.Tensor,  # (rows, cols) fp32
    own: cute.Tensor,
    row: Int32,
    column: Int32,
    slab: cutlass.Constexpr[int],
    takes: cutlass.Constexpr[bool] = False,
):
    """Store the targets' logits that are in a slab's fragment. own: targets of the tokens that this lane owns
    in it. takes: whether they become -inf."""
    if has_target(fragment, own, row):
        for i in cutlass.range_constexpr(fragment.owned):
            if has_target(fragment, own, row, range(i, i + 1)):
                _store_targets(fragment, target_logit, frag, own[i], row, column, slab, i, takes)


@cute.jit
def _store_targets(
    fragment: cutlass.Constexpr[Fragment],
    target_logit: cute.Tensor,
    frag: cute.Tensor,  # (rows, cols) fp32
    own: Int32,
    row: Int32,
    column: Int32,
    slab: cutlass.Constexpr[int],
    i: cutlass.Constexpr[int],
    takes: cutlass.Constexpr[bool],
):
    """The same of a slab's i-th 32 columns. own: the target of the lane's token there."""
    for c in fragment.shared(i):
        target = spread(own, c)
        for r in cutlass.range_constexpr(len(fragment.rows)):
            if row + fragment.rows[r] == target:
                token = column + (slab * fragment.columns + fragment.offset(c))
                target_logit[token] = frag[r, c]
                if cutlass.const_expr(takes):
                    frag[r, c] = -Float32.inf


@cute.jit
def mask_beyond(fragment: cutlass.Constexpr[Fragment], frag: cute.Tensor, row: Int32, vocab: Int32):
    """Rows beyond the vocabulary become -inf."""
    for r in cutlass.range_constexpr(len(fragment.rows)):
        if row + fragment.rows[r] >= vocab:
            for c in cutlass.range_constexpr(fragment.count):
                frag[r, c] = -Float32.inf


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
def fill_ignored(
    fragment: cutlass.Constexpr[Fragment],
    ignored: Ignored,
    frag: cute.Tensor,  # (rows, cols) fp32
    slab: cutlass.Constexpr[int],
    i: cutlass.Constexpr[int],
    value: float = 0.0,
):
    """Set the elements that belong to ignored tokens to a value, of a slab's i-th 32 columns."""
    # Opaque, since the compiler would keep each column's bit in a register of its own.
    own = (opaque(ignored.bits) >> (slab * fragment.owned + i)) & 1
    for c in fragment.shared(i):
        if spread(own, c) != 0:
            for r in cutlass.range_constexpr(len(fragment.rows)):
                frag[r, c] = Float32(value)
