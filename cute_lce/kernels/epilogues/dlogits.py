"""The epilogue of the backward's logits: dlogits, rounded and stored."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from cute_lce import maths
from cute_lce.arguments import LossArguments
from cute_lce.kernels import row_stats
from cute_lce.kernels.epilogues.ids import visit_ids
from cute_lce.kernels.epilogues.store import Output, Staging, store_columns
from cute_lce.kernels.epilogues.tokens import (
    NO_ROW,
    Ignored,
    fill_ignored,
    has_target,
    ignored_tokens,
    targets,
)
from cute_lce.kernels.fragment import SHARED, Fragment, spread
from cute_lce.kernels.logits import gradient, numbers, of_classes, of_tokens, tile_logits


class DlogitsTensors(NamedTuple):
    """Global memory that the epilogue of a stripe's logits accesses, and sizes.

    target (n,) int32 or int64. row_max, row_sum (n,) fp32: the forward's. dloss (n,) fp32, any stride (0:
    one number). With the term "coefficients" row_sum is the factor of a token's exponentials, and dloss what
    is added at its target. num_valid (1,) int64. dlogits (n, columns) in the operands' dtype: what is
    written. first, columns: the stripe's first class, and their number. rows: kernels.rows.Compacted, as the
    forward's, or None.
    """

    target: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    dloss: cute.Tensor
    num_valid: cute.Tensor
    dlogits: Output
    loss: LossArguments
    first: Int32
    columns: Int32
    rows: Any = None


class DlogitsState(NamedTuple):
    """For each token that a lane owns: what logits are relative to, and the factor of exponentials."""

    ref: cute.Tensor
    factor: cute.Tensor
    ignored: Ignored


class DlogitsEpilogue:
    """dlogits = grad_scale (softmax - onehot), rounded once; 0 in ignored rows, whatever their logits.

    Args:
        half: whether dlogits are float16, whose range is too small for grad_scale: there they are HALF_SCALE
            (softmax - onehot), and the gradients' GEMMs apply the rest (kernels.scale).
    """

    stores = True
    streams = False
    scarce_registers = True
    words = 0

    def __init__(self, fragment: Fragment, half: bool):
        self.fragment = fragment
        self.half = half

    @cute.jit
    def begin(self, tensors: DlogitsTensors, column: Int32, staging: Staging) -> DlogitsState:
        fragment = self.fragment
        count = fragment.slabs * fragment.owned
        ref, factor = cute.make_rmem_tensor(count, Float32), cute.make_rmem_tensor(count, Float32)
        # Of tokens beyond the last even a bias has exponentials of 0.
        ref.fill(Float32.inf if "bias_gradient" in tensors.loss.terms else 0.0)
        factor.fill(0.0)
        for own, token, exists in fragment.owned_columns(column, cute.size(tensors.target)):
            if exists:
                ref[own] = row_stats.finite_max(tensors.row_max[token])
                factor[own] = self._factor(tensors, token)
        ignored = ignored_tokens(fragment, tensors.target, tensors.loss.ignore_index, column)
        return DlogitsState(ref, factor, ignored)

    def _factor(self, tensors: DlogitsTensors, token: Int32) -> Float32:
        """The factor of a token's exponentials."""
        if "coefficients" in tensors.loss.terms:
            return tensors.row_sum[token]
        scale = self._scale(tensors, token)
        return maths.softmax_factor(scale, tensors.row_sum[token])

    def _scale(self, tensors: DlogitsTensors, token: Int32) -> Float32:
        """The factor of a token's onehot, and of its softmax where there are no coefficients."""
        if "coefficients" in tensors.loss.terms:
            return tensors.dloss[token]
        if self.half:
            return Float32(maths.HALF_SCALE)
        return row_stats.grad_scale(tensors.dloss, tensors.num_valid, tensors.loss, token)

    @cute.jit
    def visit(
        self,
        tensors: DlogitsTensors,
        staging: Staging,
        state: DlogitsState,
        frag: cute.Tensor,  # (rows, cols) fp32
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
        split: Int32,
    ):
        fragment = self.fragment
        last = tensors.first + tensors.columns
        if cutlass.const_expr("coefficients" in tensors.loss.terms):
            self._by_coefficients(tensors, state, frag, row, column, slab)
        else:
            row_stats.to_logits(frag, tensors.loss)
            for c in cutlass.range_constexpr(fragment.count):
                ref = spread(state.ref[slab * fragment.owned + c // SHARED], c)
                factor = spread(state.factor[slab * fragment.owned + c // SHARED], c)
                for r in cutlass.range_constexpr(len(fragment.rows)):
                    frag[r, c] = factor * maths.exponential(frag[r, c], ref, row_stats.exp)
        # Read again for every tile: registers are scarcer than loads.
        own = targets(fragment, tensors.target, column, slab, tensors.first, last)
        if has_target(fragment, own, row):
            onehot = cute.make_rmem_tensor(fragment.owned, Float32)
            onehot.fill(0.0)
            for i in cutlass.range_constexpr(fragment.owned):
                token, _ = fragment.owned_column(column, slab, i, cute.size(tensors.target))
                if own[i] != NO_ROW:
                    onehot[i] = self._scale(tensors, token)
            for c in cutlass.range_constexpr(fragment.count):
                target, scale = spread(own[c // SHARED], c), spread(onehot[c // SHARED], c)
                for r in cutlass.range_constexpr(len(fragment.rows)):
                    if row + fragment.rows[r] == target:
                        frag[r, c] = maths.dlogits(frag[r, c], scale)
        if cutlass.const_expr("topk" in tensors.loss.terms):
            visit_ids(tensors, fragment, frag, tensors.first + row, column, slab, adds=True)
        if state.ignored.any:
            for i in cutlass.range_constexpr(fragment.owned):
                fill_ignored(fragment, state.ignored, frag, slab, i)
        if cutlass.const_expr("bias_gradient" in tensors.loss.terms):
            self._sum_tokens(tensors, frag, row, column, slab)
        owned = range(fragment.owned)
        store_columns(tensors.dlogits, staging, frag, row, column, fragment, slab, owned)

    @cute.jit
    def _by_coefficients(
        self,
        tensors: DlogitsTensors,
        state: DlogitsState,
        frag: cute.Tensor,
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
    ):
        """The gradient by products, but for the onehot (arguments.TERMS)."""
        fragment, loss, n = self.fragment, tensors.loss, cute.size(tensors.target)
        first, last = tensors.first + row, tensors.first + tensors.columns - 1
        # Any number will do: the stores of the slab before already keep its logits apart from these.
        before = state.factor[0]
        logits = tile_logits(tensors, first, last, column, slab, fragment, before)
        gaps, uniforms, weight = (None, None, None)
        if cutlass.const_expr("gap" in loss.terms):
            gaps = of_tokens(loss.gap, tensors.rows, n, column, slab, fragment)
        if cutlass.const_expr("uniform" in loss.terms):
            uniforms = of_tokens(loss.uniform, tensors.rows, n, column, slab, fragment)
            if cutlass.const_expr("class_weight" in loss.terms):
                weight = of_classes(loss.class_weight, first, last, fragment)
        for columns in logits.together(fragment.count):
            logits.apply(frag, columns)
            for c in columns:
                ref = spread(state.ref[slab * fragment.owned + c // SHARED], c)
                factor = spread(state.factor[slab * fragment.owned + c // SHARED], c)
                gap = None if gaps is None else spread(gaps[c // SHARED], c)
                uniform = None if uniforms is None else spread(uniforms[c // SHARED], c)
                scale = logits.scale(c)
                for r in cutlass.range_constexpr(len(fragment.rows)):
                    z = frag[r, c]
                    slope = logits.slope(z)
                    one = uniform if weight is None else uniform * weight[r]
                    z = z if scale is None else z * scale
                    frag[r, c] = gradient(z - ref, factor, gap, one, slope)

    @cute.jit
    def _sum_tokens(
        self,
        tensors: DlogitsTensors,
        frag: cute.Tensor,
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
    ):
        """Store each class's sum over the slab's tokens, of which four lanes have each a part."""
        fragment, loss, lane = self.fragment, tensors.loss, cute.arch.lane_idx()
        factors = None
        if cutlass.const_expr(self.half):
            n = cute.size(tensors.target)
            factors = of_tokens(loss.row_factor, tensors.rows, n, column, slab, fragment)
        sums = cute.make_rmem_tensor(len(fragment.rows), Float32)
        sums.fill(0.0)
        for c in cutlass.range_constexpr(fragment.count):
            factor = None if factors is None else spread(factors[c // SHARED], c)
            for r in cutlass.range_constexpr(len(fragment.rows)):
                sums[r] = sums[r] + (frag[r, c] if factor is None else frag[r, c] * factor)
        number = (column - 2 * (lane & 3)) // fragment.columns + slab
        first = Int64(number) * tensors.columns
        partials = numbers(loss.column_sums + 4 * first, tensors.columns)
        for r in cutlass.range_constexpr(len(fragment.rows)):
            for step in cutlass.range_constexpr(2):
                sums[r] = sums[r] + cute.arch.shuffle_sync_bfly(sums[r], offset=1 << step)
            # There are no sums of slabs beyond the last token.
            stores = (lane & 3) == 0 and number * fragment.columns < cute.size(tensors.target)
            if stores and row + fragment.rows[r] < tensors.columns:
                partials[row + fragment.rows[r]] = sums[r]

    @cute.jit
    def end(
        self, tensors: DlogitsTensors, staging: Staging, state: DlogitsState, column: Int32, partial: Int32
    ):
        pass
