"""The loss's formulas, each once, for the kernels and for torch: plain operators that the DSL's values and
torch's tensors share. No torch, no cutlass.

What differs between the two, works in place, or must stay one instruction is handed in: exp, fma and their
like. In kernels `exp` is exp2 of the argument times LOG2_E: the difference comes first, since it is
exact where it matters.
"""

LOG2_E = 1.4426950408889634

HEADROOM = 64.0
"""Base-2 exponent above a row's reference K up to which what is kept stays relative to K."""
STEP = 128.0
"""By how much K is raised at a time: twice the headroom, so that a raised tile lies within +-64 of K."""
MOST_STEPS = 65535.0
"""What the 16 bits of a note hold."""
FAR = float(2**22)
"""Bound of |K|: references stay finite, and integers of fp32."""


def exponential(z, reference, exp, subtract=lambda a, b: a - b):
    """exp(z - reference), with which a common offset of the logits costs nothing."""
    return exp(subtract(z, reference))


def rescaled(row_sum, row_max, reference, exp):
    """A sum relative to exp(row_max) as one relative to exp(reference)."""
    return row_sum * exp(row_max - reference)


def row_loss(log_row_sum, row_max, target_logit):
    """lse - target_logit in nats, grouped so that no two large numbers are subtracted but the logits."""
    return log_row_sum + (row_max - target_logit)


def mean_upstream(dloss, count):
    """The gradient of "mean" by one row's loss."""
    return dloss / count


def softmax_factor(grad_scale, row_sum):
    """What turns exp(z - row_max) into grad_scale times the softmax."""
    return grad_scale / row_sum


def dlogits(softmax, onehot):
    """grad_scale (softmax - onehot); both in the same scale."""
    return softmax - onehot


def kept_exponent(z, base, fma):
    """z log2 e - base: the base-2 exponent of what is kept, base an integer."""
    return fma(z, LOG2_E, -base)


def base_exponent(logit, base, fma):
    """base - z log2 e: the base-2 exponent of 2^base relative to exp(z)."""
    return fma(logit, -LOG2_E, base)


def raise_steps(highest, reference, fma, ceil):
    """By how many STEPs K has to be raised so that no exponent lies above HEADROOM; negative: by none."""
    return ceil(kept_exponent(highest, reference + HEADROOM, fma) * (1 / STEP))


def raised(reference, steps):
    """K, raised."""
    return reference + STEP * steps
