"""torch.library: schemas, fakes, autograd and the choice of an implementation. No arithmetic.

`torch.ops.cute_lce.fused_linear_cross_entropy` (public.py) is the public op, a composite (call.py): it checks
its arguments, casts under autocast, determines which gradients are needed and which schedule to use, and
calls one of the inner ops (inner.py). These are functional, take as ints all sizes that their tensors do not
show, and have their own fake functions and autograd (autograd.py):

    forward           the loss and the row statistics: "recompute"
    forward_keep      the same, and what the backward then does not recompute: "keep"
    backward          both gradients from the statistics (and what was kept)
    grad_in_forward   the loss, and both gradients for an upstream of 1: "grad_in_forward"
    scale_gradients   its backward

A call with terms (terms.py), and linear_logprob (logprob.py), call others (token_stats.py), which return
numbers of each token. Several heads (heads.py) are a call each, between two ops that add their gradients.

A number that torch.compile traces as a symbol reaches an op's twin as a tensor (inner.py). flops.py says what
the ops cost.

Their bodies call the implementation that `select.implementation` picks by device and dtype; those of the
sampled loss (sampled.py) are plain torch everywhere.
"""

from . import flops
from . import sampled as sampled
from .autograd import Destination, is_writable
from .call import linear_cross_entropy
from .heads import has_heads
from .heads import linear_cross_entropy as linear_cross_entropy_of_heads
from .logprob import linear_logprob
from .plain import is_distributed
from .public import is_plain_eager
from .select import implementation
from .terms import TermTensors
from .terms import linear_cross_entropy as linear_cross_entropy_with_terms

flops.register()

__all__ = [
    "Destination",
    "TermTensors",
    "has_heads",
    "implementation",
    "is_distributed",
    "is_plain_eager",
    "is_writable",
    "linear_cross_entropy",
    "linear_cross_entropy_of_heads",
    "linear_cross_entropy_with_terms",
    "linear_logprob",
]
