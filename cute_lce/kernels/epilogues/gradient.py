"""The epilogues of the gradients' GEMMs: factors, the sum over stripes, one rounding."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

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
from cute_lce.kernels.logits import numbers, of_classes, of_tokens
from cute_lce.kernels.rows import Compacted


class Shared(NamedTuple):
    """What is added to a product: of tokens times of features.

    tokens: the address of (n,) fp32, by the operands' tokens; 0: nothing is added. rows: which tokens those
    of the launch are. features: that of (d,) fp32.
    """

    tokens: Int64
    rows: Compacted
    features: Int64
    d: Int32


class DhiddenTensors(NamedTuple):
    """Global memory that the epilogue of dhidden accesses.

    out (n, d) in the operands' dtype, written if `to_out`; n: its rows. sums (splits, n, d) fp32: read unless
    `is_first`, written unless `to_out`; where `places` has a source, those of valid tokens, at their origins.
    factor (n,) fp32: multiplies the product's columns; at address 0: ones. shared: added behind it, to the
    first split, a Shared; None: nothing.
    """

    out: Output
    n: Int32
    sums: cute.Tensor
    factor: cute.Tensor
    places: Compacted
    is_first: Int32
    to_out: Int32
    shared: Any = None


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
        if cutlass.const_expr(tensors.shared is not None):
            if split == 0 and tensors.shared.tokens != 0:
                self._add_shared(tensors.shared, tensors.n, frag, row, column, slab)
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
    def _add_shared(
        self,
        shared: Shared,
        n: Int32,
        frag: cute.Tensor,
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
    ):
        fragment = self.fragment
        features = of_classes(shared.features, row, shared.d - 1, fragment)
        tokens = of_tokens(shared.tokens, shared.rows, n, column, slab, fragment)
        for c in cutlass.range_constexpr(fragment.count):
            token = spread(tokens[c // SHARED], c)
            for r in cutlass.range_constexpr(len(fragment.rows)):
                frag[r, c] = frag[r, c] + features[r] * token

    @cute.jit
    def end(
        self, tensors: DhiddenTensors, staging: Staging, factor: cute.Tensor, column: Int32, partial: Int32
    ):
        pass


class DweightTensors(NamedTuple):
    """Global memory that the epilogue of a stripe's dweight accesses.

    out (columns, d), 16-bit. before: the same matrix where it is added to. factor, one fp32: multiplies the
    product; at address 0: one. shared: the address of (d,) fp32, which is added behind it to each row; 0:
    nothing is; None: never.
    """

    out: Output
    before: cute.Tensor | None
    factor: cute.Tensor
    shared: Int64 | None = None
    d: Int32 | None = None


class AccumulatorTensors(NamedTuple):
    """The same where the matrix is fp32."""

    out: Accumulator
    factor: cute.Tensor
    shared: Int64 | None = None
    d: Int32 | None = None


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
        self._scale(tensors, frag, factor, first)
        store_rows(tensors.out, staging, frag, row, first, self.fragment, tensors.before)

    @cute.jit
    def _scale(self, tensors, frag: cute.Tensor, factor: Float32, first: Int32):
        """first: the column of element 0."""
        frag.store(frag.load() * factor)
        if cutlass.const_expr(tensors.shared is not None):
            if tensors.shared != 0:
                shared = numbers(tensors.shared, tensors.d)
                for c in cutlass.range_constexpr(self.fragment.count):
                    own = shared[cutlass.min(first + self.fragment.offset(c), tensors.d - 1)]
                    for r in cutlass.range_constexpr(len(self.fragment.rows)):
                        frag[r, c] = frag[r, c] + own

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
        self._scale(tensors, frag, factor, first)
        add_rows(tensors.out, staging, frag, row, first, self.fragment)
