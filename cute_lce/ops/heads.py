"""Several heads in one call: what is whose, a call for each, and one sum of gradients by the hidden states.

Each head's matrix products fill a device, so that one pass over all of them would only spare reading the
hidden states again. What K > 2 calls would lose is precision: autograd adds their gradients by shared hidden
states in the dtype of those, K - 1 times. Here they are added in acc, one head after the other, and the sum
is rounded once. Autograd's one addition of two heads' rounds as often, and moves fewer bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..plan.memory import SmallWorkspace, refuse_workspace
from ..plan.problem import MIB
from ..streaming.products import accumulate_dtype
from ..symbolic import same_shape
from . import inner
from .autograd import is_writable
from .checks import autocast_hidden, check_dense, no_tensor
from .plain import innermost_transform, is_plain_eager

_DIMENSIONS = {"linear_bias": 2, "weight": 2, "grad_weight_out": 3}
"""Arguments that each head has its own of, and a tensor of all heads' dimensions."""
_FLOATS = (torch.bfloat16, torch.float16)
_LISTS = (list, tuple, nn.ParameterList)


def has_heads(linear_weight: Any) -> bool:
    """Whether linear_weight is several heads': one of _LISTS, or (K, V, d)."""
    if isinstance(linear_weight, Tensor):
        three = linear_weight.dim() == 3
        return three and linear_weight.layout is torch.strided and not linear_weight.is_nested
    return isinstance(linear_weight, _LISTS)


def linear_cross_entropy(
    call: Callable[..., Tensor],
    input: Tensor,
    linear_weight: Tensor | Sequence[Tensor] | nn.ParameterList,
    target: Tensor,
    options: dict[str, Any],
) -> Tensor:
    """The losses of heads, (K,) or, for "none", target's shape. call: of one head, with options by name."""
    weights = _weights(linear_weight)
    count = len(weights)
    _check_shapes(input, target, count)
    own = {name: _each(name, options[name], count) for name in _DIMENSIONS if options.get(name) is not None}
    own |= _factors(options, target, count)
    share = _share(options, count)
    if share is not None:
        options = {**options, "workspace_mb": share}
    targets = target.unbind(-1)
    inputs = input.unbind(-2) if input.dim() > target.dim() else [autocast_hidden(input)] * count
    adds = input.dim() == target.dim() and count > 2 and inputs[0].dtype in _FLOATS
    if not torch.compiler.is_compiling() and innermost_transform() is not None:
        # vmap has no rule for the ops below. In a traced call they ask again.
        adds = False
    total = _rounded(inputs[0]) if adds else None

    def of_head(k: int, hidden: Tensor, options: dict[str, Any]) -> Tensor:
        each = {name: values[k] for name, values in own.items()}
        return call(hidden, weights[k], targets[k], **{**options, **each})

    losses = []
    # Each use of the hidden states just before its call: backward then holds one gradient and the sum.
    for k, hidden in enumerate(inputs):
        if total is not None:
            hidden, total = _used(hidden, total)
        try:
            losses.append(of_head(k, hidden, options))
        except SmallWorkspace as error:
            tiny = {**options, "workspace_mb": 1 / MIB}
            least = max(_least(of_head, k, inputs[k], tiny) for k in range(count))
            parts, given = 1 if share is None else count, options["workspace_mb"]
            given = error.workspace if given is None else given * parts * MIB
            # A byte more for every other part, since dividing rounds.
            raise refuse_workspace(error.schedule, given, least * parts + parts - 1, count) from None
    return torch.stack(losses, -1)


def _least(call: Callable[..., Tensor], *arguments: Any) -> int:
    """The least workspace, in bytes, of a call that is given a byte; 0: it needs none."""
    try:
        call(*arguments)
    except SmallWorkspace as error:
        return error.least
    return 0


def _weights(linear_weight: Tensor | Sequence[Tensor] | nn.ParameterList) -> Sequence[Tensor]:
    if isinstance(linear_weight, nn.ParameterList):
        linear_weight = [*linear_weight]
    for each in linear_weight if isinstance(linear_weight, list | tuple) else (linear_weight,):
        if not isinstance(each, Tensor):
            raise no_tensor("linear_weight", each, "a torch.Tensor for each head")
        check_dense("linear_weight", each)
        if isinstance(linear_weight, list | tuple) and each.dim() != 2:
            raise ValueError(f"linear_weight: got a head of shape {tuple(each.shape)}, want (V, d)")
        # A DTensor, whose class this does not import.
        if hasattr(each, "device_mesh"):
            raise ValueError("linear_weight: got a DTensor among several heads, want a call for each head")
    if len(linear_weight) == 0:
        raise ValueError("linear_weight: got no heads, want at least one")
    return linear_weight.unbind() if isinstance(linear_weight, Tensor) else linear_weight


def _check_shapes(input: Tensor, target: Tensor, count: int) -> None:
    for name, value in (("input", input), ("target", target)):
        if not isinstance(value, Tensor):
            raise no_tensor(name, value)
        check_dense(name, value)
    if target.dim() == 0 or target.shape[-1] != count:
        raise ValueError(
            f"target: got shape {tuple(target.shape)}, want (..., {count}): a class for each head"
        )
    if not (_is_before(target.shape, input) or _is_before(target.shape[:-1], input)):
        shared, own = tuple(target.shape[:-1]), tuple(target.shape)
        raise ValueError(
            f"input: got shape {tuple(input.shape)}, want {(*shared, 'd')}, which the heads share, or "
            f"{(*own, 'd')} for target's shape {own}"
        )


