"""torch.library: schemas, fakes, autograd and the choice of an implementation. No arithmetic.

`torch.ops.cute_lce.fused_linear_cross_entropy` is the public op, a composite: it checks its arguments,
casts under autocast, decides what needs a gradient and which schedule serves it, and calls one of the inner
ops. These are functional, take every size that no tensor of theirs shows as an int, and own their fake
functions and autograd:

    forward           the loss and the row statistics: "recompute"
    forward_keep      the same, and what the backward then need not compute again: "keep"
    backward          both gradients from the statistics (and what was kept)
    grad_in_forward   the loss, and both gradients for an upstream of 1: "grad_in_forward"
    scale_gradients   its backward

Their bodies are the functions of the same names in the module that `implementation` picks by device and
dtype; streaming.py's docstring is the contract.

Autograd is an autograd.Function under the Autograd key rather than torch.library.register_autograd, which
takes 27 us where this takes 15 (a forward of four results that needs a gradient, one core, torch 2.13).
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from . import launch, streaming
from .options import check_reduction, check_schedule, resolve_ignore_index

_logger = logging.getLogger("cute_lce")
_library = torch.library.Library("cute_lce", "DEF")

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
TARGET_DTYPES = (torch.int64, torch.int32)
MEBIBYTE = 1 << 20

# Read once: a call should not pay for it.
CHECK_TARGETS = os.environ.get("CUTE_LCE_CHECK_TARGETS", "0") not in ("", "0")

# ----------------------------------------------------------------------------------------------------------
# The implementation for a device

_implementations: dict[tuple[torch.device, torch.dtype], ModuleType] = {}


def implementation(device: torch.device, dtype: torch.dtype) -> ModuleType:
    """The module whose functions serve tensors of this device and dtype."""
    return _implementations.get((device, dtype)) or _pick_implementation(device, dtype)


def _pick_implementation(device: torch.device, dtype: torch.dtype) -> ModuleType:
    module = streaming
    # A fake CUDA tensor may exist where there is no CUDA device.
    if device.type == "cuda" and torch.cuda.is_available():
        if launch.serves(device, dtype):
            module = launch
        elif not any(launch.serves(device, other) for other in launch.DTYPES):
            _log_streaming(device)
    _implementations[device, dtype] = module
    return module


@functools.cache
def _log_streaming(device: torch.device) -> None:
    """Say once a device that it has no kernels."""
    _logger.warning(
        "%s (%s, compute capability %d.%d): no kernels for it here, the streaming path serves it",
        device,
        torch.cuda.get_device_name(device),
        *torch.cuda.get_device_capability(device),
    )


# ----------------------------------------------------------------------------------------------------------
# Eager calls

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_is_tracing = torch._C._is_tracing  # pyright: ignore[reportAttributeAccessIssue]
_innermost_transform = torch._C._functorch.peek_interpreter_stack  # pyright: ignore[reportAttributeAccessIssue]
# Of the vmap behind torch.autograd.grad's is_grads_batched, which is none of torch.func's transforms.
_is_batched = torch._C._functorch.is_legacy_batchedtensor  # pyright: ignore[reportAttributeAccessIssue]


def is_plain_eager(first: Tensor, second: Tensor, third: Tensor) -> bool:
    """Whether nothing watches the dispatcher: no tracing, no mode, no transform, no subclass, no meta tensor.

    Such a call may run an op's body directly. A dispatch to Python takes about 5 us, and a call has four.
    """
    return (
        not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()
        and _innermost_transform() is None
        and not _is_tracing()
        and forward_ad._current_level < 0
        and type(first) in _PLAIN
        and type(second) in _PLAIN
        and type(third) in _PLAIN
        and not (first.is_meta or second.is_meta or third.is_meta)
        and not (_is_batched(first) or _is_batched(second) or _is_batched(third))
    )


# ----------------------------------------------------------------------------------------------------------
# The public op

_library.define(
    "fused_linear_cross_entropy(Tensor input, Tensor linear_weight, Tensor target, *, "
    "str reduction='mean', int? ignore_index=-100, str schedule='auto', float? workspace_mb=None, "
    "SymInt? window=None) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _check_tensors(input: Tensor, linear_weight: Tensor, target: Tensor) -> None:
    if input.dtype not in DTYPES:
        raise TypeError(f"input: got {input.dtype}, want one of {', '.join(map(str, DTYPES))}")
    if linear_weight.dtype is not input.dtype:
        raise TypeError(f"linear_weight: got {linear_weight.dtype}, want input's dtype, {input.dtype}")
    if target.dtype not in TARGET_DTYPES:
        raise TypeError(f"target: got {target.dtype}, want class indices as torch.int64 or torch.int32")
    if linear_weight.dim() != 2:
        raise ValueError(f"linear_weight: got shape {tuple(linear_weight.shape)}, want (V, d)")
    V, d = linear_weight.shape
    if V == 0 or d == 0:
        raise ValueError(f"linear_weight: got shape {(V, d)}, want at least one class and one feature")
    if input.dim() == 0 or input.shape[-1] != d:
        raise ValueError(
            f"input: got shape {tuple(input.shape)}, want (..., {d}) for linear_weight's shape {(V, d)}"
        )
    if target.shape != input.shape[:-1]:
        raise ValueError(
            f"target: got shape {tuple(target.shape)}, want {tuple(input.shape[:-1])} "
            f"for input's shape {tuple(input.shape)}"
        )
    if not (input.layout is linear_weight.layout is target.layout is torch.strided):
        for name, tensor in (("input", input), ("linear_weight", linear_weight), ("target", target)):
            if tensor.layout is not torch.strided:
                raise ValueError(f"{name}: got layout {tensor.layout}, want a dense tensor")
    device = input.device
    if linear_weight.device != device:
        raise ValueError(f"linear_weight: got device {linear_weight.device}, want input's device, {device}")
    if target.device != device:
        raise ValueError(f"target: got device {target.device}, want input's device, {device}")


def _workspace_bytes(workspace_mb: float) -> int:
    # This is also false for nan.
    if not 0 < workspace_mb < float("inf"):
        raise ValueError(f"workspace_mb: got {workspace_mb}, want a positive number of MiB or None")
    return max(int(workspace_mb * MEBIBYTE), 1)


def _resolve(
    input,
    linear_weight,
    target,
    need_dinput,
    need_dweight,
    reduction,
    ignore_index,
    schedule,
    workspace_mb,
    window,
):
    """Check a call and decide what serves it: (inner op, its arguments behind input, weight and target)."""
    _check_tensors(input, linear_weight, target)
    check_reduction(reduction)
    check_schedule(schedule)
    ignore_index = resolve_ignore_index(ignore_index)
    workspace = 0 if workspace_mb is None else _workspace_bytes(workspace_mb)
    if window is None:
        window = 0
    elif window < 1:
        raise ValueError(f"window: got {window}, want at least 1 column or None")
    V, d = linear_weight.shape
    schedule, kept_columns = implementation(input.device, input.dtype).plan(
        target.numel(),
        d,
        V,
        input.dtype,
        input.device.type,
        schedule,
        reduction,
        need_dinput,
        need_dweight,
        window,
        workspace,
    )
    options = (ignore_index, reduction, window, workspace)
    if schedule == "recompute":
        return _forward, options
    if schedule == "keep":
        return _forward_keep, (*options, kept_columns)
    return _grad_in_forward, (*options, need_dinput, need_dweight)


def _needs(input: Tensor, linear_weight: Tensor) -> tuple[bool, bool]:
    """Which of the two needs a gradient."""
    if torch.is_grad_enabled():
        return input.requires_grad, linear_weight.requires_grad
    return False, False


def fused_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    schedule: str = "auto",
    workspace_mb: float | None = None,
    window: int | None = None,
) -> Tensor:
    """The body of the public op; cute_lce.linear_cross_entropy documents the arguments."""
    if is_plain_eager(input, linear_weight, target):
        return eager(input, linear_weight, target, reduction, ignore_index, schedule, workspace_mb, window)
    input, linear_weight = _autocast(input, linear_weight)
    op, options = _resolve(
        input,
        linear_weight,
        target,
        *_needs(input, linear_weight),
        reduction,
        ignore_index,
        schedule,
        workspace_mb,
        window,
    )
    rows, targets = _flatten(input, target)
    loss = op(rows, linear_weight, targets, *options)[0]
    return loss.view(target.shape) if reduction == "none" and target.dim() != 1 else loss


class _Call(NamedTuple):
    """An eager call of one kind, checked and decided: run(input, linear_weight, target).

    apply: of the autograd.Function that calls `run`, None where nothing needs a gradient and `run` gives the
    loss. options: the inner op's arguments behind the operands. flat: whether the operands are (n, d), (n,).
    """

    apply: Callable[..., Any] | None
    run: Callable[..., Any]
    options: tuple
    flat: bool


_calls: dict[tuple, _Call] = {}
_MAX_CALLS = 4096


def eager(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    reduction: str,
    ignore_index: int | None,
    schedule: str,
    workspace_mb: float | None,
    window: int | None,
) -> Tensor:
    """fused_linear_cross_entropy past the dispatcher, for what `is_plain_eager` allows.

    All that does not depend on values is checked and decided once for operands of the same kind.
    """
    input, linear_weight = _autocast(input, linear_weight)
    needs = _needs(input, linear_weight)
    arguments = (reduction, ignore_index, schedule, workspace_mb, window)
    try:
        key = (
            input.device,
            input.dtype,
            input.shape,
            input.stride(),
            linear_weight.device,
            linear_weight.dtype,
            linear_weight.shape,
            linear_weight.stride(),
            target.device,
            target.dtype,
            target.shape,
            target.stride(),
            needs,
            arguments,
        )
    except RuntimeError:
        # A layout without strides, which is refused.
        key = ()
    call = _calls.get(key) or _prepare_call(key, input, linear_weight, target, needs, arguments)
    rows, targets = (input, target) if call.flat else _flatten(input, target)
    if call.apply is None:
        loss = call.run(rows, linear_weight, targets)
    else:
        loss = call.apply(call.run, False, call.options, rows, linear_weight, targets)
    return loss if call.flat or reduction != "none" else loss.view(target.shape)


def _prepare_call(key, input, linear_weight, target, needs, arguments) -> _Call:
    """Check and decide; remember it if that is worth it, which on a CPU it is not."""
    op, options = _resolve(input, linear_weight, target, *needs, *arguments)
    module = implementation(input.device, input.dtype)
    wanted = needs[0] or needs[1]
    body = _bodies[op]
    if CHECK_TARGETS or op is _grad_in_forward or not hasattr(module, "bind"):
        if wanted:
            run = lambda *operands: body(*operands, *options)  # noqa: E731
        else:
            run = lambda *operands: body(*operands, *options)[0]  # noqa: E731
    else:
        name = op.name().partition("::")[2] if wanted else "loss"
        rows, targets = _flatten(input, target)
        run = module.bind(name, rows, linear_weight, targets, *options)
    function = _GradInForwardFunction if op is _grad_in_forward else _ForwardFunction
    apply = _apply_of(function) if wanted else None
    call = _Call(apply, run, options, input.dim() == 2)
    if key and hasattr(module, "bind"):
        if len(_calls) >= _MAX_CALLS:
            _calls.clear()
        _calls[key] = call
    return call


def _flatten(input: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """(..., d) and (...) as (n, d) and (n,)."""
    if input.dim() == 2:
        return input, target
    return input.reshape(-1, input.shape[-1]), target.reshape(-1)


def _autocast(input: Tensor, linear_weight: Tensor) -> tuple[Tensor, Tensor]:
    """Under autocast cast as torch's own linear does: every floating tensor but float64."""
    device_type = input.device.type
    if not (torch.amp.is_autocast_available(device_type) and torch.is_autocast_enabled(device_type)):
        return input, linear_weight
    dtype = torch.get_autocast_dtype(device_type)
    if input.is_floating_point() and input.dtype is not torch.float64:
        input = input.to(dtype)
    if linear_weight.is_floating_point() and linear_weight.dtype is not torch.float64:
        linear_weight = linear_weight.to(dtype)
    return input, linear_weight


