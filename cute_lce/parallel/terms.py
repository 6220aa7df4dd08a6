"""Calls with terms over a group: what each rank makes of the rows' losses, or of numbers of each token.

token_weight and denominator are applied to what the kernels serve; with linear_bias, softcap or z_loss the
numbers are linear_logprob's.
"""

from __future__ import annotations

from torch import Tensor

from ..arguments import Operands
from ..implementation import RowLoss, Stats, StatsOperands, outputs_of
from ..ops import Destination, TermTensors
from ..ops.logprob import Wanted
from ..ops.plain import is_plain_eager
from ..ops.terms import check_factors, divided
from ..options import ComputeOptions, LossOptions, TermOptions
from ..streaming.rows import is_ignored
from . import call, logprob
from .call import Spread


def linear_cross_entropy(
    operands: Operands,
    tensors: TermTensors,
    loss: LossOptions,
    terms: TermOptions,
    compute: ComputeOptions,
    spread: Spread,
    destination: Destination | None = None,
) -> Tensor:
    """The loss; see functional.linear_cross_entropy. tensors.linear_bias: this rank's classes."""
    names = outputs_of(terms)
    has_numbers = names != ("logprob",) or terms.softcap is not None or tensors.linear_bias is not None
    _refuse(operands, tensors, terms, spread, has_numbers, destination)
    target, weight, denominator = operands.target, tensors.token_weight, tensors.denominator
    check_factors(operands, tensors)
    if has_numbers:
        given = StatsOperands(*operands, tensors.linear_bias)
        found = logprob.linear_logprob(given, Wanted(names, True, 1.0), loss, terms, compute, spread)
        stats = Stats(**dict(zip(names, found, strict=True)))
    elif weight is None:
        if loss.reduction != "mean" or denominator is None:
            return _plain(operands, loss, compute, spread, destination)
        total = _plain(operands, loss._replace(reduction="sum"), compute, spread, destination)
        return divided(total, denominator)
    else:
        stats = Stats(
            logprob=-_plain(operands, loss._replace(reduction="none"), compute, spread, destination)
        )
    ignored = is_ignored(target, loss.ignore_index)
    assert stats.logprob is not None
    if weight is not None:
        weight = weight.to(stats.logprob.dtype).masked_fill(ignored, 0)
    # The number of classes matters to smoothing alone.
    losses = RowLoss(terms, None, weight).losses(stats, 1)
    if loss.reduction == "none":
        return losses
    total = losses.sum()
    if loss.reduction == "sum":
        return total
    return divided(total, denominator) if denominator is not None else total / (~ignored).sum().clamp(min=1)


def _plain(
    operands: Operands,
    loss: LossOptions,
    compute: ComputeOptions,
    spread: Spread,
    destination: Destination | None,
) -> Tensor:
    if destination is None:
        return call.call(*operands, loss, compute, spread, is_plain_eager(*operands))
    return call.linear_cross_entropy(*operands, loss, compute, spread, watched=False, destination=destination)


def _refuse(
    operands: Operands,
    tensors: TermTensors,
    terms: TermOptions,
    spread: Spread,
    has_numbers: bool,
    destination: Destination | None,
) -> None:
    """Raise ValueError, by its name, for what a call over a group does not have."""
    if terms.label_smoothing != 0:
        raise ValueError("label_smoothing: got one in a call over several ranks, want 0.0 there")
    if tensors.weight is not None:
        raise ValueError("weight: got one in a call over several ranks, want None there")
    beside = "linear_bias, softcap or z_loss in a call over several ranks"
    if has_numbers and spread.sequence_dim is not None:
        raise ValueError(f"sequence_dim: got {spread.sequence_dim} with {beside}, want None there")
    if has_numbers and destination is not None:
        raise ValueError(f"grad_weight_out: got one with {beside}, want None there")
    hidden, target, weight = operands.hidden, operands.target, tensors.token_weight
    if weight is not None and spread.sequence_dim is not None and target.shape == hidden.shape[:-1]:
        raise ValueError(
            "token_weight: got one with a slice of the targets, want the whole target and all weights"
        )
