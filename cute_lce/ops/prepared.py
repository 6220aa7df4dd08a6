"""What is decided once for calls of one kind, and the cache that holds it."""

from __future__ import annotations

import atexit
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import environment
from ..arguments import Operands
from ..implementation import (
    Accumulated,
    Backward,
    BothGradients,
    Forward,
    Implementation,
    Request,
    Results,
    Saved,
)
from ..options import LossOptions
from ..streaming.rows import is_ignored
from .select import implementation

T = TypeVar("T")

cache: dict[tuple, Any] = {}
"""`key_of` a call -> what was prepared for it: a Prepared for an inner op's call, and for an eager call what
call.py binds to one."""
MOST_CACHED = 4096
# It holds process groups, whose threads must end before the interpreter does.
atexit.register(cache.clear)


def key_of(input: Tensor, linear_weight: Tensor, target: Tensor, loss: LossOptions, how: tuple) -> tuple:
    """What the things that are decided once depend on: the operands' kinds, the loss's static fields, `how`.

    Raises RuntimeError for a layout without strides.
    """
    return (
        input.device,
        input.dtype,
        input.shape,
        input.stride(),
        input.is_neg(),
        linear_weight.device,
        linear_weight.dtype,
        linear_weight.shape,
        linear_weight.stride(),
        linear_weight.is_neg(),
        target.device,
        target.dtype,
        target.shape,
        target.stride(),
        target.is_neg(),
        loss.static,
        how,
    )


def remember(key: tuple, prepared: T) -> T:
    if len(cache) >= MOST_CACHED:
        cache.clear()
    cache[key] = prepared
    return prepared


class Prepared:
    """The passes of calls of one kind, each with its phases back to back.

    An implementation's forward, and its backward for each choice of gradients, are prepared when they are
    first needed; threads that need one at the same time prepare equal ones.
    """

    def __init__(self, implementation: Implementation, request: Request):
        self.request = request
        self._implementation = implementation
        self._forward: Forward | None = None
        self._backwards: dict[tuple, Backward] = {}

    def forward(self, operands: Operands, loss: LossOptions) -> Results:
        if environment.CHECK_TARGETS:
            check_targets(operands, loss)
        forward = self._prepared_forward(operands, loss)
        return forward.finish(operands, loss, forward.statistics(operands, loss))

    def _prepared_forward(self, operands: Operands, loss: LossOptions) -> Forward:
        forward = self._forward
        if forward is None:
            forward = self._forward = self._implementation.forward(operands, loss, self.request)
        return forward

    def backward(
        self,
        dloss: Tensor,
        saved: Saved,
        loss: LossOptions,
        needed: tuple[bool, ...],
        out: Tensor | None = None,
    ) -> BothGradients:
        """needed: whether dinput and whether dweight is, instead of the request's own. out: what dweight is
        added to instead of being returned."""
        backward = self._prepared_backward(needed, saved, loss, out)
        return backward.dweight(dloss, saved, loss, backward.dinput(dloss, saved, loss, out), out)

    def _prepared_backward(
        self, needed: tuple[bool, ...], saved: Saved, loss: LossOptions, out: Tensor | None
    ) -> Backward:
        key = needed if out is None else (*needed, out.dtype)
        backward = self._backwards.get(key)
        if backward is None:
            added = None if out is None else out.dtype
            request = self.request._replace(need_dinput=needed[0], need_dweight=needed[1], added=added)
            backward = self._implementation.backward(saved.operands, loss, request)
            self._backwards[key] = backward
        return backward

    def unpacked(self, saved: Saved) -> Saved:
        """What a forward of this request left, each result as a tensor of its own."""
        if saved.row_max is not None:
            return saved
        return self._implementation.unpacked(saved, self.request.kept_columns)

    def scale_gradients(
        self,
        dloss: Tensor,
        target: Tensor,
        accumulated: Accumulated,
        loss: LossOptions,
        dtype: torch.dtype,
        out: Tensor | None,
    ) -> BothGradients:
        return self._implementation.scale_gradients(dloss, target, accumulated, loss, dtype, out)

    def grad_in_forward(self, operands: Operands, loss: LossOptions) -> Accumulated:
        if environment.CHECK_TARGETS:
            check_targets(operands, loss)
        return self._implementation.grad_in_forward(operands, loss, self.request)


def prepare(operands: Operands, request: Request) -> Prepared:
    return Prepared(implementation(operands.hidden.device, operands.hidden.dtype), request)


def look_up(operands: Operands, loss: LossOptions, request: Request) -> Prepared:
    """The Prepared of an inner op's call, which a forward and its backward share."""
    key = key_of(*operands, loss, request)
    return cache.get(key) or remember(key, prepare(operands, request))


def check_targets(operands: Operands, loss: LossOptions) -> None:
    """With CUTE_LCE_CHECK_TARGETS=1 a bad target is a device-side assertion, in a captured graph too."""
    target, V = operands.target, operands.weight.shape[0]
    if target.device.type != "cpu":
        in_range = ((target >= 0) & (target < V)) | is_ignored(target, loss.ignore_index)
        message = f"target: found a class outside [0, {V}) that is not ignore_index={loss.ignore_index}"
        torch.ops.aten._assert_async.msg(in_range.all(), message)