_library.impl("fused_linear_cross_entropy", fused_linear_cross_entropy, "CompositeImplicitAutograd")

# ----------------------------------------------------------------------------------------------------------
# The inner ops: bodies


_below_autograd = torch._C._AutoDispatchBelowAutograd
_bodies: dict[object, Callable[..., tuple[Tensor, ...]]] = {}


def _define(schema: str):
    """Define an inner op whose body on every device is the decorated function; the name becomes the op."""

    def register(body):
        name = schema.split("(")[0]
        _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, body, "CompositeExplicitAutograd")
        op = getattr(torch.ops.cute_lce, name).default
        _bodies[op] = body
        return op

    return register


def _check_targets(target: Tensor, ignore_index: int, V: int) -> None:
    """CUTE_LCE_CHECK_TARGETS=1: a bad target stops the device, in a captured graph too."""
    if target.device.type != "cpu":
        in_range = ((target >= 0) & (target < V)) | (target == ignore_index)
        message = f"target: found a class outside [0, {V}) that is not ignore_index={ignore_index}"
        torch.ops.aten._assert_async.msg(in_range.all(), message)


def _absent(like: Tensor, dtype: torch.dtype) -> Tensor:
    """What an op returns for a gradient that nobody needs: a schema has no optional result."""
    return like.new_empty((0,), dtype=dtype)


