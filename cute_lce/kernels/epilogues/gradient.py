"""The epilogue of a gradient's GEMM: factors, the sum over stripes, one rounding."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_lce.kernels.epilogues.store import add_pairs, store_pairs, store_rows


class GradientTensors(NamedTuple):
    """Global memory that a gradient's epilogue accesses.

    out (m, n) in the operands' dtype, written when `is_last`. accumulator (m, n) fp32: read unless
    `is_first`, written unless `is_last`. factor (m,) fp32 with any stride (0: one number): multiplies the
    product's rows; at address 0: ones.
    """

    out: cute.Tensor
    accumulator: cute.Tensor
    factor: cute.Tensor
    is_first: Int32
    is_last: Int32


class GradientEpilogue:
    """Scale the product's rows, add those of earlier stripes in fp32, and round once, after the last stripe.

    Args:
        tile_n: columns of a tile.
        threads_per_row: threads that share a row, adjacent lanes.
    """

    def __init__(self, tile_n: int, threads_per_row: int):
        self.tile_n = tile_n
        self.threads_per_row = threads_per_row

    @cute.jit
    def begin(self, tensors: GradientTensors, rows: cute.Tensor):
        factor = cute.make_rmem_tensor(cute.size(rows), Float32)
        has_factor = tensors.factor.iterator.toint() != 0
        for r in cutlass.range_constexpr(cute.size(rows)):
            factor[r] = Float32(1.0)
            if has_factor and rows[r] < cute.size(tensors.out, mode=[0]):
                factor[r] = tensors.factor[rows[r]]
        return factor

    @cute.jit
    def visit(
        self,
        tensors: GradientTensors,
        factor: cute.Tensor,
        frag: cute.Tensor,  # (rows, cols) fp32
        rows: cute.Tensor,
        cols: cute.Tensor,
        tile: Int32,
    ):
        first = tile * self.tile_n
        for r in cutlass.range_constexpr(cute.size(rows)):
            for c in cutlass.range_constexpr(cute.size(cols)):
                frag[r, c] = frag[r, c] * factor[r]
        if tensors.is_first == 0:
            add_pairs(tensors.accumulator, frag, rows, cols, first)
        if tensors.is_last == 0:
            store_pairs(tensors.accumulator, frag, rows, cols, first)
        else:
            store_rows(tensors.out, frag, rows, cols, first, self.threads_per_row)

    @cute.jit
    def end(self, tensors: GradientTensors, factor: cute.Tensor, rows: cute.Tensor, window: Int32):
        pass