def _is_before(shape: Sequence[int], input: Tensor) -> bool:
    """Whether input's shape is this one and d; element by element, since a tuple of symbolic and other sizes
    equals none under torch.compile."""
    return input.dim() == len(shape) + 1 and same_shape(input.shape[:-1], shape)


def _each(name: str, value: Any, count: int) -> Sequence[Any]:
    """A head's own of an argument that is given."""
    if isinstance(value, Tensor):
        check_dense(name, value)
        if value.dim() == _DIMENSIONS[name] and value.shape[0] == count:
            heads = value.unbind()
            plain = name == "grad_weight_out" and is_plain_eager(value)
            if plain and not all(map(is_writable, heads)):
                raise ValueError(
                    f"grad_weight_out: got shape {tuple(value.shape)}, strides {value.stride()} and address "
                    f"{value.data_ptr():#x}, want each head's (V, d) contiguous at a multiple of 16 bytes, "
                    "as in a list with a tensor for each head"
                )
            return heads
        got = f"shape {tuple(value.shape)}"
    elif isinstance(value, _LISTS):
        if len(value) == count:
            return [*value]
        got = f"{len(value)} of them"
    else:
        raise no_tensor(name, value, "a list, or a torch.Tensor of all heads'")
    raise ValueError(
        f"{name}: got {got}, want one for each head: a list of {count}, or a tensor (K, ...) of "
        f"{_DIMENSIONS[name]} dimensions, K = {count}"
    )


def _factors(options: dict[str, Any], target: Tensor, count: int) -> dict[str, Sequence[Tensor]]:
    """token_weight, which has target's shape, and a denominator (K,)."""
    found, token_weight = {}, options.get("token_weight")
    if isinstance(token_weight, Tensor):
        check_dense("token_weight", token_weight)
        if not same_shape(token_weight.shape, target.shape):
            raise ValueError(
                f"token_weight: got shape {tuple(token_weight.shape)}, want {tuple(target.shape)}"
            )
        found["token_weight"] = token_weight.unbind(-1)
    denominator = options.get("denominator")
    if isinstance(denominator, Tensor):
        check_dense("denominator", denominator)
    if isinstance(denominator, Tensor) and denominator.dim() > 0:
        if denominator.shape != (count,):
            raise ValueError(f"denominator: got shape {tuple(denominator.shape)}, want () or {(count,)}")
        found["denominator"] = denominator.unbind()
    return found


def _share(options: dict[str, Any], count: int) -> float | None:
    """A head's part of workspace_mb; None: what is given. What recomputes allocates in one head's backward at
    a time; what others keep for it is there for all heads."""
    given = options.get("workspace_mb")
    # What is no number of MiB is refused by the heads' calls.
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 < given < float("inf"):
        return None
    return None if options.get("schedule") == "recompute" else given / count


class _Rounded(torch.autograd.Function):
    """Zeros of hidden's shape in acc, one number expanded, whose gradient becomes hidden's."""

    @staticmethod
    def forward(ctx, hidden):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.dtype = hidden.dtype
        ctx.set_materialize_grads(False)
        return hidden.new_zeros((), dtype=accumulate_dtype(hidden.dtype)).expand(hidden.shape)

    @staticmethod
    def backward(ctx, dtotal):  # pyright: ignore[reportIncompatibleMethodOverride]
        return None if dtotal is None else dtotal.to(ctx.dtype)


class _Used(torch.autograd.Function):
    """hidden for one head, and the zeros for the next, whose gradient has those of all later heads."""

    @staticmethod
    def forward(ctx, hidden, total):  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.acc = total.dtype
        ctx.set_materialize_grads(False)
        return hidden.view_as(hidden), total.view_as(total)

    @staticmethod
    def backward(ctx, dhidden, dtotal):  # pyright: ignore[reportIncompatibleMethodOverride]
        if dhidden is None or dtotal is None:
            return None, dtotal if dhidden is None else dhidden.to(ctx.acc)
        # Made by the next head's: nothing else has it.
        return None, dtotal.add_(dhidden)


def _zeros(hidden: Tensor) -> Tensor:
    return hidden if innermost_transform() is not None else _Rounded.apply(hidden)


def _use(hidden: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
    return (hidden, total) if innermost_transform() is not None else _Used.apply(hidden.detach(), total)


def _define(schema: str, body: Callable[..., Any]) -> Callable[..., Any]:
    """The Functions as ops, since torch.compile, which sees into Functions, warns of how it does.

    Under torch.func's transforms autograd adds, in the dtype of the hidden states.
    """
    name = schema.split("(")[0]
    inner.library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    inner.library.impl(name, body, "CompositeImplicitAutograd")
    return getattr(torch.ops.cute_lce, name).default


_rounded = _define("heads_sum(Tensor(a) hidden) -> Tensor(a)", _zeros)
_used = _define("head_use(Tensor(a) hidden, Tensor(b) total) -> (Tensor(a), Tensor(b))", _use)
