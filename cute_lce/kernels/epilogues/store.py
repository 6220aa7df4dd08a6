"""Fragments to and from matrices in global memory, without shared memory."""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64


@cute.jit
def _pair(matrix: cute.Tensor, row: Int32, column: Int32) -> cute.Tensor:
    """Two adjacent elements of a row-major matrix with 16-byte aligned rows, the first in an even column."""
    pointer = matrix.iterator + (Int64(row) * matrix.stride[0] + column)
    return cute.make_tensor(
        cute.make_ptr(
            matrix.element_type,
            pointer.toint(),
            cute.AddressSpace.gmem,
            assumed_align=matrix.element_type.width // 4,
        ),
        cute.make_layout(2),
    )


@cute.jit
def store_pairs(matrix: cute.Tensor, frag: cute.Tensor, rows: cute.Tensor, cols: cute.Tensor, first: Int32):
    """Round a fragment to the matrix's type and store it; cols are adjacent pairs. Nothing outside the matrix
    is written, except one element of padding in each row if the number of columns is odd."""
    width = cute.size(matrix, mode=[1])
    for r in cutlass.range_constexpr(cute.size(rows)):
        if rows[r] < cute.size(matrix, mode=[0]):
            for c in cutlass.range_constexpr(0, cute.size(cols), 2):
                if first + cols[c] < width:
                    values = cute.make_rmem_tensor(2, Float32)
                    values[0], values[1] = frag[r, c], frag[r, c + 1]
                    pair = cute.make_rmem_tensor(2, matrix.element_type)
                    pair.store(values.load().to(matrix.element_type))
                    cute.autovec_copy(pair, _pair(matrix, rows[r], first + cols[c]))


@cute.jit
def store_rows(
    matrix: cute.Tensor,
    frag: cute.Tensor,
    rows: cute.Tensor,
    cols: cute.Tensor,
    first: Int32,
    threads_per_row: cutlass.Constexpr[int],
):
    """Round a fragment to the matrix's 16-bit type and store it, 16 bytes a thread at once.

    The matrix's rows begin at multiples of 16 bytes and are padded to a multiple of 8 columns; arbitrary
    numbers are written to the padding. With 4 threads a row (WGMMA) a thread has 2 of every 8 columns; the
    four exchange them for 8 of every 32, a 4 x 4 transposition of words by two rounds of shuffles.
    """
    width = cute.size(matrix, mode=[1])
    lane = cute.arch.lane_idx() % threads_per_row
    for r in cutlass.range_constexpr(cute.size(rows)):
        for c in cutlass.range_constexpr(0, cute.size(cols), 8):
            values = cute.make_rmem_tensor(8, Float32)
            for i in cutlass.range_constexpr(8):
                values[i] = frag[r, c + i]
            rounded = cute.make_rmem_tensor(8, matrix.element_type)
            rounded.store(values.load().to(matrix.element_type))
            column = first + cols[c]
            if cutlass.const_expr(threads_per_row == 4):
                _transpose_words(cute.recast_tensor(rounded, Int32), lane)
                # From this thread's pair of columns in the first of four blocks of 8 to its own block.
                column = first + cols[c] + 6 * lane
            if rows[r] < cute.size(matrix, mode=[0]) and column < width:
                pointer = matrix.iterator + (Int64(rows[r]) * matrix.stride[0] + column)
                target = cute.make_ptr(
                    matrix.element_type, pointer.toint(), cute.AddressSpace.gmem, assumed_align=16
                )
                cute.autovec_copy(rounded, cute.make_tensor(target, cute.make_layout(8)))


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
def add_pairs(matrix: cute.Tensor, frag: cute.Tensor, rows: cute.Tensor, cols: cute.Tensor, first: Int32):
    """Add the matrix's elements to a fragment, in place; cols are adjacent pairs.

    Elements outside the matrix get those of its last row or columns: unconditional loads can all be in flight
    at once.
    """
    last_row, last_pair = cute.size(matrix, mode=[0]) - 1, cute.size(matrix, mode=[1]) - 2
    for r in cutlass.range_constexpr(cute.size(rows)):
        row = cutlass.min(rows[r], last_row)
        for c in cutlass.range_constexpr(0, cute.size(cols), 2):
            pair = cute.make_rmem_tensor(2, matrix.element_type)
            cute.autovec_copy(_pair(matrix, row, cutlass.min(first + cols[c], last_pair)), pair)
            frag[r, c] = frag[r, c] + pair[0]
            frag[r, c + 1] = frag[r, c + 1] + pair[1]