@_define(
    "forward(Tensor input, Tensor linear_weight, Tensor target, SymInt ignore_index, str reduction, "
    "SymInt window, SymInt workspace) "
    "-> (Tensor loss, Tensor row_max, Tensor row_sum, Tensor num_valid)"
)
def _forward(input, linear_weight, target, ignore_index, reduction, window, workspace):
    if CHECK_TARGETS:
        _check_targets(target, ignore_index, linear_weight.shape[0])
    module = implementation(input.device, input.dtype)
    return module.forward(input, linear_weight, target, ignore_index, reduction, window, workspace)


@_define(
    "forward_keep(Tensor input, Tensor linear_weight, Tensor target, SymInt ignore_index, str reduction, "
    "SymInt window, SymInt workspace, SymInt kept_columns) "
    "-> (Tensor loss, Tensor row_max, Tensor row_sum, Tensor num_valid, Tensor kept, Tensor kept_reference)"
)
def _forward_keep(input, linear_weight, target, ignore_index, reduction, window, workspace, kept_columns):
    if CHECK_TARGETS:
        _check_targets(target, ignore_index, linear_weight.shape[0])
    module = implementation(input.device, input.dtype)
    return module.forward_keep(
        input, linear_weight, target, ignore_index, reduction, window, workspace, kept_columns
    )


