"""Given ids of each token among a tile's classes: their logits are stored, or their gradients added."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_lce.arguments import NO_CLASS
from cute_lce.kernels.fragment import Fragment, first_row_of_warp, spread
from cute_lce.kernels.logits import of_operands

BLOCK = 8  # columns that the lanes 8 b to 8 b + 7 own


@cute.jit
def visit_ids(
    tensors,
    fragment: cutlass.Constexpr[Fragment],
    frag: cute.Tensor,  # (rows, cols) fp32
    row: Int32,
    column: Int32,
    slab: cutlass.Constexpr[int],
    adds: cutlass.Constexpr[bool],
):
    """A tile's elements at the ids of their tokens are written to topk_values, or these added to them.

    row: the class of a thread's first row. Each lane walks through the sorted ids of the tokens that it owns,
    from where a tile's first class lies in them, one of each token at a time; equal ids one after the other.
    """
    first = first_row_of_warp(row)
    end = first + fragment.span
    at, ids = (cute.make_rmem_tensor(fragment.owned, Int32) for _ in range(2))
    for i in cutlass.range_constexpr(fragment.owned):
        at[i] = _begin(tensors, fragment, first, column, slab, i)
    for i in cutlass.range_constexpr(fragment.owned):
        ids[i] = _id(tensors, fragment, at[i], column, slab, i)
    remain = _any_before(ids, end)
    while remain:
        for i in cutlass.range_constexpr(fragment.owned):
            hits = cute.arch.vote_ballot_sync(_is_row(fragment, ids[i] - first))
            if hits != 0:
                columns = fragment.shared(i)
                for c in cutlass.range_constexpr(columns.start, columns.stop, 2):
                    if (hits >> ((c - columns.start) // 2 * BLOCK)) & ((1 << BLOCK) - 1) != 0:
                        for each in cutlass.range_constexpr(2):
                            _visit(tensors, fragment, frag, row, column, slab, c + each, at[i], ids[i], adds)
        for i in cutlass.range_constexpr(fragment.owned):
            if ids[i] < end:
                at[i] += 1
                ids[i] = _id(tensors, fragment, at[i], column, slab, i)
        remain = _any_before(ids, end)


@cute.jit
def _begin(
    tensors,
    fragment: cutlass.Constexpr[Fragment],
    first: Int32,
    column: Int32,
    slab: cutlass.Constexpr[int],
    i: cutlass.Constexpr[int],
) -> Int32:
    """Where the i-th owned token's ids may reach class `first`; at the end where there is no token."""
    loss, n = tensors.loss, cute.size(tensors.target)
    at = loss.topk
    token, exists = fragment.owned_column(column, slab, i, n)
    if exists:
        bucket = cutlass.min(first >> loss.topk_shift, loss.topk_buckets - 1)
        starts = _of_token(loss.topk_starts, of_operands(tensors.rows, token), loss.topk_buckets, Int32)
        at = starts[bucket]
    return at


@cute.jit
def _id(
    tensors,
    fragment: cutlass.Constexpr[Fragment],
    at: Int32,
    column: Int32,
    slab: cutlass.Constexpr[int],
    i: cutlass.Constexpr[int],
) -> Int32:
    """The i-th owned token's id there, NO_CLASS at the end."""
    found, loss = Int32(NO_CLASS), tensors.loss
    if at < loss.topk:
        token, _ = fragment.owned_column(column, slab, i, Int32(0))
        found = _of_token(loss.topk_ids, of_operands(tensors.rows, token), loss.topk, Int32)[at]
    return found


def _of_token(address: Int64, token: Int32, count: Int32, element) -> cute.Tensor:
    """A token's row of (n, count) elements of 4 bytes."""
    first = address + 4 * Int64(token) * Int64(count)
    pointer = cute.make_ptr(element, first, cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout(count))


@cute.jit
def _any_before(ids: cute.Tensor, end: Int32) -> Boolean:
    found = Boolean(False)
    for i in cutlass.range_constexpr(cute.size(ids)):
        found = found or ids[i] < end
    return cute.arch.vote_any_sync(found)


def _is_row(fragment: Fragment, distance: Int32) -> Boolean:
    """Whether that is the distance of one of the warp's rows from its first."""
    found = Boolean(False)
    for block in fragment.rows:
        found = found | ((distance >= block) & (distance < block + 8))
    return found


@cute.jit
def _visit(
    tensors,
    fragment: cutlass.Constexpr[Fragment],
    frag: cute.Tensor,
    row: Int32,
    column: Int32,
    slab: cutlass.Constexpr[int],
    c: cutlass.Constexpr[int],
    at: Int32,
    own: Int32,
    adds: cutlass.Constexpr[bool],
):
    """One id of the token of element c's column: the lane that has its row writes or adds. at, own: where the
    id is, and the id, of the tokens that this lane owns in the 32 columns."""
    loss, distance, at = tensors.loss, spread(own, c) - row, spread(at, c)
    is_own = Boolean(False)
    for block in fragment.rows:
        is_own = is_own | (distance == block)
    if is_own:
        token = of_operands(tensors.rows, column + (slab * fragment.columns + fragment.offset(c)))
        values = _of_token(loss.topk_values, token, loss.topk, Float32)
        for r in cutlass.range_constexpr(len(fragment.rows)):
            if distance == fragment.rows[r]:
                if cutlass.const_expr(adds):
                    frag[r, c] = frag[r, c] + values[at]
                else:
                    values[at] = frag[r, c]
