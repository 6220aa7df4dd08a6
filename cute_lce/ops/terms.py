"""A loss with terms: checks, autocast, schedule, the op, and what is made of its numbers."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import Operands
from ..implementation import Request, RowLoss, Statistics, Stats, StatsOperands, StatsOptions
from ..options import ComputeOptions, LossOptions, TermOptions
from ..plan.problem import Problem
from ..streaming.products import accumulate_dtype
from ..streaming.rows import is_ignored, is_valid
from . import call, inner
from .autograd import Destination, apply_of
from .checks import autocast, autocast_bias, check_tensors, check_term, flatten, refuse_gradient
from .plain import has_saved_tensors_hooks, is_distributed, is_plain_eager
from .row_losses import row_losses
from .select import DTYPES, statistics
from .token_stats import (
    LossGradientsFunction,
    StatsFunction,
    StatsHow,
    eager_token_stats,
    listed,
    token_loss_gradients,
    token_stats,
)


class TermTensors(NamedTuple):
    """linear_bias, weight: (V,); token_weight: target's shape; denominator: ()."""

    linear_bias: Tensor | None = None
    weight: Tensor | None = None
    token_weight: Tensor | None = None
    denominator: Tensor | None = None

    @property
    def any(self) -> bool:
        """Whether there is one."""
        return any(each is not None for each in self)


_NUMBERS = (*DTYPES, torch.int64, torch.int32, torch.bool)


def linear_cross_entropy(
    operands: Operands,
    tensors: TermTensors,
    loss: LossOptions,
    terms: TermOptions,
    compute: ComputeOptions,
    destination: Destination | None = None,
) -> Tensor:
    """The loss, in target's shape for "none"."""
    operands, linear_bias = checked(operands, tensors.linear_bias)
    check_term_tensors(operands, tensors)
    flat = flatten(operands)
    # DTensor, which knows how inner ops spread over a mesh, has no regard to their reduction.
    weighs = tensors.weight is not None or tensors.token_weight is not None or is_distributed(*flat)
    # What changes no number of a token but its factor is a plain call, which the kernels serve.
    plainly = terms.numbers == ("logprob",) and terms.softcap is None and linear_bias is None
    plainly = plainly and not (weighs and compute.schedule == "grad_in_forward")
    V, acc = flat.weight.shape[0], accumulate_dtype(flat.hidden.dtype)
    target_weight = token_weight = None
    if tensors.weight is not None:
        own = tensors.weight.to(acc)[flat.target.long().clamp(0, V - 1)]
        target_weight = own.masked_fill(is_ignored(flat.target, loss.ignore_index), 0)
    if tensors.token_weight is not None:
        own = tensors.token_weight.reshape(-1).to(acc)
        token_weight = own.masked_fill(is_ignored(flat.target, loss.ignore_index), 0)
    row_loss = RowLoss(terms, target_weight, token_weight)
    if plainly and not weighs and loss.reduction != "none":
        total = plain_losses(flat, loss._replace(reduction="sum"), compute, destination)
    elif plainly:
        nll = plain_losses(flat, loss._replace(reduction="none"), compute, destination)
        total = row_losses(row_loss, Stats(), V, total=loss.reduction != "none", nll=nll)
    else:
        total = _from_stats(flat, linear_bias, tensors.weight, row_loss, loss, compute, destination)
    if loss.reduction == "none":
        return total.view(operands.target.shape)
    if loss.reduction == "sum":
        return total
    if tensors.denominator is not None:
        return divided(total, tensors.denominator)
    if target_weight is not None:
        return mean(total, target_weight.sum())
    return mean(total, is_valid(flat.target, loss.ignore_index).sum())


def plain_losses(
    operands: Operands, loss: LossOptions, compute: ComputeOptions, destination: Destination | None = None
) -> Tensor:
    """A call without terms but loss.logit_scale, of operands in two dimensions."""
    watched = not is_plain_eager(*operands)
    return call.linear_cross_entropy(*operands, loss, compute, watched=watched, destination=destination)


def _from_stats(
    operands: Operands,
    linear_bias: Tensor | None,
    class_weight: Tensor | None,
    row_loss: RowLoss,
    loss: LossOptions,
    compute: ComputeOptions,
    destination: Destination | None,
) -> Tensor:
    """The rows' losses, or their sum, from numbers of each token."""
    options = StatsOptions.of(loss, row_loss.terms)
    given = StatsOperands(*operands, linear_bias, class_weight)
    schedule, how = decide(given, options, compute, loss.reduction, destination)
    if schedule == "grad_in_forward":
        return _loss_gradients(given, row_loss, how, loss.reduction != "none")
    stats = stats_of(given, how)
    return row_losses(row_loss, stats, operands.weight.shape[0], total=loss.reduction != "none")


def checked(operands: Operands, linear_bias: Tensor | None) -> tuple[Operands, Tensor | None]:
    """The operands and the bias after autocast. Raises for what they may not be."""
    hidden, weight = autocast(operands.hidden, operands.weight)
    operands = Operands(hidden, weight, operands.target)
    check_tensors(operands)
    linear_bias = autocast_bias(linear_bias, hidden)
    if linear_bias is not None:
        check_term("linear_bias", linear_bias, (weight.shape[0],), (hidden.dtype,), hidden)
    return operands, linear_bias