@_define(
    "backward(Tensor dloss, Tensor input, Tensor linear_weight, Tensor target, Tensor row_max, "
    "Tensor row_sum, Tensor num_valid, Tensor? kept, Tensor? kept_reference, SymInt ignore_index, "
    "str reduction, SymInt window, SymInt workspace, bool need_dinput, bool need_dweight) "
    "-> (Tensor dinput, Tensor dlinear_weight)"
)
def _backward(dloss, input, *arguments):
    dinput, dweight = implementation(input.device, input.dtype).backward(dloss, input, *arguments)
    dtype = input.dtype
    return (
        _absent(input, dtype) if dinput is None else dinput,
        _absent(input, dtype) if dweight is None else dweight,
    )


@_define(
    "grad_in_forward(Tensor input, Tensor linear_weight, Tensor target, SymInt ignore_index, str reduction, "
    "SymInt window, SymInt workspace, bool need_dinput, bool need_dweight) "
    "-> (Tensor loss, Tensor num_valid, Tensor dinput_accumulator, Tensor dweight_accumulator)"
)
def _grad_in_forward(input, linear_weight, target, ignore_index, *arguments):
    if CHECK_TARGETS:
        _check_targets(target, ignore_index, linear_weight.shape[0])
    loss, num_valid, dinput, dweight = implementation(input.device, input.dtype).grad_in_forward(
        input, linear_weight, target, ignore_index, *arguments
    )
    return (
        loss,
        num_valid,
        _absent(loss, loss.dtype) if dinput is None else dinput,
        _absent(loss, loss.dtype) if dweight is None else dweight,
    )


