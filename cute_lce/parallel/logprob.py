"""linear_logprob over the ranks of a group."""

from __future__ import annotations

from torch import Tensor

from ..implementation import StatsOperands
from ..ops.logprob import Wanted, call_of
from ..ops.plain import is_plain_eager
from ..options import ComputeOptions, LossOptions, TermOptions
from . import call as plain_call
from .call import Spread
from .numbers import numbers_of

OUTPUTS = ("logprob", "lse", "entropy")


def linear_logprob(
    given: StatsOperands,
    wanted: Wanted,
    loss: LossOptions,
    terms: TermOptions,
    compute: ComputeOptions,
    spread: Spread,
) -> list[Tensor]:
    """The numbers that wanted.outputs names, in its order; see cute_lce.linear_logprob. given: as the caller
    has them, linear_weight and linear_bias this rank's rows."""
    call = call_of(given, wanted, loss, terms, compute)
    for name in call.options.outputs:
        if name not in OUTPUTS:
            raise ValueError(f"outputs: got {name!r} with tp_group, want names of {', '.join(OUTPUTS)}")
    if call.is_plain:
        plain = is_plain_eager(*call.plain_operands)
        losses = plain_call.call(*call.plain_operands, call.plain_loss, compute, spread, plain)
        return [-losses.view(call.shape)]
    return call.named(numbers_of(call.operands, call.options, loss, compute, spread).stats)