def check_term_tensors(operands: Operands, tensors: TermTensors) -> None:
    """Raise for what they may not be, but for a linear_bias."""
    if tensors.weight is not None:
        check_term("weight", tensors.weight, operands.weight.shape[:1], DTYPES, operands.hidden)
        refuse_gradient("weight", tensors.weight)
    check_factors(operands, tensors)


def check_factors(operands: Operands, tensors: TermTensors) -> None:
    """Raise for a token_weight or a denominator that is none."""
    hidden, target = operands.hidden, operands.target
    if tensors.token_weight is not None:
        check_term("token_weight", tensors.token_weight, tuple(target.shape), _NUMBERS, hidden)
        refuse_gradient("token_weight", tensors.token_weight)
    if tensors.denominator is not None:
        check_term("denominator", tensors.denominator, (), _NUMBERS, hidden)
        refuse_gradient("denominator", tensors.denominator)


def decide(
    operands: StatsOperands,
    options: StatsOptions,
    compute: ComputeOptions,
    reduction: str,
    destination: Destination | None,
    serving: Statistics | None = None,
    *,
    shard: bool = False,
) -> tuple[str, StatsHow]:
    """The schedule, and what the op runs with. serving: what serves the call; None: what is picked for it.
    shard: whether the classes are a shard's."""
    hidden, weight = operands.hidden, operands.weight
    need_dinput, need_dweight, need_dbias = _needs(operands)
    limits, (V, d) = compute.limits, weight.shape
    # Of a group's tokens hidden may be a slice.
    n = operands.target.shape[0]
    plain = is_plain_eager(*operands)
    # Hooks may give back a part of a larger storage, or another stream's memory: neither is ours to free.
    overwrites = plain and not shard and not has_saved_tensors_hooks()
    problem = Problem(n, d, V, hidden.dtype is torch.float16, need_dinput, need_dweight, shard=shard)
    problem = problem._replace(overwrites=overwrites, need_dbias=need_dbias)
    example = options if plain else options.example
    serving = serving or statistics(operands, example, compute.schedule)
    schedule, kept_columns = serving.choose(problem, operands, example, compute.schedule, reduction, limits)
    if schedule == "grad_in_forward" and reduction == "none" and need_dbias:
        raise ValueError(
            "schedule: got 'grad_in_forward' with reduction='none' and a linear_bias that needs a gradient, "
            "want reduction 'mean' or 'sum', or another schedule"
        )
    request = Request(limits, kept_columns, need_dinput, need_dweight, need_dbias=need_dbias)
    request = request._replace(overwrites=overwrites and kept_columns > 0)
    return schedule, StatsHow(options, request, destination if need_dweight else None, plain)


def _needs(operands: StatsOperands) -> tuple[bool, bool, bool]:
    """Whether input, linear_weight and linear_bias need a gradient."""
    bias = operands.linear_bias
    need_dbias = bias is not None and torch.is_grad_enabled() and bias.requires_grad
    return *call.needs_gradient(operands.hidden, operands.weight), need_dbias


def stats_of(operands: StatsOperands, how: StatsHow) -> Stats:
    """The numbers that how.options name, the others None; differentiable."""
    options, request = how.options, how.request
    if how.is_plain:
        run = functools.partial(eager_token_stats, options, Request(request.limits, request.kept_columns))
        wants_node = request.need_dinput or request.need_dweight or request.need_dbias
    else:
        arguments = *listed(options), *request.limits, request.kept_columns
        run = functools.partial(_run, token_stats, arguments)
        # The op makes one of its own, which has no destination.
        wants_node = how.destination is not None
    found = apply_of(StatsFunction)(run, how, *operands) if wants_node else run(operands)
    named = zip(Stats._fields, found, strict=True)
    return Stats(**{name: value for name, value in named if name in options.outputs})


def _run(op, arguments: tuple, operands: tuple) -> tuple[Tensor, ...]:
    return inner.call(op, *operands, *arguments)


def _loss_gradients(operands: StatsOperands, row_loss: RowLoss, how: StatsHow, total: bool) -> Tensor:
    """The rows' losses or their total by "grad_in_forward"."""
    request = how.request
    tensors = *operands, row_loss.target_weight, row_loss.token_weight
    needed = request.need_dinput, request.need_dweight, request.need_dbias
    numbers = how.options.ignore_index, how.options.logit_scale, *row_loss.terms
    arguments = *numbers, *request.limits, *needed, total
    if how.destination is None:
        return inner.call(token_loss_gradients, *tensors, *arguments)[0]
    run = functools.partial(_run, token_loss_gradients, arguments)
    return apply_of(LossGradientsFunction)(run, how, *tensors)[0]


def divided(total: Tensor, denominator: Tensor) -> Tensor:
    """total / denominator; where both are 0, 0 without a gradient."""
    denominator = denominator.to(total.dtype)
    of_nothing = (denominator == 0) & (total.detach() == 0)
    return torch.where(of_nothing, 0, total / torch.where(of_nothing, 1, denominator))


def mean(total: Tensor, count: Tensor) -> Tensor:
    """torch's: over the valid rows, or their classes' weights; 0 where that is 0, but for a total of nan. The
    total of no rows is 0, or nan."""
    if not count.is_floating_point():
        return total / count.clamp(min=1)
    counts = count != 0
    return torch.where(counts | total.isnan(), total / torch.where(counts, count, 1), 0)
