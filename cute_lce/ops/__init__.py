"""torch.library: schemas, fakes, autograd and the choice of an implementation. No arithmetic.

`torch.ops.cute_lce.fused_linear_cross_entropy` is the public op, a composite (call.py): it checks its
arguments, casts under autocast, decides what needs a gradient and which schedule serves it, and calls one of
the inner ops (inner.py). These are functional, take every size that no tensor of theirs shows as an int, and
own their fake functions and autograd (autograd.py):

    forward           the loss and the row statistics: "recompute"
    forward_keep      the same, and what the backward then need not compute again: "keep"
    backward          both gradients from the statistics (and what was kept)
    grad_in_forward   the loss, and both gradients for an upstream of 1: "grad_in_forward"
    scale_gradients   its backward

Their bodies call the implementation that `select.implementation` picks by device and dtype.
"""

from .call import is_plain_eager, linear_cross_entropy
from .select import implementation

__all__ = ["implementation", "is_plain_eager", "linear_cross_entropy"]
