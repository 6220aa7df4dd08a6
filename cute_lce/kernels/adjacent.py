"""Adjacent elements of a matrix in global memory, which one access can move."""

import cutlass.cute as cute
from cutlass import Int32, Int64


def adjacent(matrix: cute.Tensor, row: Int32 | Int64, column: Int32, count: int) -> cute.Tensor:
    """`count` elements of a row of a row-major matrix, at an address aligned to their bytes, at most 16."""
    pointer = matrix.iterator + (Int64(row) * matrix.stride[0] + column)
    align = min(count * matrix.element_type.width // 8, 16)
    address = cute.make_ptr(matrix.element_type, pointer.toint(), cute.AddressSpace.gmem, assumed_align=align)
    return cute.make_tensor(address, cute.make_layout(count))
