"""The inner ops' autograd.

An op's autograd is an autograd.Function under the Autograd key instead of torch.library.register_autograd: 15
us instead of 27 (a forward with four results that needs a gradient, one core, torch 2.13). A plain eager call
(plain.py) applies the same Functions to the implementation directly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from ..arguments import Operands
from ..implementation import Accumulated, BothGradients, Request, Results, Saved
from ..options import LossOptions
from ..plan.problem import Limits
from . import inner
from .asked import needed_now
from .plain import innermost_transform, is_plain_eager, placed_as
from .schemas import loss_of

_below_autograd = torch._C._AutoDispatchBelowAutograd

NO_DOUBLE_BACKWARD = (
    "cute_lce.linear_cross_entropy: its gradient was asked to be differentiated, and it supports no double "
    "backward (cute_lce.reference.linear_cross_entropy does)"
)
_NO_FORWARD_MODE = (
    "cute_lce.linear_cross_entropy: {} got a tangent for {}, and it supports no forward-mode differentiation "
    "(torch.func.jvp, jacfwd, torch.autograd.forward_ad), which cute_lce.reference.linear_cross_entropy does"
)
_NO_TRANSFORM = (
    "cute_lce.linear_cross_entropy: schedule: got 'grad_in_forward' with an operand that torch.func's grad, "
    "vjp or jacrev differentiates, want 'recompute', 'keep' or 'auto'"
)

_NO_DESTINATION = (
    "cute_lce.linear_cross_entropy: grad_weight_out: got a backward that something intercepts (torch.compile,"
    " a transform, a dispatch mode, a tensor subclass), want an eager one"
)

_OTHER_DESTINATION = (
    "cute_lce.linear_cross_entropy: grad_weight_out: got in the backward a tensor that was resized, freed, "
    "cast or moved to another device or an odd address, want (V, d), contiguous, as in the forward"
)

# Arguments of a Function's forward before its operands: run, prepared, request, loss.
_OPTIONS = 4


class ForwardFunction(torch.autograd.Function):
    """forward and forward_keep.

    run: of operands and loss, gives Results. prepared: of an eager call, of which only the loss is wanted,
    which spares it the other results' wrapping; None: the op is called, with all results of its schema.
    request, loss: what it runs with.
    """

    @staticmethod
    def forward(ctx, run, prepared, request, loss, *operands):
        results = run(Operands(*operands), loss)
        ctx.prepared, ctx.loss, ctx.request = prepared, loss, request
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, *results[1:])
        if prepared is not None:
            return results[0]
        others = [result for result in results[1:] if result is not None]
        ctx.mark_non_differentiable(*others)
        return results[0], *others

    @staticmethod
    def backward(ctx, *dresults):  # pyright: ignore[reportIncompatibleMethodOverride]
        dloss = dresults[0]
        needed = ctx.needs_input_grad[_OPTIONS : _OPTIONS + 2]
        if dloss is None:
            return _gradients(None, None)
        saved, prepared = Saved(*ctx.saved_tensors), ctx.prepared
        # Tensors saved under a transform outlive it, and only the dispatcher unwraps them.
        if prepared is None or torch.is_grad_enabled() or not is_plain_eager(dloss, *saved):
            if prepared is not None:
                saved = prepared.unpacked(saved)
            dloss = placed_as(dloss, saved.row_max)
            arguments = *ctx.loss, *ctx.request.limits, *needed
            given = inner.call(inner.backward, dloss, *saved, *arguments)
            return _gradients(*(tensor if need else None for tensor, need in zip(given, needed, strict=True)))
        return _gradients(*prepared.backward(dloss, saved, ctx.loss, needed))


class GradInForwardFunction(torch.autograd.Function):
    """grad_in_forward, whose backward is scale_gradients. Arguments as in ForwardFunction; run returns
    Accumulated."""

    @staticmethod
    def forward(ctx, run, prepared, request, loss, *operands):
        results = run(Operands(*operands), loss)
        ctx.dtype, ctx.loss = operands[0].dtype, loss
        ctx.needed = request.need_dinput, request.need_dweight
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(operands[2], *results[1:])
        if prepared is not None:
            return results[0]
        ctx.mark_non_differentiable(*results[1:])
        return tuple(results)

    @staticmethod
    def backward(ctx, *dresults):  # pyright: ignore[reportIncompatibleMethodOverride]
        if dresults[0] is None:
            return _gradients(None, None)
        if torch.is_grad_enabled():
            # The gradients are constants here: a second derivative would silently omit them.
            raise RuntimeError(NO_DOUBLE_BACKWARD)
        arguments = *ctx.saved_tensors, *ctx.loss, ctx.dtype, *ctx.needed
        given = inner.call(inner.scale_gradients, dresults[0], *arguments)
        return _gradients(*(tensor if need else None for tensor, need in zip(given, ctx.needed, strict=True)))


class Destination(NamedTuple):
    """Where an eager call's backward adds dweight to instead of returning it, (V, d) and `is_writable`; and
    whether autograd gets zeros in its place."""

    out: Tensor
    dummy: bool


def kind_of(out: Tensor) -> tuple:
    """What of the tensor must be in the backward as it was in the forward, whatever memory it has then."""
    return out.shape, out.dtype, out.device


def is_writable(out: Tensor) -> bool:
    """Whether kernels may write to a tensor's address: contiguous, at a multiple of 16 bytes, in memory that
    is there."""
    end = out.storage_offset() * out.element_size() + out.nbytes
    is_there = end <= out.untyped_storage().nbytes()
    return out.is_contiguous() and out.data_ptr() % 16 == 0 and is_there and not out.is_neg()


class AddingFunction(torch.autograd.Function):
    """ForwardFunction of an eager call with a destination, which is kept on ctx: others add to it between
    forward and backward, which a saved tensor would refuse."""

    @staticmethod
    def forward(ctx, run, prepared, request, destination, loss, *operands):
        ctx.destination, ctx.kind, ctx.dtype = destination, kind_of(destination.out), operands[1].dtype
        return ForwardFunction.forward(ctx, run, prepared, request, loss, *operands)

    @staticmethod
    def backward(ctx, dloss):  # pyright: ignore[reportIncompatibleMethodOverride]
        saved = Saved(*ctx.saved_tensors)

        def run(needed: tuple[bool, bool], out: Tensor | None) -> BothGradients:
            return ctx.prepared.backward(dloss, saved, ctx.loss, needed, out)

        return add_gradients(ctx, dloss, saved, run)


class AddingGradInForwardFunction(torch.autograd.Function):
    """GradInForwardFunction likewise."""

    @staticmethod
    def forward(ctx, run, prepared, request, destination, loss, *operands):
        ctx.destination, ctx.kind, ctx.prepared = destination, kind_of(destination.out), prepared
        return GradInForwardFunction.forward(ctx, run, prepared, request, loss, *operands)

    @staticmethod
    def backward(ctx, dloss):  # pyright: ignore[reportIncompatibleMethodOverride]
        target, num_valid, dinput, dweight, source = ctx.saved_tensors

        def run(needed: tuple[bool, bool], out: Tensor | None) -> BothGradients:
            present = dinput if needed[0] else None, dweight if needed[1] else None
            accumulated = Accumulated(dloss, num_valid, *present, source)
            return ctx.prepared.scale_gradients(dloss, target, accumulated, ctx.loss, ctx.dtype, out)

        return add_gradients(ctx, dloss, (target, num_valid, dinput, dweight, source), run)


def add_gradients(
    ctx,
    dloss: Tensor | None,
    others: Sequence[Tensor | None],
    run: Callable[[tuple[bool, bool], Tensor | None], BothGradients],
) -> tuple[Tensor | None, ...]:
    """The gradients of a call with a destination; arguments as in add_to_destination."""
    if dloss is None:
        return None, *_gradients(None, None)
    return None, *_gradients(*add_to_destination(ctx, dloss, others, run)[:2])


def add_to_destination(
    ctx,
    dresult: Tensor,
    others: Sequence[Tensor | None],
    run: Callable[[tuple[bool, bool], Tensor | None], tuple[Tensor | None, ...]],
) -> tuple[Tensor | None, ...]:
    """What `run` returns, with what autograd gets for linear_weight in second place. others: further upstream
    gradients, and saved tensors, which may be subclasses after hooks. run: takes which gradients are needed
    and the tensor to add to."""
    if torch.is_grad_enabled():
        raise RuntimeError(NO_DOUBLE_BACKWARD)
    if not is_plain_eager(dresult, *others):
        raise RuntimeError(_NO_DESTINATION)
    (out, with_dummy), (needs_dinput, needs_dweight) = ctx.destination, needed_now(ctx)
    if needs_dweight:
        if kind_of(out) != ctx.kind or not is_writable(out):
            raise RuntimeError(_OTHER_DESTINATION)
        # Kernels write to its address.
        torch.autograd.graph.increment_version(out)
    dinput, _, *others = run((needs_dinput, needs_dweight), out if needs_dweight else None)
    # Takes memory only where AccumulateGrad makes a .grad of it; what it adds to a .grad needs none.
    dummy = None
    if with_dummy and needs_dweight:
        dummy = dresult.new_zeros((), dtype=ctx.dtype).expand(out.shape)
    return dinput, dummy, *others


class GradientFunction(torch.autograd.Function):
    """The ops that return gradients, which cannot be differentiated again."""

    @staticmethod
    def forward(ctx, run, *operands):
        return run(operands)

    @staticmethod
    def backward(ctx, *dresults):  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(NO_DOUBLE_BACKWARD)


def _gradients(dinput: Tensor | None, dweight: Tensor | None) -> tuple[Tensor | None, ...]:
    """By a forward's arguments: its _OPTIONS, input, linear_weight and target."""
    return None, None, None, None, dinput, dweight, None


def apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """function.apply without its Python part, which requires a setup_context for torch.func's transforms."""
    return super(torch.autograd.Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]


def _refuse_tangents(schema, name: str, arguments: tuple) -> None:
    """Raise for forward-mode differentiation: run below autograd, the ops would silently drop tangents."""
    if not torch._C._is_fwd_grad_enabled():  # pyright: ignore[reportAttributeAccessIssue]
        return
    for argument, value in zip(schema, arguments, strict=False):
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise RuntimeError(_NO_FORWARD_MODE.format(name, argument.name))


def _requires_grad(operand: Tensor | None) -> bool:
    return operand is not None and operand.requires_grad


def register(op, function: type[torch.autograd.Function], results: Callable[..., Any], options) -> None:
    """Register `function` as `op`'s autograd.

    The operands are the op's first arguments, all of its tensors; any of them may require a gradient.
    results: converts the op's results to what function's `run` returns. options: converts the op's other
    arguments to those that function's forward takes between `run` and the operands.

    torch.func's transforms call this once for each level, with that level's wrappers: it records this level,
    and the op that is called below autograd continues with the next.
    """
    _register(op, (), op._schema.arguments, function, results, options)
    twin = inner.twins.get(op)
    if twin is not None:
        _register(twin.op, twin.positions, op._schema.arguments, function, results, options)


