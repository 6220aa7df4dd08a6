"""The steps of a call: autocast, which gradients are needed, schedule, flattening, implementation, a view.

They are the same whether or not something intercepts the dispatcher. If nothing does, the implementation is
called directly, and everything that does not depend on values is decided once for operands of the same kind.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import Operands
from ..implementation import Request
from ..options import ComputeOptions, LossOptions
from ..plan.memory import DEFAULT_WORKSPACE
from ..plan.problem import Problem
from . import autograd, inner, prepared
from .autograd import Destination
from .checks import autocast, check_tensors, flatten
from .prepared import Prepared, key_of
from .select import implementation


class _Call(NamedTuple):
    """A call of one kind, checked and decided.

    run: computes the loss of operands of shapes (n, d), (V, d) and (n,); the options' numbers may differ from
    call to call. Where the call has a Destination, that comes first. flat: whether the operands already have
    these shapes.
    """

    run: Callable[..., Tensor]
    flat: bool


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    loss: LossOptions,
    compute: ComputeOptions,
    *,
    watched: bool,
    destination: Destination | None = None,
) -> Tensor:
    """The loss, in target's shape for "none". watched: whether something intercepts the dispatcher; then
    there is no destination."""
    input, linear_weight = autocast(input, linear_weight)
    needs = needs_gradient(input, linear_weight)
    if not needs[1]:
        destination = None
    added = None if destination is None else destination.out.dtype
    try:
        how = needs, compute, added
        key = None if watched else key_of(input, linear_weight, target, loss, how)
    except RuntimeError:
        # A layout without strides, which is refused.
        key = None
    call: _Call | None = prepared.cache.get(key) if key else None
    if call is None:
        operands = Operands(input, linear_weight, target)
        call = _prepare(operands, needs, loss, compute, watched, added)
        if key:
            prepared.remember(key, call)
    run = call.run if destination is None else functools.partial(call.run, destination)
    if call.flat:
        return run(loss, input, linear_weight, target)
    result = run(loss, *flatten(Operands(input, linear_weight, target)))
    return result.view(target.shape) if loss.reduction == "none" else result


def needs_gradient(input: Tensor, linear_weight: Tensor) -> tuple[bool, bool]:
    """Whether each of the two needs a gradient."""
    if torch.is_grad_enabled():
        return input.requires_grad, linear_weight.requires_grad
    return False, False


def _prepare(
    operands: Operands,
    needs: tuple[bool, bool],
    loss: LossOptions,
    compute: ComputeOptions,
    watched: bool,
    added: torch.dtype | None,
) -> _Call:
    """Check a call, choose its schedule, and bind what computes it. added: of its Destination."""
    check_tensors(operands)
    hidden, weight, target = operands
    V, d = weight.shape
    limits = compute.limits
    adds = added is not None
    problem = Problem(target.numel(), d, V, hidden.dtype is torch.float16, *needs, adds=adds)
    schedule, kept_columns = implementation(hidden.device, hidden.dtype).choose(
        *(problem, hidden.dtype, hidden.device, compute.schedule, loss.reduction, limits),
        may_accumulate=not (watched or adds),
    )
    if compute.schedule == "auto" and schedule == "grad_in_forward" and not limits.workspace:
        # Asked for by name it may raise the default.
        limits = limits._replace(workspace=DEFAULT_WORKSPACE)
    request = Request(
        *(limits, kept_columns, *needs), statistics=problem.wants_gradient, packs=not watched, added=added
    )
    run = _bind_op(schedule, request) if watched else _bind_eager(schedule, operands, request, adds)
    return _Call(run, hidden.dim() == 2)


_OPS = {
    "recompute": (inner.forward, ()),
    "keep": (inner.forward_keep, ("kept_columns",)),
    "grad_in_forward": (inner.grad_in_forward, ("need_dinput", "need_dweight")),
}
"""Schedule -> the inner op, and the fields of the Request that it takes beside the limits."""


def _bind_op(schedule: str, request: Request) -> Callable[..., Tensor]:
    """Through the dispatcher: the inner op of a schedule."""
    op, names = _OPS[schedule]
    arguments = *request.limits, *(getattr(request, name) for name in names)
    return functools.partial(_run_op, op, arguments)


def _run_op(op, arguments: tuple, loss: LossOptions, *operands: Tensor) -> Tensor:
    return inner.call(op, *operands, *loss, *arguments)[0]


_EAGER = {
    "recompute": (autograd.ForwardFunction, autograd.AddingFunction, Prepared.forward),
    "keep": (autograd.ForwardFunction, autograd.AddingFunction, Prepared.forward),
    "grad_in_forward": (
        autograd.GradInForwardFunction,
        autograd.AddingGradInForwardFunction,
        Prepared.grad_in_forward,
    ),
}
"""Schedule -> its autograd.Function, that of calls with a Destination, and what of a Prepared they run."""


def _bind_eager(schedule: str, operands: Operands, request: Request, adds: bool) -> Callable[..., Tensor]:
    """Without the dispatcher: the implementation, in an autograd.Function if a gradient is needed."""
    returning, adding, method = _EAGER[schedule]
    function = adding if adds else returning
    passes = prepared.prepare(operands, request)
    run = functools.partial(method, passes)
    if not request.statistics:
        return functools.partial(_run_for_loss, run)
    return functools.partial(autograd.apply_of(function), run, passes, request)


def _run_for_loss(run, loss: LossOptions, *operands: Tensor) -> Tensor:
    return run(Operands(*operands), loss).loss
