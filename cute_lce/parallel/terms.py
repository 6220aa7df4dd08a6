"""Calls with terms over a group: what each rank makes of the rows' losses, or of numbers of each token.

Rows are those of all tokens, rank by rank where input is a slice of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import Operands
from ..implementation import RowLoss, Stats, StatsOperands, StatsOptions
from ..ops import Destination, TermTensors
from ..ops.call import needs_gradient
from ..ops.plain import is_plain_eager
from ..ops.row_losses import row_losses
from ..ops.terms import check_term_tensors, checked, divided, mean
from ..options import ComputeOptions, LossOptions, TermOptions
from ..streaming.products import accumulate_dtype
from ..streaming.rows import is_ignored
from . import call, ops, ranks
from .call import Spread
from .numbers import numbers_of
from .tokens import tokens_of


def linear_cross_entropy(
    operands: Operands,
    tensors: TermTensors,
    loss: LossOptions,
    terms: TermOptions,
    compute: ComputeOptions,
    spread: Spread,
    destination: Destination | None = None,
) -> Tensor:
    """The loss; see functional.linear_cross_entropy. tensors.linear_bias and weight: this rank's classes."""
    group, target = spread.tp_group, operands.target
    tokens = tokens_of(operands.hidden, target, spread.sequence_dim, group)
    given = operands._replace(target=call.as_inputs(target, tokens, group))
    (hidden, weight, _), linear_bias = checked(given, tensors.linear_bias)
    check_term_tensors(operands, tensors)
    call.refuse_grad_in_forward(compute)
    if ranks.are_checked(hidden, weight, target):
        _check_ranks(operands, tensors, loss, terms, compute, spread)
    flat = Operands(hidden.reshape(-1, hidden.shape[-1]), weight, call.flatten_watched(target, tokens, group))
    spread = spread._replace(sequence_dim=None if tokens.dim is None else 0)
    ignored, acc = is_ignored(flat.target, loss.ignore_index), accumulate_dtype(hidden.dtype)
    # Smoothing alone asks for the number of classes.
    target_weight = token_weight = classes = None
    if tensors.token_weight is not None:
        token_weight = call.flatten_watched(tensors.token_weight, tokens, group).to(acc)
        token_weight = token_weight.masked_fill(ignored, 0)
    if tensors.weight is not None:
        target_weight, classes = _of_classes(flat, tensors.weight.to(acc), ignored, spread)
    plainly = terms.numbers == ("logprob",) and terms.softcap is None and linear_bias is None
    weighs = target_weight is not None or token_weight is not None
    if plainly and not weighs and loss.reduction != "none":
        total = _plain(flat, loss._replace(reduction="sum"), compute, spread, destination)
    else:
        stats = nll = None
        if plainly:
            nll = _plain(flat, loss._replace(reduction="none"), compute, spread, destination)
        else:
            rows = StatsOperands(*flat, linear_bias, tensors.weight)
            options = StatsOptions.of(loss, terms)
            stats, weights = numbers_of(rows, options, loss, compute, spread, destination)
            classes = weights if classes is None else classes
        row_loss, adds_up = RowLoss(terms, target_weight, token_weight), loss.reduction != "none"
        classes = 1 if classes is None else classes
        total = row_losses(row_loss, stats or Stats(), classes, total=adds_up, nll=nll)
        if not adds_up:
            return call.of_target(total, tokens, group)
    if loss.reduction == "sum":
        return total
    if tensors.denominator is not None:
        return divided(total, tensors.denominator)
    return mean(total, (~ignored).sum() if target_weight is None else target_weight.sum())


def _check_ranks(
    operands: Operands,
    tensors: TermTensors,
    loss: LossOptions,
    terms: TermOptions,
    compute: ComputeOptions,
    spread: Spread,
) -> None:
    """Before the first collective of the terms, which not all ranks would make."""
    equal = {"denominator": tensors.denominator}
    if ranks.has_every_token(operands.hidden, operands.target, spread):
        equal["token_weight"] = tensors.token_weight
    values: dict[str, object] = {
        f"{name}'s values": None if tensor is None else ranks.digest(tensor) for name, tensor in equal.items()
    }
    values["token_weight's shape and dtype"] = ranks.kind(tensors.token_weight)
    given = tuple(name for name, tensor in tensors._asdict().items() if tensor is not None)
    needs = needs_gradient(operands.hidden, operands.weight)
    ranks.check(operands, needs, loss, compute, spread, **values, terms=(given, tuple(terms)))


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


def _of_classes(
    operands: Operands, class_weight: Tensor, ignored: Tensor, spread: Spread
) -> tuple[Tensor, Tensor]:
    """(the class weights (n,) of the targets, which each the rank has whose shard has the class, 0 in ignored
    rows; the number of all ranks' classes)."""
    (V,), group = class_weight.shape, spread.tp_group
    here = operands.target.long() - call.first_class(spread, V)
    inside = (here >= 0) & (here < V) & ~ignored
    own = torch.where(inside, class_weight[here.clamp(0, V - 1)], 0)
    given = torch.cat((own, own.new_full((1,), V)))
    found = ops.gather_rows(given, group.group_name, group.size()).sum(0)
    return found[:-1], found[-1]
