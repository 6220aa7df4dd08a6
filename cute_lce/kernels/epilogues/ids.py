"""Given ids of each token among a tile's classes: their logits are stored, or their gradients added."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_lce.arguments import TOPK_CLASSES, TOPK_TOKENS, LossArguments
from cute_lce.kernels.fragment import Fragment, first_row_of_warp
from cute_lce.kernels.logits import numbers

LANES = 32
BLOCK = 8
"""Columns of which a thread has two adjacent elements in each row."""


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
    """The elements of a slab at the ids of its tokens are written to topk_values, or these added to them.

    row: the class of a thread's first row. column: of its element 0 in slab 0. The entries of the blocks in
    which a slab's tokens lie, at a unit of classes, are adjacent: each lane reads one, and those in the
    warp's rows, and among the slab's tokens, are visited in turn.
    """
    loss, lane = tensors.loss, cute.arch.lane_idx()
    first = first_row_of_warp(row)
    # Of the slab's first column, as entries count tokens.
    token = tensors.rows.first + (column - 2 * (lane & 3) + slab * fragment.columns)
    block = cutlass.min(token // TOPK_TOKENS, loss.topk_blocks)
    end = token + fragment.columns
    if cutlass.const_expr(fragment.columns % TOPK_TOKENS):
        end += TOPK_TOKENS - 1
    end_block = cutlass.min(end // TOPK_TOKENS, loss.topk_blocks)
    starts = starts_of(loss)
    end_unit = cutlass.min((first + (fragment.span - 1)) // TOPK_CLASSES + 1, loss.topk_units)
    for unit in cutlass.range(first // TOPK_CLASSES, end_unit, unroll=1):
        begin, after = starts[unit * loss.topk_blocks + block], starts[unit * loss.topk_blocks + end_block]
        distance = unit * TOPK_CLASSES - first
        for at in cutlass.range(begin, after, LANES, unroll=1):
            _visit_entries(loss, fragment, frag, distance, token, at, after, adds)


def starts_of(loss: LossArguments) -> cute.Tensor:
    """Where the entries of each unit and block begin, by unit topk_blocks + block, and where all end."""
    return integers(loss.topk_starts, Int64(loss.topk_units) * loss.topk_blocks + 1)


def integers(address: Int64, count) -> cute.Tensor:
    """The (count,) int32 tensor at an address in global memory."""
    pointer = cute.make_ptr(Int32, address, cute.AddressSpace.gmem, assumed_align=4)
    return cute.make_tensor(pointer, cute.make_layout(count))


@cute.jit
def _visit_entries(
    loss: LossArguments,
    fragment: cutlass.Constexpr[Fragment],
    frag: cute.Tensor,
    distance: Int32,
    token: Int32,
    at: Int32,
    end: Int32,
    adds: cutlass.Constexpr[bool],
):
    """Those at `at` to at + 31, before `end`. distance: of the unit's first class from the warp's first row.
    token: of the slab's first column."""
    own = at + cute.arch.lane_idx()
    entries, floats = integers(loss.topk_entries, end), numbers(loss.topk_values, end)
    row, column, value, inside = Int32(0), Int32(0), Float32(0.0), Boolean(False)
    if own < end:
        row = distance + (entries[own] & (TOPK_CLASSES - 1))
        column = (entries[own] >> (TOPK_CLASSES.bit_length() - 1)) - token
        inside = _is_row(fragment, row)
        if cutlass.const_expr(fragment.columns % TOPK_TOKENS):
            inside = inside & (column >= 0) & (column < fragment.columns)
        if cutlass.const_expr(adds):
            value = floats[own]
    left = cute.arch.vote_ballot_sync(inside)
    while left != 0:
        # The lowest bit's.
        source = cute.arch.popc((left & -left) - 1)
        left = left & (left - 1)
        each_row, each_column = cute.arch.shuffle_sync(row, source), cute.arch.shuffle_sync(column, source)
        if cutlass.const_expr(adds):
            each_value = cute.arch.shuffle_sync(value, source)
            _add(fragment, frag, each_row, each_column, each_value, 0, fragment.columns // BLOCK)
        else:
            found = cute.make_rmem_tensor(1, Float32)
            found[0] = 0.0
            _take(fragment, frag, each_row, each_column, found, 0, fragment.columns // BLOCK)
            if _is_lane(each_row, each_column):
                floats[at + source] = found[0]


def _is_row(fragment: Fragment, row: Int32) -> Boolean:
    """Whether it is one of the warp's rows, counted from its first."""
    found = Boolean(False)
    for block in fragment.rows:
        found = found | ((row >= block) & (row < block + 8))
    return found


def _is_lane(row: Int32, column: Int32) -> Boolean:
    """Whether this lane has the element. row, column: counted from the warp's, and the slab's, first."""
    return cute.arch.lane_idx() == (row & 7) * 4 + ((column & 7) >> 1)


def _parts(fragment: Fragment, block: int, row: Int32, column: Int32):
    """(r, c, whether the lane that has the element has it there) for a thread's elements in a block."""
    for r, first in enumerate(fragment.rows):
        for odd in range(2):
            yield r, 2 * block + odd, ((row & -8) == first) & ((column & 1) == odd)


@cute.jit
def _take(
    fragment: cutlass.Constexpr[Fragment],
    frag: cute.Tensor,
    row: Int32,
    column: Int32,
    found: cute.Tensor,
    low: cutlass.Constexpr[int],
    high: cutlass.Constexpr[int],
):
    """An element among the blocks low to high - 1, to found (1,) in the lane that has it."""
    middle = (low + high) // 2
    if cutlass.const_expr(high - low == 1):
        for r, c, here in _parts(fragment, low, row, column):
            found[0] = Float32(cutlass.select_(here, frag[r, c], found[0]))
    elif column < middle * BLOCK:
        _take(fragment, frag, row, column, found, low, middle)
    else:
        _take(fragment, frag, row, column, found, middle, high)


@cute.jit
def _add(
    fragment: cutlass.Constexpr[Fragment],
    frag: cute.Tensor,
    row: Int32,
    column: Int32,
    value: Float32,
    low: cutlass.Constexpr[int],
    high: cutlass.Constexpr[int],
):
    """Adds to an element among the blocks low to high - 1."""
    middle = (low + high) // 2
    if cutlass.const_expr(high - low == 1):
        is_lane = _is_lane(row, column)
        for r, c, here in _parts(fragment, low, row, column):
            frag[r, c] = frag[r, c] + Float32(cutlass.select_(here & is_lane, value, Float32(0.0)))
    elif column < middle * BLOCK:
        _add(fragment, frag, row, column, value, low, middle)
    else:
        _add(fragment, frag, row, column, value, middle, high)
