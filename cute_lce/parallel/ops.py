"""Calls over a group as ops, for torch.compile: each takes the group's name, and its body makes the
collectives.

    sharded_forward                 losses and statistics, and what the backward wants besides its operands
    sharded_backward                both gradients
    gather_rows                     every rank's rows, in rank order
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..arguments import Operands
from ..implementation import Request, Results, Saved
from ..ops import inner, schemas
from ..ops.autograd import (
    NO_DOUBLE_BACKWARD,
    GradientFunction,
    add_gradients,
    as_given,
    kind_of,
    no_options,
    register,
)
from ..ops.plain import is_plain_eager
from ..ops.prepared import cache, key_of, remember
from ..ops.select import implementation
from ..options import LossOptions
from ..plan.problem import Limits
from ..streaming.products import accumulate_dtype
from . import collectives
from .collectives import group_of
from .tensor import Shard, ShardedPasses

SHARD = "str group, SymInt start, bool equal, bool sliced, bool reduces, SymInt sm_margin"
FORWARD = (
    f"sharded_forward({schemas.OPERANDS}, {schemas.LOSS}, {schemas.LIMITS}, SymInt kept_columns, {SHARD})"
    f" -> (Tensor loss, {schemas.STATISTICS}, Tensor every_input, Tensor local_target, Tensor kept, "
    "Tensor kept_scale)"
)
BACKWARD = (
    f"sharded_backward(Tensor dloss, {schemas.OPERANDS}, {schemas.STATISTICS}, Tensor? kept, "
    f"Tensor? kept_scale, {schemas.LOSS}, {schemas.LIMITS}, SymInt kept_columns, {SHARD}, {schemas.NEEDED})"
    " -> (Tensor dinput, Tensor dlinear_weight)"
)
GATHER = "gather_rows(Tensor rows, str group, int ranks) -> Tensor"


def look_up(operands: Operands, loss: LossOptions, request: Request, shard: Shard) -> ShardedPasses:
    """What was prepared for calls of this kind."""
    key = key_of(*operands, loss, (request, shard))
    return cache.get(key) or remember(key, ShardedPasses(operands, request, shard))


class ShardedFunction(torch.autograd.Function):
    """A call's autograd.

    run: of operands and loss, gives Results, and hidden and target as the backward wants them; hidden None:
    as it was given. eager: the passes of an eager call; None: the op is called. arguments: the op's behind
    the loss's fields. destination: ops.Destination of an eager call, or None.
    """

    @staticmethod
    def forward(ctx, run, eager, arguments, loss, destination, *operands):
        results, hidden, target = run(Operands(*operands), loss)
        ctx.eager, ctx.arguments, ctx.loss, ctx.destination = eager, arguments, loss, destination
        ctx.dtype = operands[1].dtype
        ctx.kind = None if destination is None else kind_of(destination.out)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(operands[0] if hidden is None else hidden, operands[1], target, *results[1:])
        if eager is not None:
            return results.loss
        absent = operands[0].new_empty((0,))
        others = [*results[1:4], absent if hidden is None else hidden, target, *results[4:]]
        ctx.mark_non_differentiable(*others)
        return results.loss, *others

    @staticmethod
    def backward(ctx, *dresults):  # pyright: ignore[reportIncompatibleMethodOverride]
        dloss, saved = dresults[0], Saved(*ctx.saved_tensors)
        if ctx.destination is not None:

            def run(needed, out):
                return ctx.eager.backward(dloss, saved, ctx.loss, needed, out)

            return add_gradients(ctx, dloss, saved, run)
        if dloss is None:
            return _gradients(None, None)
        needed = ctx.needs_input_grad[5:7]
        if ctx.eager is not None and is_plain_eager(dloss, *saved):
            if torch.is_grad_enabled():
                raise RuntimeError(NO_DOUBLE_BACKWARD)
            return _gradients(*ctx.eager.backward(dloss, saved, ctx.loss, needed))
        given = inner.call(sharded_backward, dloss, *saved, *ctx.loss, *ctx.arguments, *needed)
        return _gradients(*(tensor if need else None for tensor, need in zip(given, needed, strict=True)))


def _gradients(dinput: Tensor | None, dweight: Tensor | None) -> tuple[Tensor | None, ...]:
    return None, None, None, None, None, dinput, dweight, None


# ----------------------------------------------------------------------------------------------------------
# Bodies and fakes


def _split(arguments: tuple) -> tuple[LossOptions, Request, tuple]:
    """The loss, the request and what begins with the shard's fields, of an op's arguments behind tensors."""
    loss, (window, workspace, kept_columns, *rest) = schemas.loss_of(arguments)
    return loss, Request(Limits(window, workspace), kept_columns), tuple(rest)


def _fake_forward(input, linear_weight, target, *arguments):
    loss, request, shard = _split(arguments)
    sliced = Shard(*shard).sliced
    n, dtype = target.shape[0], accumulate_dtype(input.dtype)
    every = input.new_empty((n, input.shape[1]))
    kept = implementation(input.device, input.dtype).empty_kept(every, request.kept_columns)
    return (
        input.new_empty((n,) if loss.reduction == "none" else (), dtype=dtype),
        input.new_empty((n,), dtype=dtype),
        input.new_empty((n,), dtype=dtype),
        input.new_empty((), dtype=torch.int64),
        every if sliced else input.new_empty((0,)),
        torch.empty_like(target, memory_format=torch.contiguous_format),
        *kept,
    )


@inner.define(FORWARD, _fake_forward)
def sharded_forward(input, linear_weight, target, *arguments):
    loss, request, (name, *rest) = _split(arguments)
    operands, shard = Operands(input, linear_weight, target), Shard(group_of(name), *rest)
    results, hidden, here = look_up(operands, loss, request, shard).run(operands, loss)
    if results.kept is None:
        every = input if hidden is None else hidden
        kept, scale = implementation(input.device, input.dtype).empty_kept(every, 0)
        results = results._replace(kept=kept, kept_scale=scale)
    return *results[:4], input.new_empty((0,)) if hidden is None else hidden, here, *results[4:]


def _fake_backward(dloss, *arguments):
    input, linear_weight, *_ = arguments
    _, _, (group, *shard, need_dinput, need_dweight) = _split(arguments[len(Saved._fields) :])
    sliced = Shard(group, *shard).sliced
    rows = input.shape[0] // (group_of(group).size() if sliced else 1)
    return (
        input.new_empty((rows, input.shape[1]) if need_dinput else (0,)),
        input.new_empty(linear_weight.shape if need_dweight else (0,)),
    )


@inner.define(BACKWARD, _fake_backward)
def sharded_backward(dloss, *arguments):
    saved, rest = Saved(*arguments[: len(Saved._fields)]), arguments[len(Saved._fields) :]
    loss, request, (name, *options) = _split(rest)
    shard, needed = Shard(group_of(name), *options[:-2]), tuple(options[-2:])
    if not request.kept_columns:
        saved = saved._replace(kept=None, kept_scale=None)
    passes = look_up(saved.operands, loss, request, shard)
    return inner.present(passes.backward(dloss, saved, loss, needed), saved.hidden, saved.hidden.dtype)


def _fake_gather(rows, group, ranks):
    return rows.new_empty((ranks, *rows.shape))


@inner.define(GATHER, _fake_gather)
def gather_rows(rows, group, ranks):
    return collectives.gather(rows.contiguous(), group_of(group))


def _results(loss, row_max, row_sum, num_valid, every, target, kept, kept_scale) -> tuple[Any, ...]:
    hidden = every if every.dim() == 2 else None
    return Results(loss, row_max, row_sum, num_valid, kept, kept_scale), hidden, target


def _forward_options(arguments: tuple) -> tuple[Any, ...]:
    loss, rest = schemas.loss_of(arguments)
    return None, rest, loss, None


register(sharded_forward, ShardedFunction, _results, _forward_options)
register(sharded_backward, GradientFunction, as_given, no_options)