@_define(
    "scale_gradients(Tensor dloss, Tensor num_valid, Tensor dinput_accumulator, Tensor dweight_accumulator, "
    "str reduction, ScalarType dtype, bool need_dinput, bool need_dweight) "
    "-> (Tensor dinput, Tensor dlinear_weight)"
)
def _scale_gradients(
    dloss, num_valid, dinput_accumulator, dweight_accumulator, reduction, dtype, need_dinput, need_dweight
):
    dinput, dweight = implementation(dloss.device, dtype).scale_gradients(
        dloss,
        num_valid,
        dinput_accumulator if need_dinput else None,
        dweight_accumulator if need_dweight else None,
        reduction,
        dtype,
    )
    return (
        _absent(dloss, dtype) if dinput is None else dinput,
        _absent(dloss, dtype) if dweight is None else dweight,
    )


# ----------------------------------------------------------------------------------------------------------
# The inner ops: fakes


def _fake_forward(input, linear_weight, target, ignore_index, reduction, window, workspace):
    n = input.shape[0]
    dtype = streaming.accumulate_dtype(input.dtype)
    return (
        input.new_empty((n,) if reduction == "none" else (), dtype=dtype),
        input.new_empty((n,), dtype=dtype),
        input.new_empty((n,), dtype=dtype),
        input.new_empty((), dtype=torch.int64),
    )


def _fake_forward_keep(
    input, linear_weight, target, ignore_index, reduction, window, workspace, kept_columns
):
    kept = implementation(input.device, input.dtype).empty_kept(input, kept_columns)
    return *_fake_forward(input, linear_weight, target, ignore_index, reduction, window, workspace), *kept


def _fake_backward(dloss, input, linear_weight, *arguments):
    need_dinput, need_dweight = arguments[-2:]
    return (
        input.new_empty(input.shape if need_dinput else (0,)),
        input.new_empty(linear_weight.shape if need_dweight else (0,)),
    )


def _fake_grad_in_forward(
    input, linear_weight, target, ignore_index, reduction, window, workspace, need_dinput, need_dweight
):
    loss, _, _, num_valid = _fake_forward(
        input, linear_weight, target, ignore_index, reduction, window, workspace
    )
    return (
        loss,
        num_valid,
        loss.new_empty(input.shape if need_dinput else (0,)),
        loss.new_empty(linear_weight.shape if need_dweight else (0,)),
    )


def _fake_scale_gradients(
    dloss, num_valid, dinput_accumulator, dweight_accumulator, reduction, dtype, need_dinput, need_dweight
):
    return (
        dloss.new_empty(dinput_accumulator.shape if need_dinput else (0,), dtype=dtype),
        dloss.new_empty(dweight_accumulator.shape if need_dweight else (0,), dtype=dtype),
    )


for _name, _fake in (
    ("forward", _fake_forward),
    ("forward_keep", _fake_forward_keep),
    ("backward", _fake_backward),
    ("grad_in_forward", _fake_grad_in_forward),
    ("scale_gradients", _fake_scale_gradients),
):
    torch.library.register_fake(f"cute_lce::{_name}", _fake, lib=_library)

# ----------------------------------------------------------------------------------------------------------
# The inner ops: autograd

