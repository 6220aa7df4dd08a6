"""Adjacent elements of a matrix in global memory, which one access can move."""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

LANES = 32
AT_ONCE = 4
"""16-byte loads of a row that a lane has in flight."""


def adjacent(matrix: cute.Tensor, row: Int32 | Int64, column: Int32, count: int) -> cute.Tensor:
    """`count` elements of a row of a row-major matrix, at an address aligned to their bytes, at most 16."""
    pointer = matrix.iterator + (Int64(row) * matrix.stride[0] + column)
    align = min(count * matrix.element_type.width // 8, 16)
    address = cute.make_ptr(matrix.element_type, pointer.toint(), cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(address, cute.make_layout(count))


@cute.jit
def load_from_l2(matrix: cute.Tensor, row: Int32, column: Int32, out: cute.Tensor):
    """Adjacent elements into registers, a multiple of 16 bytes, by loads that L1 does not serve."""
    count = 128 // matrix.element_type.width
    copy = cute.make_copy_atom(
        cute.nvgpu.CopyG2ROp(),
        matrix.element_type,
        num_bits_per_copy=128,
        load_cache_mode=cute.nvgpu.LoadCacheMode.GLOBAL,
    )
    parts = cute.zipped_divide(out, cute.make_layout(count))
    for i in cutlass.range_constexpr(cute.size(out) // count):
        cute.copy(copy, adjacent(matrix, row, column + i * count, count), parts[None, i])


@cute.jit
def load_chunks(sources: list, chunk: Int32, chunks: Int32, valid: Boolean) -> list:
    """For each (matrix, row): an (8, AT_ONCE) tensor of the row's chunks `chunk`, `chunk` + 32, ... of 8
    elements; zeros from `chunks` on, or if not `valid`. All loads are in flight together.

    They come before the first store: the compiler cannot know that those do not overlap.
    """
    found = [cute.make_rmem_tensor((8, AT_ONCE), matrix.element_type) for matrix, _ in sources]
    for parts in found:
        parts.fill(0.0)
    for i in cutlass.range_constexpr(AT_ONCE):
        column = (chunk + i * LANES) * 8
        if valid and chunk + i * LANES < chunks:
            for k in cutlass.range_constexpr(len(sources)):
                matrix, row = sources[k]
                cute.autovec_copy(adjacent(matrix, row, column, 8), found[k][None, i])
    return found


@cute.jit
def store_chunks(parts: cute.Tensor, out: cute.Tensor, row: Int32, chunk: Int32, chunks: Int32):
    """What `load_chunks` gave, to the same chunks of another row."""
    for i in cutlass.range_constexpr(AT_ONCE):
        column = (chunk + i * LANES) * 8
        if chunk + i * LANES < chunks:
            cute.autovec_copy(parts[None, i], adjacent(out, row, column, 8))
