"""Fragments to and from matrices in global memory: results through shared memory and TMA, partial sums of
dhidden directly.

A 16-bit result is rounded, stored to a box in shared memory by stmatrix, which can transpose, and copied from
there by TMA, which leaves out what lies outside the matrix. A box is 16 rows of the matrix and 64 columns, a
line of 128 bytes each, with the 128-byte swizzle: 16-byte chunk c of line i lies at c ^ (i % 8). Where a
tile's columns become rows, its last box may have 8, which a copy of its own takes. Of an fp32
matrix it has 32 columns, and TMA can add it to what is there: in L2, to each element once in a launch, so
that the sum's order is that of the launches.

Pipeline "boxes" (stmatrix or stores -> TMA), BOX_BYTES each, BOXES for each of the four warps of a group:
    full    a box's writers pass fence.proxy.async, then meet: the warp alone (`store_rows`, `add_rows`), or
            all four at the group's named barrier (`store_columns`); then lane 0 of a warp starts the copy, or
            for an addition the lane that elect.sync chooses.
    empty   that lane, in `add_rows` every lane, waits until its older copies have read shared memory, before
            the writers meet again.
`drain` waits for all copies of a warp, at the end: a CTA's shared memory must outlive them.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32
from cutlass.cute.nvgpu import cpasync

from cute_lce.arch import BOX_BYTES, BOX_COLUMNS, BOX_ROWS, BOXES, EVICT_FIRST, WARPGROUP, WARPS
from cute_lce.kernels.adjacent import adjacent
from cute_lce.kernels.fragment import Fragment, first_row_of_warp
from cute_lce.kernels.rows import Compacted, origin

LINE = 2 * BOX_COLUMNS  # bytes of a box's line
BLOCK = 8  # rows and columns that stmatrix moves at once: 16 bytes a line


class Output(NamedTuple):
    """A 16-bit matrix in global memory to which boxes are copied: TMA's copy, and the matrix as its
    coordinates. narrow: the copy of the first BLOCK rows of a box, the last of a tile whose columns are not
    whole boxes; None: all are."""

    tma: cute.CopyAtom
    coords: cute.Tensor
    narrow: cute.CopyAtom | None = None


class Accumulator(NamedTuple):
    """An fp32 matrix in global memory to which boxes are copied or added: TMA's copies that do the one and
    the other, the matrix as their coordinates, and whether to add (0 or 1)."""

    tma: cute.CopyAtom
    adding: cute.CopyAtom
    coords: cute.Tensor
    adds: Int32


class Staging(NamedTuple):
    """A group of four warps, which are the epilogue of one tile, in shared memory: the address of its boxes,
    aligned to 1024 bytes, the number of a named barrier of its 128 threads, and the address of the words that
    its threads have there; None where its epilogue has none."""

    boxes: Int32
    barrier: Int32
    words: Any = None


def output(matrix: cute.Tensor, columns: int = BOX_ROWS) -> Output:
    """On the host: the copy of boxes to a row-major matrix, whose rows begin at multiples of 16 bytes.
    columns: of a tile that is stored transposed."""
    op, narrow = cpasync.CopyBulkTensorTileS2GOp(), None
    if columns % BOX_ROWS:
        narrow, _ = _boxes(op, matrix, BLOCK)
    tma, coords = _boxes(op, matrix)
    return Output(tma, coords, narrow)


def accumulator(matrix: cute.Tensor, adds: Int32) -> Accumulator:
    """The same for an fp32 matrix."""
    tma, coords = _boxes(cpasync.CopyBulkTensorTileS2GOp(), matrix)
    adding, _ = _boxes(cpasync.CopyReduceBulkTensorTileS2GOp(), matrix)
    return Accumulator(tma, adding, coords, adds)


def _boxes(op, matrix: cute.Tensor, rows: int = BOX_ROWS):
    layout = _box_layout(matrix.element_type, rows)
    return cpasync.make_tiled_tma_atom(op, matrix, layout, layout.outer.shape)


def _box_layout(kind, rows: int) -> cute.ComposedLayout:
    columns = LINE * 8 // kind.width
    lines = cute.make_layout((rows, columns), stride=(columns, 1))
    return cute.make_composed_layout(cute.make_swizzle(3, 4, 3), 0, lines)


@cute.jit
def drain():
    """Wait until all copies that this warp started have read shared memory."""
    cute.arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def store_rows(
    out: Output,
    staging: Staging,
    frag: cute.Tensor,
    row: Int32,
    column: Int32,
    fragment: cutlass.Constexpr[Fragment],
    before: cute.Tensor | None = None,
):
    """Round a fragment to the matrix's type and store it; the tile's rows are the matrix's.

    The matrix is larger than L2, and nothing of the call reads it again: lines that leave L2 in the order in
    which they came are written to DRAM in rows.

    before: the same matrix where the fragment is added to it first, a box's elements at a time.
    """
    lane = cute.arch.lane_idx()
    own = staging.boxes + (cute.arch.warp_idx() % WARPS) * (BOXES * BOX_BYTES)
    # Lane l has the address of line l % 8 of matrix l / 8: of 2 x 2 blocks, rows first.
    line = lane % 8
    at = (lane % 16) * LINE + ((lane // 16) ^ line) * 16
    first_row, first_column = first_row_of_warp(row), column - 2 * (lane & 3)
    count = 0
    for r in cutlass.range_constexpr(0, len(fragment.rows), 2):
        for c in cutlass.range_constexpr(0, fragment.count, BOX_COLUMNS // 4):
            box = own + count % BOXES * BOX_BYTES
            count += 1
            if lane == 0:
                cute.arch.cp_async_bulk_wait_group(BOXES - 1, read=True)
            cute.arch.sync_warp()
            if cutlass.const_expr(before is not None):
                _add_before(before, frag, row, column, fragment, r, c)
            for i in cutlass.range_constexpr(BOX_COLUMNS // 16):
                words = [
                    _pack(frag[r + half, c + 4 * i + j], frag[r + half, c + 4 * i + j + 1], out)
                    for j in (0, 2)
                    for half in (0, 1)
                ]
                _stmatrix((box + at) ^ (32 * i), words, transposed=False)
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            _copy(out, box, first_row + fragment.rows[r], first_column + fragment.offset(c), streams=True)
            if lane == 0:
                cute.arch.cp_async_bulk_commit_group()
    assert count % BOXES == 0, "a box would be written twice in a row"


@cute.jit
def add_rows(
    out: Accumulator,
    staging: Staging,
    frag: cute.Tensor,
    row: Int32,
    column: Int32,
    fragment: cutlass.Constexpr[Fragment],
):
    """Store a fragment in fp32, or add it to what is there; the tile's rows are the matrix's."""
    lane = cute.arch.lane_idx()
    own = staging.boxes + (cute.arch.warp_idx() % WARPS) * (BOXES * BOX_BYTES)
    # A lane's two columns of 8 are half of a chunk of 16 bytes; the lines of a fragment's rows are 8 apart.
    line = lane // 4
    at = line * LINE + ((lane % 4 // 2) ^ line) * 16 + lane % 2 * 8
    first_row, first_column = first_row_of_warp(row), column - 2 * (lane & 3)
    count, wide = 0, LINE // 4
    for r in cutlass.range_constexpr(0, len(fragment.rows), 2):
        for c in cutlass.range_constexpr(0, fragment.count, wide // 4):
            box = own + count % BOXES * BOX_BYTES
            count += 1
            # All lanes wait and commit: TMA's addition is started by one that elect.sync chooses.
            cute.arch.cp_async_bulk_wait_group(BOXES - 1, read=True)
            cute.arch.sync_warp()
            for half in cutlass.range_constexpr(2):
                for i in cutlass.range_constexpr(wide // 8):
                    pair = cute.make_rmem_tensor(2, Float32)
                    pair[0], pair[1] = frag[r + half, c + 2 * i], frag[r + half, c + 2 * i + 1]
                    address = ((box + at) ^ (32 * i)) + half * (8 * LINE)
                    pointer = cute.make_ptr(Float32, address, cute.AddressSpace.smem, assumed_align=8)
                    cute.autovec_copy(pair, cute.make_tensor(pointer, cute.make_layout(2)))
            cute.arch.fence_view_async_shared()
            cute.arch.sync_warp()
            at_row, at_column = first_row + fragment.rows[r], first_column + fragment.offset(c)
            if out.adds != 0:
                _start(out.adding, out.coords, box, at_row, at_column)
            else:
                _copy(out, box, at_row, at_column)
            cute.arch.cp_async_bulk_commit_group()
    assert count % BOXES == 0, "a box would be written twice in a row"


@cute.jit
def _add_before(
    before: cute.Tensor,
    frag: cute.Tensor,
    row: Int32,
    column: Int32,
    fragment: cutlass.Constexpr[Fragment],
    r: cutlass.Constexpr[int],
    c: cutlass.Constexpr[int],
):
    """Add a 16-bit matrix's elements to those of a fragment that a box gets, its rows r and r + 1 and columns
    from c on.

    What lies outside the matrix is not stored: rows below it get its last, and of a box that crosses its
    right edge each pair of columns is looked at.
    """
    columns = cute.size(before, mode=[1])
    first = column + fragment.offset(c)
    for half in cutlass.range_constexpr(2):
        line = cutlass.min(row + fragment.rows[r + half], cute.size(before, mode=[0]) - 1)
        if first - 2 * (cute.arch.lane_idx() & 3) + BOX_COLUMNS <= columns:
            start = adjacent(before, line, first, 2)
            for i in cutlass.range_constexpr(c, c + BOX_COLUMNS // 4, 2):
                at = fragment.offset(i) - fragment.offset(c)
                frag[r + half, i] = frag[r + half, i] + start[at].to(Float32)
                frag[r + half, i + 1] = frag[r + half, i + 1] + start[at + 1].to(Float32)
        else:
            for i in cutlass.range_constexpr(c, c + BOX_COLUMNS // 4, 2):
                if column + fragment.offset(i) < columns:
                    pair = adjacent(before, line, column + fragment.offset(i), 2)
                    frag[r + half, i] = frag[r + half, i] + pair[0].to(Float32)
                    frag[r + half, i + 1] = frag[r + half, i + 1] + pair[1].to(Float32)


@cute.jit
def store_columns(
    out: Output,
    staging: Staging,
    frag: cute.Tensor,
    row: Int32,
    column: Int32,
    fragment: cutlass.Constexpr[Fragment],
    slab: cutlass.Constexpr[int],
    owned: cutlass.Constexpr[range],
    at_once: cutlass.Constexpr[int] = 1,
):
    """Round elements of a slab and store them transposed: the tile's columns are the matrix's rows.

    column: of element 0 in slab 0. owned: which of the slab's 32 columns. All four warps of the group call
    it, with rows of one tile, which begins at a multiple of 128, for all of its columns in their order: 128
    rows, or twice 64 with those of another group between them. at_once: how many times 32 columns the group
    meets for once, at most BOXES, the same in all calls of a launch.
    """
    assert len(fragment.rows) == 4, "four blocks of a warp's rows"
    apart = max(fragment.rows[2], BOX_COLUMNS)
    lane, warp = cute.arch.lane_idx(), cute.arch.warp_idx() % WARPS
    first_row = first_row_of_warp(row)
    first_column = column + slab * fragment.columns - 2 * (lane & 3)
    # Lane l has the address of line l % 8 of matrix l / 8, which is a block of the warp's rows.
    own, line = lane // BLOCK, lane % BLOCK
    within = warp * fragment.warp_rows + fragment.rows[1] * (own % 2)
    within += min(fragment.rows[2], BOX_COLUMNS) * (own // 2)
    at = within // BOX_COLUMNS * BOX_BYTES + line * LINE + ((within % BOX_COLUMNS // BLOCK) ^ line) * 16
    for first in cutlass.range_constexpr(owned.start, owned.stop, at_once):
        several = range(first, min(first + at_once, owned.stop))
        numbers = [slab * fragment.owned + i for i in several]
        boxes = [staging.boxes + number % BOXES * (WARPS * BOX_BYTES) for number in numbers]
        # Of an odd number a tile's first takes the boxes of the last of the tile before.
        same = at_once > 1 or (numbers[0] == 0 and fragment.slabs * fragment.owned % BOXES != 0)
        pending = 0 if same else BOXES - 1
        if lane == 0:
            cute.arch.cp_async_bulk_wait_group(pending, read=True)
        cute.arch.barrier(barrier_id=staging.barrier, number_of_threads=WARPGROUP)
        for i, box in zip(several, boxes, strict=True):
            elements = fragment.shared(i)
            assert len(elements) % 4 == 0 or out.narrow is not None, "whole boxes"
            for c in cutlass.range_constexpr(elements.start, elements.stop, 2):
                words = [_pack(frag[r, c], frag[r, c + 1], out) for r in range(len(fragment.rows))]
                block = (c - elements.start) // 2
                offset = block // 2 * (2 * BOX_BYTES) + block % 2 * (BLOCK * LINE)
                _stmatrix(box + at + offset, words, transposed=True)
        cute.arch.fence_view_async_shared()
        cute.arch.barrier(barrier_id=staging.barrier, number_of_threads=WARPGROUP)
        for i, box in zip(several, boxes, strict=True):
            # Each warp copies one box: 16 of the columns, 64 of the group's rows.
            elements = fragment.shared(i)
            at_row = first_column + fragment.offset(elements.start) + BOX_ROWS * (warp // 2)
            at_column = first_row - warp * fragment.warp_rows + apart * (warp % 2)
            _copy_own(out, box + warp * BOX_BYTES, at_row, at_column, warp, len(elements))
        # A group even without a copy: `pending` counts groups.
        if lane == 0:
            cute.arch.cp_async_bulk_commit_group()


@cute.jit
def _copy_own(
    out: Output,
    box: Int32,
    row: Int32,
    column: Int32,
    warp: Int32,
    elements: cutlass.Constexpr[int],
):
    """Start the copy of a warp's box of at most 32 columns, of which a thread has so many elements in a row;
    behind the last there is none."""
    groups = -(-elements // 4)  # of 16 columns, or of the 8 that are left
    if warp < 2 * groups:
        if cutlass.const_expr(elements % 4 != 0):
            if warp // 2 == groups - 1:
                _copy(out, box, row, column, rows=BLOCK)
            else:
                _copy(out, box, row, column)
        else:
            _copy(out, box, row, column)


@cute.jit
def _copy(
    out: Output | Accumulator,
    box: Int32,
    row: Int32,
    column: Int32,
    streams: cutlass.Constexpr[bool] = False,
    rows: cutlass.Constexpr[int] = BOX_ROWS,
):
    """Start the copy of a box to the matrix, by lane 0. streams: through L2, as soon as it has room. rows: of
    the box."""
    if cute.arch.lane_idx() == 0:
        tma = out.tma if cutlass.const_expr(rows == BOX_ROWS) else out.narrow
        _start(tma, out.coords, box, row, column, streams, rows)


@cute.jit
def _start(
    tma: cute.CopyAtom,
    coords: cute.Tensor,
    box: Int32,
    row: Int32,
    column: Int32,
    streams: cutlass.Constexpr[bool] = False,
    rows: cutlass.Constexpr[int] = BOX_ROWS,
):
    """Start one of TMA's operations on a box: a copy in this thread, an addition in one of the warp's."""
    kind = tma.value_type
    layout = _box_layout(kind, rows).outer
    address = cute.make_ptr(kind, box, cute.AddressSpace.smem, assumed_align=1024)
    swizzled = cute.recast_ptr(address, cute.make_swizzle(3, 4, 3), kind)
    source = cute.make_tensor(swizzled, layout)
    tile = cute.local_tile(cute.domain_offset((row, column), coords), layout.shape, (0, 0))
    shared, target = cpasync.tma_partition(
        tma, 0, cute.make_layout(1), cute.group_modes(source, 0, 2), cute.group_modes(tile, 0, 2)
    )
    if cutlass.const_expr(streams):
        cute.copy(tma, shared, target, cache_policy=cutlass.Int64(EVICT_FIRST))
    else:
        cute.copy(tma, shared, target)


def _pack(low: Float32, high: Float32, out: Output) -> Int32:
    """Two numbers rounded to the matrix's type, in one word."""
    kind = out.tma.value_type
    values, rounded = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, kind)
    values[0], values[1] = low, high
    rounded.store(values.load().to(kind))
    return cute.recast_tensor(rounded, Int32)[0]