_NO_DOUBLE_BACKWARD = (
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


def _apply_of(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """function.apply without its Python part, which wants a setup_context for torch.func's transforms."""
    return super(torch.autograd.Function, function).apply  # pyright: ignore[reportAttributeAccessIssue]


class _ForwardFunction(torch.autograd.Function):
    """forward, and forward_keep, whose results end with two more.

    run: of input, linear_weight and target. whole: whether all of its results are wanted, as the op's schema
    has it, or the loss alone, which spares an eager call the others' wrapping. options: the op's other
    arguments.
    """

    @staticmethod
    def forward(ctx, run, whole, options, input, linear_weight, target):
        results = run(input, linear_weight, target)
        ctx.options = options
        ctx.whole = whole
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(input, linear_weight, target, *results[1:])
        if not whole:
            return results[0]
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx, *dresults):  # pyright: ignore[reportIncompatibleMethodOverride]
        dloss = dresults[0]
        if dloss is None:
            return None, None, None, None, None, None
        _, _, _, need_dinput, need_dweight, _ = ctx.needs_input_grad
        saved = ctx.saved_tensors
        kept = () if len(saved) == 8 else (None, None)
        arguments = (dloss, *saved, *kept, *ctx.options[:4], need_dinput, need_dweight)
        input = saved[0]
        # What a call under a transform saved outlives the transform, and only the dispatcher unwraps it.
        if not (ctx.whole or torch.is_grad_enabled()) and is_plain_eager(dloss, input, saved[1]):
            dinput, dweight = implementation(input.device, input.dtype).backward(*arguments)
        else:
            dinput, dweight = _backward(*arguments)
        return None, None, None, dinput if need_dinput else None, dweight if need_dweight else None, None


class _GradInForwardFunction(torch.autograd.Function):
    """grad_in_forward, whose backward is scale_gradients. Arguments as of _ForwardFunction."""

    @staticmethod
    def forward(ctx, run, whole, options, input, linear_weight, target):
        results = run(input, linear_weight, target)
        ctx.dtype, ctx.reduction, ctx.needed = input.dtype, options[1], options[-2:]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*results[1:])
        if not whole:
            return results[0]
        ctx.mark_non_differentiable(*results[1:])
        return results

    @staticmethod
    def backward(ctx, *dresults):  # pyright: ignore[reportIncompatibleMethodOverride]
        if dresults[0] is None:
            return None, None, None, None, None, None
        if torch.is_grad_enabled():
            # The gradients are constants by now: without this a second derivative would silently miss them.
            raise RuntimeError(_NO_DOUBLE_BACKWARD)
        need_dinput, need_dweight = ctx.needed
        dinput, dweight = _scale_gradients(
            dresults[0], *ctx.saved_tensors, ctx.reduction, ctx.dtype, need_dinput, need_dweight
        )
        return None, None, None, dinput if need_dinput else None, dweight if need_dweight else None, None


class _GradientFunction(torch.autograd.Function):
    """The ops that give gradients, which cannot be differentiated again."""

    @staticmethod
    def forward(ctx, run, *operands):
        return run(*operands)

    @staticmethod
    def backward(ctx, *dresults):  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError(_NO_DOUBLE_BACKWARD)


def _refuse_tangents(op, arguments: tuple) -> None:
    """Forward-mode differentiation is not for the ops: run below autograd, they would give no tangent."""
    if not torch._C._is_fwd_grad_enabled():  # pyright: ignore[reportAttributeAccessIssue]
        return
    for argument, value in zip(op._schema.arguments, arguments, strict=False):
        if isinstance(value, Tensor) and forward_ad.unpack_dual(value).tangent is not None:
            raise RuntimeError(_NO_FORWARD_MODE.format(op.name(), argument.name))


def _register_autograd(name: str, op, function: type[torch.autograd.Function]) -> None:
    """Under autograd `op` is `function`'s; its first three arguments are the tensors that may need a
    gradient.

    torch.func's transforms call this once a level, with that level's wrappers: what is recorded is this
    level's, and the op called below autograd goes on to the next.
    """
    apply = _apply_of(function)

    def autograd(first, second, third, *options):
        operands = first, second, third
        if forward_ad._current_level >= 0:
            _refuse_tangents(op, (*operands, *options))

        def run(*operands):
            with _below_autograd():
                return op(*operands, *options)

        def run_under_transform(*operands):
            # Function.forward runs without either grad mode; the levels below have their own.
            with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
                return run(*operands)

        if not (torch.is_grad_enabled() and any(operand.requires_grad for operand in operands)):
            return run(*operands)
        transformed = _innermost_transform() is not None
        if transformed and function is _GradInForwardFunction:
            # Its gradients are constants to the levels below, whose second derivatives would miss them.
            raise RuntimeError(_NO_TRANSFORM)
        body = run_under_transform if transformed else run
        arguments = (body,) if function is _GradientFunction else (body, True, options)
        with enable_single_level_autograd_function():
            return apply(*arguments, *operands)

    _library.impl(name, autograd, "Autograd")


_register_autograd("forward", _forward, _ForwardFunction)
_register_autograd("forward_keep", _forward_keep, _ForwardFunction)
_register_autograd("backward", _backward, _GradientFunction)
_register_autograd("grad_in_forward", _grad_in_forward, _GradInForwardFunction)
_register_autograd("scale_gradients", _scale_gradients, _GradientFunction)
