"""The ops of the sampled loss, and their autograd.

sampled_losses       each row's loss: a composite, in which symbolic numbers are seen as such
sampled              the same, and what the backward needs
sampled_backward     the gradients by input, linear_weight and linear_bias
"""

from __future__ import annotations

import torch
from torch import Tensor

from .. import environment
from ..arguments import Operands
from ..options import LossOptions
from ..streaming import sampled as streaming
from ..streaming.products import accumulate_dtype
from ..streaming.sampled import SampledOperands, SampledOptions, SampledStats
from . import inner
from .autograd import GradientFunction, as_given, no_options, register
from .prepared import check_targets

_OPERANDS = (
    "Tensor input, Tensor linear_weight, Tensor target, Tensor sampled_ids, Tensor? linear_bias, "
    "Tensor? sampled_log_q, Tensor? target_log_q"
)
_OPTIONS = "SymInt ignore_index, float logit_scale, bool remove_accidental_hits, SymInt window"
_STATS = "Tensor row_max, Tensor others, Tensor row_sum"
_TENSORS = len(SampledOperands._fields)


def _fake_sampled(input, *arguments):
    rows = input.new_empty(input.shape[:1], dtype=accumulate_dtype(input.dtype))
    return tuple(torch.empty_like(rows) for _ in range(1 + len(SampledStats._fields)))


def _fake_backward(dloss, row_max, others, row_sum, *arguments):
    operands, needed = SampledOperands(*arguments[:_TENSORS]), arguments[-3:]
    hidden = operands.hidden
    return tuple(
        hidden.new_empty(like.shape if need and like is not None else (0,))
        for need, like in zip(needed, (hidden, operands.weight, operands.linear_bias), strict=True)
    )


@inner.define(f"sampled({_OPERANDS}, {_OPTIONS}) -> (Tensor loss, {_STATS})", _fake_sampled)
def sampled(*arguments):
    operands, options = SampledOperands(*arguments[:_TENSORS]), SampledOptions(*arguments[_TENSORS:])
    environment.check()
    if environment.CHECK_TARGETS:
        check_targets(Operands(*operands[:3]), LossOptions("none", options.ignore_index))
    loss, stats = streaming.forward(operands, options)
    return loss, *stats


@inner.define(
    f"sampled_backward(Tensor dloss, {_STATS}, {_OPERANDS}, {_OPTIONS}, bool need_dinput, bool need_dweight, "
    "bool need_dbias) -> (Tensor dinput, Tensor dlinear_weight, Tensor dlinear_bias)",
    _fake_backward,
)
def sampled_backward(dloss, row_max, others, row_sum, *arguments):
    operands, arguments = SampledOperands(*arguments[:_TENSORS]), arguments[_TENSORS:]
    options, needed = SampledOptions(*arguments[:-3]), arguments[-3:]
    stats = SampledStats(row_max, others, row_sum)
    found = streaming.backward(operands, options, stats, dloss, needed)
    return inner.present(found, operands.hidden, operands.hidden.dtype)


class SampledFunction(torch.autograd.Function):
    """sampled. run: of the operands, gives the loss and SampledStats' fields."""

    @staticmethod
    def forward(ctx, run, options, *operands):
        results = run(operands)
        ctx.options = options
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*results[1:], *operands)
        ctx.mark_non_differentiable(*results[1:])
        return tuple(results)

    @staticmethod
    def backward(ctx, *dresults):  # pyright: ignore[reportIncompatibleMethodOverride]
        _, _, *needs = ctx.needs_input_grad
        needed = needs[0], needs[1], needs[4]
        gradients: tuple[Tensor | None, ...] = (None, None, None)
        if dresults[0] is not None:
            arguments = *ctx.saved_tensors, *ctx.options, *needed
            found = inner.call(sampled_backward, dresults[0], *arguments)
            gradients = tuple(each if need else None for each, need in zip(found, needed, strict=True))
        dinput, dweight, dbias = gradients
        return None, None, dinput, dweight, None, None, dbias, None, None


register(sampled, SampledFunction, as_given, lambda arguments: (SampledOptions(*arguments),))
register(sampled_backward, GradientFunction, as_given, no_options)


def losses(*arguments) -> Tensor:
    """Each row's loss; arguments: the op's."""
    run = _op if torch.compiler.is_dynamo_compiling() else _losses
    return run(*arguments)


def _losses(*arguments) -> Tensor:
    options = SampledOptions(*arguments[_TENSORS:])
    LossOptions(logit_scale=options.logit_scale)
    return inner.call(sampled, *arguments)[0]


_PUBLIC = f"sampled_losses({_OPERANDS}, {_OPTIONS.replace('float', 'Scalar')}) -> Tensor"
inner.library.define(_PUBLIC, tags=(torch.Tag.pt2_compliant_tag,))
inner.library.impl("sampled_losses", _losses, "CompositeImplicitAutograd")
_op = torch.ops.cute_lce.sampled_losses.default