def _register(op, numbers: tuple[int, ...], schema, function, results, options) -> None:
    """Of an op, or of its twin. numbers: the twin's positions. schema: of the op's own arguments."""
    apply = apply_of(function)
    tensors, count = sum("Tensor" in str(argument.type) for argument in schema), len(numbers)

    def autograd(*arguments):
        read, arguments = arguments[:count], arguments[count:]
        operands, others = arguments[:tensors], arguments[tensors:]
        if forward_ad._current_level >= 0:
            _refuse_tangents(schema, op.name(), arguments)

        def run(operands, *_):
            with _below_autograd():
                return results(*op(*read, *operands, *others))

        def run_under_transform(operands, *_):
            # Function.forward disables both grad modes, which the levels below may need.
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                return run(operands)

        if not (torch.is_grad_enabled() and any(map(_requires_grad, operands))):
            with _below_autograd():
                return op(*read, *arguments)
        transformed = innermost_transform() is not None
        if transformed and issubclass(function, GradInForwardFunction):
            # Its gradients are constants for the levels below, whose second derivatives would omit them.
            raise RuntimeError(_NO_TRANSFORM)
        body = run_under_transform if transformed else run
        named = inner.Twin(op, numbers).named(read, arguments)[tensors:]
        with enable_single_level_autograd_function():
            return apply(body, *options(named), *operands)

    inner.library.impl(op.name().partition("::")[2], autograd, "Autograd")


def _forward_options(arguments: tuple) -> tuple[None, Request, LossOptions]:
    loss, (window, workspace, *_) = loss_of(arguments)
    return None, Request(Limits(window, workspace)), loss


def _grad_in_forward_options(arguments: tuple) -> tuple[None, Request, LossOptions]:
    loss, (window, workspace, *needed) = loss_of(arguments)
    return None, Request(Limits(window, workspace), 0, *needed), loss


def no_options(arguments: tuple) -> tuple[()]:
    return ()


def as_given(*results: Tensor) -> tuple[Tensor, ...]:
    return results


register(inner.forward, ForwardFunction, Results, _forward_options)
register(inner.forward_keep, ForwardFunction, Results, _forward_options)
register(inner.backward, GradientFunction, as_given, no_options)
register(inner.grad_in_forward, GradInForwardFunction, Accumulated, _grad_in_forward_options)
register(inner.scale_gradients, GradientFunction, as_given, no_options)
