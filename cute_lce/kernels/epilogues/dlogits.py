"""The epilogue of the backward's logits: dlogits, rounded and stored."""

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64

from cute_lce import maths
from cute_lce.arguments import LossArguments
from cute_lce.kernels import row_stats
from cute_lce.kernels.epilogues.statistics import NO_ROW, has_target
from cute_lce.kernels.epilogues.store import store_columns
from cute_lce.kernels.fragment import SHARED, Fragment, spread


class DlogitsTensors(NamedTuple):
    """Global memory that the epilogue of a stripe's logits accesses, and sizes.

    target (n,) int32 or int64. row_max, row_sum (n,) fp32: the forward's. dloss (n,) fp32, any stride (0:
    one number). num_valid (1,) int64. dlogits (n, columns) in the operands' dtype, rows 16-byte aligned:
    what is written.
    first: the stripe's first class.
    """

    target: cute.Tensor
    row_max: cute.Tensor
    row_sum: cute.Tensor
    dloss: cute.Tensor
    num_valid: cute.Tensor
    dlogits: cute.Tensor
    loss: LossArguments
    first: Int32


class DlogitsState(NamedTuple):
    """For each token that a lane owns: what logits are relative to, the factors of exponentials and of the
    onehot, the target's row in the stripe, and whether it is ignored; and whether any of the warp's are."""

    ref: cute.Tensor
    factor: cute.Tensor
    onehot: cute.Tensor
    target: cute.Tensor
    ignored: cute.Tensor
    any_ignored: Boolean


class DlogitsEpilogue:
    """dlogits = grad_scale (softmax - onehot), rounded once; 0 in ignored rows, whatever their logits.

    Args:
        has_grad_scale: whether dlogits include grad_scale. The range of float16 is too small for it: there
            the gradients' epilogues apply it.
    """

    def __init__(self, fragment: Fragment, has_grad_scale: bool):
        self.fragment = fragment
        self.has_grad_scale = has_grad_scale

    @cute.jit
    def begin(self, tensors: DlogitsTensors, column: Int32) -> DlogitsState:
        fragment = self.fragment
        count = fragment.slabs * fragment.owned
        ref, factor, onehot = (cute.make_rmem_tensor(count, Float32) for _ in range(3))
        target, ignored = cute.make_rmem_tensor(count, Int32), cute.make_rmem_tensor(count, Int32)
        any_ignored = Boolean(False)
        for slab in cutlass.range_constexpr(fragment.slabs):
            for i in cutlass.range_constexpr(fragment.owned):
                own = slab * fragment.owned + i
                ref[own], factor[own], onehot[own] = Float32(0.0), Float32(0.0), Float32(0.0)
                target[own], ignored[own] = Int32(NO_ROW), Int32(0)
                token, owns = fragment.owned_column(column, slab, i)
                if Boolean(owns) and token < cute.size(tensors.target):
                    index = Int64(tensors.target[token])
                    if index != tensors.loss.ignore_index:
                        scale = Float32(1.0)
                        if cutlass.const_expr(self.has_grad_scale):
                            scale = row_stats.grad_scale(
                                tensors.dloss, tensors.num_valid, tensors.loss, token
                            )
                        ref[own] = row_stats.finite_max(tensors.row_max[token])
                        factor[own] = maths.softmax_factor(scale, tensors.row_sum[token])
                        onehot[own] = scale
                        index = index - tensors.first
                        if index >= 0 and index < cute.size(tensors.dlogits, mode=[1]):
                            target[own] = Int32(index)
                    else:
                        ignored[own] = Int32(1)
                any_ignored = any_ignored or ignored[own] != 0
        return DlogitsState(ref, factor, onehot, target, ignored, cute.arch.vote_any_sync(any_ignored))

    @cute.jit
    def visit(
        self,
        tensors: DlogitsTensors,
        state: DlogitsState,
        frag: cute.Tensor,  # (rows, cols) fp32
        row: Int32,
        column: Int32,
        slab: cutlass.Constexpr[int],
        split: Int32,
    ):
        fragment = self.fragment
        frag.store(maths.logits(frag.load(), tensors.loss))
        for c in cutlass.range_constexpr(fragment.count):
            ref = spread(state.ref[slab * fragment.owned + c // SHARED], c)
            factor = spread(state.factor[slab * fragment.owned + c // SHARED], c)
            for r in cutlass.range_constexpr(len(fragment.rows)):
                frag[r, c] = factor * maths.exponential(frag[r, c], ref, row_stats.exp)
        own = cute.make_rmem_tensor(fragment.owned, Int32)
        for i in cutlass.range_constexpr(fragment.owned):
            own[i] = state.target[slab * fragment.owned + i]
        if has_target(fragment, own, row):
            for c in cutlass.range_constexpr(fragment.count):
                target = spread(own[c // SHARED], c)
                onehot = spread(state.onehot[slab * fragment.owned + c // SHARED], c)
                for r in cutlass.range_constexpr(len(fragment.rows)):
                    if row + fragment.rows[r] == target:
                        frag[r, c] = maths.dlogits(frag[r, c], onehot)
        if state.any_ignored:
            for i in cutlass.range_constexpr(fragment.owned):
                ignored = state.ignored[slab * fragment.owned + i]
                zero_ignored(fragment, ignored, frag, fragment.shared(i))
        store_columns(
            tensors.dlogits,
            frag,
            row,
            column + slab * fragment.columns,
            fragment,
            range(fragment.count),
        )

    @cute.jit
    def end(self, tensors: DlogitsTensors, state: DlogitsState, column: Int32, partial: Int32):
        pass


@cute.jit
def zero_ignored(
    fragment: cutlass.Constexpr[Fragment],
    ignored: Int32,
    frag: cute.Tensor,
    elements: cutlass.Constexpr[range],
):
    """Set the elements that belong to ignored tokens to 0, of one 32 columns.

    ignored: of the token that this lane owns among them, 0 or 1.
    """
    for c in cutlass.range_constexpr(elements.start, elements.stop):
        if spread(ignored, c) != 0:
            for r in cutlass.range_constexpr(len(fragment.rows)):
                frag[r, c] = Float32(0.0)
