"""The inner ops: their bodies, which call the implementation, and their fake functions."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..arguments import Operands
from ..implementation import Accumulated, Forward, Request, Results, Saved
from ..options import LossOptions
from ..plan.problem import Limits
from ..streaming.products import accumulate_dtype
from ..streaming.rows import is_ignored
from . import schemas
from .schemas import loss_of
from .select import implementation

library = torch.library.Library("cute_lce", "DEF")

# Read once, not in every call.
CHECK_TARGETS = os.environ.get("CUTE_LCE_CHECK_TARGETS", "0") not in ("", "0")


def _define(schema: str, fake: Callable[..., Any]):
    """Define an inner op with the decorated function as its body on every device; returns the op."""

    def register(body):
        name = schema.split("(")[0]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, body, "CompositeExplicitAutograd")
        torch.library.register_fake(f"cute_lce::{name}", fake, lib=library)
        return getattr(torch.ops.cute_lce, name).default

    return register


def _absent(like: Tensor, dtype: torch.dtype) -> Tensor:
    """What an op returns for a gradient that is not needed: a schema has no optional results."""
    return like.new_empty((0,), dtype=dtype)


def _present(gradients: tuple[Tensor | None, ...], like: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(_absent(like, dtype) if gradient is None else gradient for gradient in gradients)


def check_targets(operands: Operands, loss: LossOptions) -> None:
    """With CUTE_LCE_CHECK_TARGETS=1 a bad target is a device-side assertion, in a captured graph too."""
    target, V = operands.target, operands.weight.shape[0]
    if CHECK_TARGETS and target.device.type != "cpu":
        in_range = ((target >= 0) & (target < V)) | is_ignored(target, loss.ignore_index)
        message = f"target: found a class outside [0, {V}) that is not ignore_index={loss.ignore_index}"
        torch.ops.aten._assert_async.msg(in_range.all(), message)


# ----------------------------------------------------------------------------------------------------------
# Phases, back to back


def prepare_forward(operands: Operands, loss: LossOptions, request: Request) -> Forward:
    return implementation(operands.hidden.device, operands.hidden.dtype).forward(operands, loss, request)


def run_forward(forward: Forward, operands: Operands, loss: LossOptions) -> Results:
    if CHECK_TARGETS:
        check_targets(operands, loss)
    return forward.finish(operands, loss, forward.statistics(operands, loss))


def run_backward(
    dloss: Tensor, saved: Saved, loss: LossOptions, request: Request
) -> tuple[Tensor | None, Tensor | None]:
    hidden = saved.hidden
    backward = implementation(hidden.device, hidden.dtype).backward(dloss, saved, loss, request)
    return backward.dinput(), backward.dweight()


def run_grad_in_forward(request: Request, operands: Operands, loss: LossOptions) -> Accumulated:
    if CHECK_TARGETS:
        check_targets(operands, loss)
    hidden = operands.hidden
    return implementation(hidden.device, hidden.dtype).grad_in_forward(operands, loss, request)


# ----------------------------------------------------------------------------------------------------------
# Fakes


def _fake_forward(input, linear_weight, target, *arguments):
    loss, _ = loss_of(arguments)
    n = input.shape[0]
    dtype = accumulate_dtype(input.dtype)
    return (
        input.new_empty((n,) if loss.reduction == "none" else (), dtype=dtype),
        input.new_empty((n,), dtype=dtype),
        input.new_empty((n,), dtype=dtype),
        input.new_empty((), dtype=torch.int64),
    )


def _fake_forward_keep(input, linear_weight, target, *arguments):
    kept = implementation(input.device, input.dtype).empty_kept(input, arguments[-1])
    return *_fake_forward(input, linear_weight, target, *arguments), *kept


def _fake_backward(dloss, input, linear_weight, *arguments):
    need_dinput, need_dweight = arguments[-2:]
    return (
        input.new_empty(input.shape if need_dinput else (0,)),
        input.new_empty(linear_weight.shape if need_dweight else (0,)),
    )


def _fake_grad_in_forward(input, linear_weight, target, *arguments):
    need_dinput, need_dweight = arguments[-2:]
    loss, _, _, num_valid = _fake_forward(input, linear_weight, target, *arguments)
    return (
        loss,
        num_valid,
        loss.new_empty(input.shape if need_dinput else (0,)),
        loss.new_empty(linear_weight.shape if need_dweight else (0,)),
    )


def _fake_scale_gradients(dloss, num_valid, dinput_accumulator, dweight_accumulator, *arguments):
    _, (dtype, need_dinput, need_dweight) = loss_of(arguments)
    return (
        dloss.new_empty(dinput_accumulator.shape if need_dinput else (0,), dtype=dtype),
        dloss.new_empty(dweight_accumulator.shape if need_dweight else (0,), dtype=dtype),
    )


# ----------------------------------------------------------------------------------------------------------
# Ops


@_define(schemas.FORWARD, _fake_forward)
def forward(input, linear_weight, target, *arguments):
    operands = Operands(input, linear_weight, target)
    loss, limits = loss_of(arguments)
    request = Request(Limits(*limits), need_dinput=False, need_dweight=False)
    return run_forward(prepare_forward(operands, loss, request), operands, loss)[:4]


@_define(schemas.FORWARD_KEEP, _fake_forward_keep)
def forward_keep(input, linear_weight, target, *arguments):
    operands = Operands(input, linear_weight, target)
    loss, (window, workspace, kept_columns) = loss_of(arguments)
    request = Request(Limits(window, workspace), kept_columns)
    results = run_forward(prepare_forward(operands, loss, request), operands, loss)
    if results.kept is None:
        # A symbolic number of columns may come to 0.
        kept, scale = implementation(input.device, input.dtype).empty_kept(input, 0)
        results = results._replace(kept=kept, kept_scale=scale)
    return tuple(results)


@_define(schemas.BACKWARD, _fake_backward)
def backward(dloss, *arguments):
    saved, rest = Saved(*arguments[: len(Saved._fields)]), arguments[len(Saved._fields) :]
    loss, (window, workspace, *needed) = loss_of(rest)
    request = Request(Limits(window, workspace), 0, *needed)
    gradients = run_backward(dloss, saved, loss, request)
    return _present(gradients, saved.hidden, saved.hidden.dtype)


@_define(schemas.GRAD_IN_FORWARD, _fake_grad_in_forward)
def grad_in_forward(input, linear_weight, target, *arguments):
    loss, (window, workspace, *needed) = loss_of(arguments)
    request = Request(Limits(window, workspace), 0, *needed)
    given = run_grad_in_forward(request, Operands(input, linear_weight, target), loss)
    return given.loss, given.num_valid, *_present(given[2:], given.loss, given.loss.dtype)


@_define(schemas.SCALE_GRADIENTS, _fake_scale_gradients)
def scale_gradients(dloss, num_valid, dinput_accumulator, dweight_accumulator, *arguments):
    loss, (dtype, need_dinput, need_dweight) = loss_of(arguments)
    accumulated = Accumulated(
        dloss,
        num_valid,
        dinput_accumulator if need_dinput else None,
        dweight_accumulator if need_dweight else None,
    )
    scaled = implementation(dloss.device, dtype).scale_gradients(dloss, accumulated, loss, dtype)
    return _present(scaled, dloss, dtype)
