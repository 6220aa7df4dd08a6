"""The epilogues of the gradients' GEMMs: factors, the sum over stripes, one rounding."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_lce.kernels.epilogues.store import (
    Accumulator,
    Output,
    Staging,
    add_rows,
    add_transposed,
    store_columns,
    store_rows,
    store_transposed,
)
from cute_lce.kernels.fragment import SHARED, Fragment, spread
from cute_lce.kernels.rows import Compacted


class DhiddenTensors(NamedTuple):
    """Global memory that the epilogue of dhidden accesses.

    out (n, d) in the operands' dtype, written if `to_out`; n: its rows. sums (splits, n, d) fp32: read unless
    `is_first`, written unless `to_out`; where `places` has a source, those of valid tokens, at their origins.
    factor (n,) fp32: multiplies the product's columns; at address 0: ones.
    """

    out: Output
    n: Int32
    sums: cute.Tensor
    factor: cute.Tensor
    places: Compacted
    is_first: Int32
    to_out: Int32


class DhiddenEpilogue:
    """(weight.T dlogits.T) by columns of tokens: scale, add earlier stripes in fp32, round or store the sum.

    With several splits of k each has a sum of its own, which kernels.reduce adds up in their order.
    """

    stores = True
    streams = False
    scarce_registers = False
    words = 0

    def __init__(self, fragment: Fragment):
        self.fragment = fragment

    @cute.jit
    def begin(self, tensors: DhiddenTensors, column: Int32, staging: Staging):
        fragment = self.fragment
        factor = cute.make_rmem_tensor(fragment.slabs * fragment.owned, Float32)
        factor.fill(1.0)
        if tensors.factor.iterator.toint() != 0:
            for own, token, exists in fragment.owned_columns(column, tensors.n):
                if exists:
                    factor[own] = tensors.factor[token]
        return factor

    @cute.jit
    def visit(
        self,
        tensors: DhiddenTensors,
        staging: Staging,
        factor: cute.Tensor,
        frag: cute.Tensor,  # (rows, cols) fp32
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
        split: Int32,
    ):
        fragment = self.fragment
        for c in cutlass.range_constexpr(fragment.count):
            scale = spread(factor[slab * fragment.owned + c // SHARED], c)
            for r in cutlass.range_constexpr(len(fragment.rows)):
                frag[r, c] = frag[r, c] * scale
        sums = tensors.sums[split, None, None]
        first = column + slab * fragment.columns
        if tensors.is_first == 0:
            add_transposed(sums, frag, row, first, fragment, tensors.places)
        if tensors.to_out == 0:
            store_transposed(sums, frag, row, first, fragment, tensors.places)
        else:
            owned = range(fragment.owned)
            store_columns(tensors.out, staging, frag, row, column, fragment, slab, owned)

    @cute.jit
    def end(
        self, tensors: DhiddenTensors, staging: Staging, factor: cute.Tensor, column: Int32, partial: Int32
    ):
        pass


class DweightTensors(NamedTuple):
    """Global memory that the epilogue of a stripe's dweight accesses.

    out (columns, d), 16-bit. before: the same matrix where it is added to. factor, one fp32: multiplies the
    product; at address 0: one.
    """

    out: Output
    before: cute.Tensor | None
    factor: cute.Tensor


class AccumulatorTensors(NamedTuple):
    """The same where the matrix is fp32."""

    out: Accumulator
    factor: cute.Tensor


class DweightEpilogue:
    """(dlogits.T hidden): scale, add what was there before, if that is asked for, and round."""

    stores = True
    streams = True
    scarce_registers = False
    words = 0

    def __init__(self, fragment: Fragment):
        self.fragment = fragment

    @cute.jit
    def begin(self, tensors, column: Int32, staging: Staging):
        factor = Float32(1.0)
        if tensors.factor.iterator.toint() != 0:
            factor = tensors.factor[0]
        return factor

    @cute.jit
    def visit(
        self,
        tensors: DweightTensors,
        staging: Staging,
        factor: Float32,
        frag: cute.Tensor,  # (rows, cols) fp32
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
        split: Int32,
    ):
        first = column + slab * self.fragment.columns
        frag.store(frag.load() * factor)
        store_rows(tensors.out, staging, frag, row, first, self.fragment, tensors.before)

    @cute.jit
    def end(self, tensors, staging: Staging, factor: Float32, column: Int32, partial: Int32):
        pass


class AccumulatorEpilogue(DweightEpilogue):
    """(dlogits.T hidden): scale, and store or add in fp32, which TMA does."""

    @cute.jit
    def visit(
        self,
        tensors: AccumulatorTensors,
        staging: Staging,
        factor: Float32,
        frag: cute.Tensor,  # (rows, cols) fp32
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
        split: Int32,
    ):
        first = column + slab * self.fragment.columns
        frag.store(frag.load() * factor)
        add_rows(tensors.out, staging, frag, row, first, self.fragment)
