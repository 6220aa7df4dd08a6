"""The loss's formulas, each written once for the kernels and for torch, with operators that the DSL's values
and torch's tensors share. No torch, no cutlass.

Functions that differ between the two, work in place, or must remain one instruction are arguments: exp, fma
and the like. In kernels `exp` is exp2 of the argument times LOG2_E; the difference is taken first, since it
is exact where it matters.
"""

LOG2_E = 1.4426950408889634

HEADROOM = 64.0
"""How far above a row's reference, K or a sum's base, exponents in base 2 may lie without raising it."""
STEP = 128.0
"""One step of a raise of K: twice the headroom, so that a raised maximum lies within +-64 of K."""
MOST_STEPS = 65535.0
"""The most steps that are noted, in 16 bits."""
FAR = float(2**22)
"""Bound of |K|, within which references are finite and integers in fp32."""


def logits(product, loss):
    """What a product of hidden and weight becomes before the softmax: itself. A tensor is changed in place.

    loss: LossOptions, or in kernels arguments.LossArguments, which has its numbers.
    """
    return product


def product_gradient(gradient, loss):
    """The gradient by a product, of one by its logit: the same."""
    return gradient


def exponential(z, reference, exp, subtract=lambda a, b: a - b):
    """exp(z - reference), in which a common offset of the logits loses nothing."""
    return exp(subtract(z, reference))


def rescaled(row_sum, row_max, reference, exp):
    """A sum relative to exp(row_max), converted to one relative to exp(reference)."""
    return row_sum * exp(row_max - reference)


def row_loss(log_row_sum, row_max, target_logit):
    """lse - target_logit in nats, grouped so that the only large numbers subtracted are logits."""
    return log_row_sum + (row_max - target_logit)


def mean_upstream(dloss, count):
    """The gradient of "mean" by one row's loss."""
    return dloss / count


def softmax_factor(grad_scale, row_sum):
    """The factor from exp(z - row_max) to grad_scale times the softmax."""
    return grad_scale / row_sum


def dlogits(softmax, onehot):
    """grad_scale (softmax - onehot), of arguments with the same scale."""
    return softmax - onehot


def kept_exponent(z, base, fma):
    """z log2 e - base: the base-2 exponent of exp(z) relative to 2^base; base: an integer."""
    return fma(z, LOG2_E, -base)


def base_exponent(logit, base, fma):
    """base - z log2 e: the base-2 exponent of 2^base relative to exp(z)."""
    return fma(logit, -LOG2_E, base)


def raise_steps(highest, reference, fma, ceil):
    """The number of STEPs by which to raise K so that no exponent exceeds HEADROOM; negative: none."""
    return ceil(kept_exponent(highest, reference + HEADROOM, fma) * (1 / STEP))


def raised(reference, steps):
    """K after a raise."""
    return reference + STEP * steps
