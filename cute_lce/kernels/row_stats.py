"""A row's statistics, row_max and the sum of exponentials relative to it, and what kernels make of them.

row_max is the largest logit, whose own term is 1, or, where nothing but sums is asked for (epilogues.sums;
epilogues.keep, is_plain), the target's logit, whose own term is 1 too, or a number near lse; partials then
have whole exponents of two in its place.

`exp` is for arguments that are differences from row_max: an FADD, an FMUL and a MUFU for each element of
dlogits. The forward's terms are relative to an integer power of two instead (kernels.epilogues), with an FFMA
(`fma`) and a MUFU.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from cute_lce import maths
from cute_lce.arguments import REDUCTIONS


def exp(exponent):
    """e^exponent, from exp2.approx."""
    return cute.math.exp2(exponent * Float32(maths.LOG2_E), fastmath=True)


@cute.jit
def grad_scale(dloss: cute.Tensor, num_valid: cute.Tensor, loss, row: Int32) -> Float32:
    """The gradient of the loss by a valid row's products, but for the softmax: dloss, over num_valid for
    "mean"."""
    scale = dloss[row]
    if loss.reduction == REDUCTIONS["mean"]:
        scale = maths.mean_upstream(scale, Float32(num_valid[0]))
    return maths.product_gradient(scale, loss)


def to_logits(products: cute.Tensor, loss):
    """Products in registers become logits. loss: LossArguments, perhaps with terms.

    Terms take them one by one: of a vector times a number LLVM leaves half of a packed register unwritten.
    Without terms a vector is loaded and stored, which costs nothing, and is what was measured.
    """
    if loss.terms:
        for i in range(cute.size(products)):
            products[i] = maths.logits(products[i], loss)
    else:
        products.store(maths.logits(products.load(), loss))


def fma(a, b, c):
    """a b + c in one instruction; numbers or Float32."""
    return cute.math.fma(Float32(a), Float32(b), Float32(c))


def finite_max(row_max: Float32) -> Float32:
    """What elements are relative to: the maximum, or 0 for a row that has seen only -inf."""
    return Float32(cutlass.select_(row_max == -Float32.inf, Float32(0.0), row_max))


def exp2(exponent):
    """2^exponent, exactly of whole numbers."""
    return cute.math.exp2(exponent, fastmath=True)


def merge(a_max: Float32, a_sum: Float32, b_max: Float32, b_sum: Float32, exp=exp):
    """(maximum, sum) of two sets of columns of a row, by the paper's Algorithm 1; their order does not
    matter, to the last bit. exp: exp2 where not maxima are given but exponents of two."""
    both, lower = cute.arch.fmax(a_max, b_max), cute.arch.fmin(a_max, b_max)
    a_leads = a_max >= b_max
    leading = Float32(cutlass.select_(a_leads, a_sum, b_sum))
    trailing = Float32(cutlass.select_(a_leads, b_sum, a_sum))
    return both, leading + maths.rescaled(trailing, lower, finite_max(both), exp)


def tree(values, op):
    """Reduce a list by pairs, traced as a tree."""
    while len(values) > 1:
        half = len(values) // 2
        values = [op(values[i], values[i + half]) for i in range(half)] + values[2 * half :]
    return values[0]