def _stmatrix(address: Int32, words: list[Int32], *, transposed: bool):
    """Store four 8 x 8 matrices of 16-bit numbers; transposed: lines are the fragment's columns."""
    form = "stmatrix.sync.aligned.m8n8.x4.trans" if transposed else "stmatrix.sync.aligned.m8n8.x4"
    cute.arch.inline_ptx(
        form + ".shared.b16 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };",
        read_only_args=[address, *words],
    )


@cute.jit
def store_transposed(
    matrix: cute.Tensor,
    frag: cute.Tensor,
    row: Int32,
    column: Int32,
    fragment: cutlass.Constexpr[Fragment],
    places: Compacted,
):
    """Store a fragment in fp32, transposed: 8 lanes have 32 consecutive bytes of a matrix's row, which is the
    tile's column, or where `places` has a source, of a valid token, its origin."""
    end = _end(matrix, places)
    for c in cutlass.range_constexpr(fragment.count):
        line = column + fragment.offset(c)
        if line < end:
            line = origin(places, line)
            for r in cutlass.range_constexpr(len(fragment.rows)):
                at = row + fragment.rows[r]
                if at < cute.size(matrix, mode=[1]):
                    adjacent(matrix, line, at, 1)[0] = frag[r, c]


@cute.jit
def add_transposed(
    matrix: cute.Tensor,
    frag: cute.Tensor,
    row: Int32,
    column: Int32,
    fragment: cutlass.Constexpr[Fragment],
    places: Compacted,
):
    """Add what `store_transposed` stored to a fragment, in place.

    Elements that it does not store get those of its last row or column: unconditional loads can all be in
    flight at once.
    """
    last_line, last = cutlass.max(_end(matrix, places) - 1, 0), cute.size(matrix, mode=[1]) - 1
    for c in cutlass.range_constexpr(fragment.count):
        line = origin(places, cutlass.min(column + fragment.offset(c), last_line))
        for r in cutlass.range_constexpr(len(fragment.rows)):
            at = cutlass.min(row + fragment.rows[r], last)
            frag[r, c] = frag[r, c] + adjacent(matrix, line, at, 1)[0]


@cute.jit
def _end(matrix: cute.Tensor, places: Compacted) -> Int32:
    """The first of the launch's tokens that is not stored."""
    end = Int32(cute.size(matrix, mode=[0]))
    if places.source.iterator.toint() != 0:
        end = cutlass.min(end, places.count[0] - places.first)
    return end
