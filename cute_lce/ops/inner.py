"""The inner ops: their bodies, which call the implementation, and their fake functions.

An op whose arguments have numbers has a twin, NAME_with_numbers: numbers that torch.compile traces as symbols
are tensors on the CPU there, which it reads on the host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import Operands
from ..implementation import Accumulated, Request, Saved
from ..options import check_value
from ..plan.problem import Limits
from ..streaming.products import accumulate_dtype
from ..symbolic import TensorNumber, as_tensor, example_of, is_symbolic
from . import schemas
from .prepared import look_up
from .schemas import loss_of
from .select import implementation

library = torch.library.Library("cute_lce", "DEF")


class Twin(NamedTuple):
    """The op that takes tensors for numbers, before an op's own arguments. positions: of these among the op's
    arguments, where examples of them stay."""

    op: Any
    positions: tuple[int, ...]

    def named(self, numbers: tuple, arguments: tuple) -> tuple:
        """The op's arguments with TensorNumbers in the places of those that are tensors."""
        named = [*arguments]
        for tensor, position in zip(numbers, self.positions, strict=True):
            if tensor is not None:
                named[position] = TensorNumber(named[position], tensor)
        return tuple(named)


twins: dict[Any, Twin] = {}
"""By the op."""


def define(schema: str, fake: Callable[..., Any], check: Callable[[tuple, tuple], None] | None = None):
    """Define an inner op with the decorated function as its body on every device; returns the op. check: of
    the twin's call, takes the arguments with examples of its numbers and with the numbers themselves."""

    def register(body):
        op = _define(schema, body, fake)
        arguments = op._schema.arguments
        positions = tuple(
            i for i, each in enumerate(arguments) if str(each.type) in ("float", "Optional[float]")
        )
        if positions:
            twins[op] = _define_twin(schema, body, fake, check, arguments, positions)
        return op

    return register


def _define(schema: str, body, fake, *tags: torch.Tag):
    name = schema.split("(")[0]
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, *tags))
    library.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"cute_lce::{name}", fake, lib=library)
    return getattr(torch.ops.cute_lce, name).default


def _define_twin(schema: str, body, fake, check, arguments, positions: tuple[int, ...]) -> Twin:
    names, count = [arguments[i].name for i in positions], len(positions)
    tensors = "".join(f"Tensor? {name}_tensor, " for name in names)

    def read(*given):
        example, values = given[count:], [*given[count:]]
        for tensor, name, position in zip(given[:count], names, positions, strict=True):
            if tensor is not None:
                values[position] = tensor.item()
                check_value(name, values[position])
        if check is not None:
            check(example, tuple(values))
        return body(*values)

    # A replayed graph would not read the numbers again.
    return Twin(
        _define(
            schema.replace("(", f"_with_numbers({tensors}", 1),
            read,
            lambda *given: fake(*given[count:]),
            torch.Tag.cudagraph_unsafe,
        ),
        positions,
    )


def call(op, *arguments):
    """The op's results, of arguments whose numbers may be symbols or TensorNumbers."""
    twin = twins.get(op)
    if twin is None:
        return op(*arguments)
    numbers, values = [], [*arguments]
    for position in twin.positions:
        number = values[position]
        if is_symbolic(number):
            number = TensorNumber(example_of(number), as_tensor(number))
        is_tensor = isinstance(number, TensorNumber)
        numbers.append(number.tensor if is_tensor else None)
        values[position] = number.example if is_tensor else number
    return op(*arguments) if all(each is None for each in numbers) else twin.op(*numbers, *values)


def _absent(like: Tensor, dtype: torch.dtype) -> Tensor:
    """What an op returns for a gradient that is not needed: a schema has no optional results."""
    return like.new_empty((0,), dtype=dtype)


def present(gradients: tuple[Tensor | None, ...], like: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    return tuple(_absent(like, dtype) if gradient is None else gradient for gradient in gradients)


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
        implementation(input.device, input.dtype).empty_source(input, need_dinput),
    )


def _fake_scale_gradients(
    dloss, target, num_valid, dinput_accumulator, dweight_accumulator, source, *arguments
):
    _, (dtype, need_dinput, need_dweight) = loss_of(arguments)
    return (
        dloss.new_empty(dinput_accumulator.shape if need_dinput else (0,), dtype=dtype),
        dloss.new_empty(dweight_accumulator.shape if need_dweight else (0,), dtype=dtype),
    )


# ----------------------------------------------------------------------------------------------------------
# Ops


@define(schemas.FORWARD, _fake_forward)
def forward(input, linear_weight, target, *arguments):
    operands = Operands(input, linear_weight, target)
    loss, limits = loss_of(arguments)
    return look_up(operands, loss, Request(Limits(*limits))).forward(operands, loss)[:4]


@define(schemas.FORWARD_KEEP, _fake_forward_keep)
def forward_keep(input, linear_weight, target, *arguments):
    operands = Operands(input, linear_weight, target)
    loss, (window, workspace, kept_columns) = loss_of(arguments)
    request = Request(Limits(window, workspace), kept_columns)
    results = look_up(operands, loss, request).forward(operands, loss)
    if results.kept is None:
        # A symbolic number of columns may come to 0.
        kept, scale = implementation(input.device, input.dtype).empty_kept(input, 0)
        results = results._replace(kept=kept, kept_scale=scale)
    return tuple(results)


@define(schemas.BACKWARD, _fake_backward)
def backward(dloss, *arguments):
    saved, rest = Saved(*arguments[: len(Saved._fields)]), arguments[len(Saved._fields) :]
    loss, (window, workspace, *needed) = loss_of(rest)
    # The rows of what is kept are padded to 16 bytes.
    kept_columns = 0 if saved.kept is None else min(saved.kept.shape[1], saved.weight.shape[0])
    request = Request(Limits(window, workspace), kept_columns)
    gradients = look_up(saved.operands, loss, request).backward(dloss, saved, loss, tuple(needed))
    return present(gradients, saved.hidden, saved.hidden.dtype)


@define(schemas.GRAD_IN_FORWARD, _fake_grad_in_forward)
def grad_in_forward(input, linear_weight, target, *arguments):
    loss, (window, workspace, *needed) = loss_of(arguments)
    operands, request = Operands(input, linear_weight, target), Request(Limits(window, workspace), 0, *needed)
    given = look_up(operands, loss, request).grad_in_forward(operands, loss)
    gradients = present((given.dinput, given.dweight), given.loss, given.loss.dtype)
    (source,) = present((given.source,), given.loss, torch.int32)
    return given.loss, given.num_valid, *gradients, source


@define(schemas.SCALE_GRADIENTS, _fake_scale_gradients)
def scale_gradients(dloss, target, num_valid, dinput_accumulator, dweight_accumulator, source, *arguments):
    loss, (dtype, need_dinput, need_dweight) = loss_of(arguments)
    accumulated = Accumulated(
        dloss,
        num_valid,
        dinput_accumulator if need_dinput else None,
        dweight_accumulator if need_dweight else None,
        source if source is not None and source.shape[0] else None,
    )
    scaled = implementation(dloss.device, dtype).scale_gradients(dloss, target, accumulated, loss, dtype)
    return present(scaled, dloss, dtype)
