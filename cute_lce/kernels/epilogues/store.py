"""Fragments to and from matrices in global memory, without shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_lce.kernels.adjacent import adjacent
from cute_lce.kernels.fragment import Fragment


def _pack(low: Float32, high: Float32, kind) -> Int32:
    """Two numbers rounded to a 16-bit type, in one word."""
    values, rounded = cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(2, kind)
    values[0], values[1] = low, high
    rounded.store(values.load().to(kind))
    return cute.recast_tensor(rounded, Int32)[0]


@cute.jit
def _store_eight(matrix: cute.Tensor, words: cute.Tensor, row: Int32, column: Int32):
    """Store eight 16-bit numbers at a column that is a multiple of 8, if it is in the matrix."""
    if row < cute.size(matrix, mode=[0]) and column < cute.size(matrix, mode=[1]):
        cute.autovec_copy(cute.recast_tensor(words, matrix.element_type), adjacent(matrix, row, column, 8))


@cute.jit
def store_rows(
    matrix: cute.Tensor,
    frag: cute.Tensor,
    row: Int32,
    column: Int32,
    fragment: cutlass.Constexpr[Fragment],
):
    """Round a fragment to the matrix's 16-bit type and store it, 16 bytes a thread at once.

    The matrix's rows begin at multiples of 16 bytes and are padded to a multiple of 8 columns; arbitrary
    numbers are written to the padding. A thread has 2 of every 8 columns; the four that share a row exchange
    them for 8 of every 32, a 4 x 4 transposition of words by two rounds of shuffles.
    """
    lane = cute.arch.lane_idx() & 3
    for r in cutlass.range_constexpr(len(fragment.rows)):
        for c in cutlass.range_constexpr(0, fragment.count, 8):
            words = cute.make_rmem_tensor(4, Int32)
            for i in cutlass.range_constexpr(4):
                words[i] = _pack(frag[r, c + 2 * i], frag[r, c + 2 * i + 1], matrix.element_type)
            _transpose_words(words, lane)
            # From this thread's pair of columns in the first of four blocks of 8 to its own block.
            _store_eight(matrix, words, row + fragment.rows[r], column + 4 * c + 6 * lane)


@cute.jit
def store_columns(
    matrix: cute.Tensor,
    frag: cute.Tensor,
    row: Int32,
    column: Int32,
    fragment: cutlass.Constexpr[Fragment],
    elements: cutlass.Constexpr[range],
):
    """Round elements of a fragment and store them transposed: the tile's columns are the matrix's rows.

    elements: of a row of the fragment, pairs. Memory as in `store_rows`. An 8 x 8 block is transposed by one
    movmatrix, after which a thread has two adjacent elements of a matrix's row; four of these blocks are
    exchanged as in `store_rows`.
    """
    lane = cute.arch.lane_idx()
    quarter = lane & 3
    heights = len(fragment.rows)
    blocks = [(c, r) for c in elements[::2] for r in range(heights)]
    for first in cutlass.range_constexpr(0, len(blocks), 4):
        words = cute.make_rmem_tensor(4, Int32)
        for i in cutlass.range_constexpr(4):
            c, r = blocks[first + i]
            word = _pack(frag[r, c], frag[r, c + 1], matrix.element_type)
            words[i] = cute.arch.inline_ptx(
                "movmatrix.sync.aligned.m8n8.trans.b16 {$w0}, {$r0};",
                write_only_types=[Int32],
                read_only_args=[word],
            )
        _transpose_words(words, quarter)
        upper, lower = quarter >> 1, quarter & 1
        if cutlass.const_expr(heights == 4):
            height, block = fragment.rows[1] * lower + fragment.rows[2] * upper, 0
        else:
            height, block = fragment.rows[1] * lower, 8 * upper
        c = blocks[first][0]
        _store_eight(
            matrix,
            words,
            column - 2 * quarter + (fragment.offset(c) + block) + (lane >> 2),
            row - (lane >> 2) + height,
        )


@cute.jit
def _transpose_words(words: cute.Tensor, lane: Int32):
    """Swap word i of lane j and word j of lane i, of four adjacent lanes, in place."""
    for step in cutlass.range_constexpr(1, 3):
        upper = (lane & step) != 0
        for i in cutlass.range_constexpr(4):
            if cutlass.const_expr(i & step == 0):
                low, high = words[i], words[i + step]
                sent = Int32(cutlass.select_(upper, low, high))
                got = cute.arch.shuffle_sync_bfly(sent, offset=step)
                words[i] = Int32(cutlass.select_(upper, got, low))
                words[i + step] = Int32(cutlass.select_(upper, high, got))


@cute.jit
def store_transposed(
    matrix: cute.Tensor,
    frag: cute.Tensor,
    row: Int32,
    column: Int32,
    fragment: cutlass.Constexpr[Fragment],
):
    """Store a fragment in fp32, transposed: 8 lanes have 32 consecutive bytes of a matrix's row."""
    for c in cutlass.range_constexpr(fragment.count):
        line = column + fragment.offset(c)
        for r in cutlass.range_constexpr(len(fragment.rows)):
            at = row + fragment.rows[r]
            if line < cute.size(matrix, mode=[0]) and at < cute.size(matrix, mode=[1]):
                adjacent(matrix, line, at, 1)[0] = frag[r, c]


@cute.jit
def add_transposed(
    matrix: cute.Tensor,
    frag: cute.Tensor,
    row: Int32,
    column: Int32,
    fragment: cutlass.Constexpr[Fragment],
):
    """Add what `store_transposed` stored to a fragment, in place.

    Elements outside the matrix get those of its last row or column: unconditional loads can all be in flight
    at once.
    """
    last_line, last = cute.size(matrix, mode=[0]) - 1, cute.size(matrix, mode=[1]) - 1
    for c in cutlass.range_constexpr(fragment.count):
        line = cutlass.min(column + fragment.offset(c), last_line)
        for r in cutlass.range_constexpr(len(fragment.rows)):
            at = cutlass.min(row + fragment.rows[r], last)
            frag[r, c] = frag[r, c] + adjacent(matrix, line, at, 1)[0]
