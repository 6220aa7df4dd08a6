"""Numbers and sizes that torch.compile traces as symbols, and what may be asked of them.

A number of a call that changes between calls of a compiled graph is a torch.SymFloat (or SymInt) while it is
traced. An op's `float` would make it a constant of the graph, so that it travels to an op as a tensor.
A comparison of symbols is a guard of the graph; of a symbol whose value only the data knows it is an error,
but where `torch._check` states it, which the graph then asserts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

SYMBOLS = (torch.SymFloat, torch.SymInt)
UNKNOWN = 0.5
"""Stands for a number of which nothing is known while it is traced: in every one's range, and no default."""


class TensorNumber(NamedTuple):
    """A number on its way to an op. tensor: (), float64, on the CPU. example: what it was while it was
    traced, by which shapes and schedules are decided."""

    example: float
    tensor: Tensor


def is_symbolic(number: Any) -> bool:
    return isinstance(number, SYMBOLS)


def is_known(number: Any) -> bool:
    """Whether a number has a value while it is traced, by which a comparison guards the graph."""
    return not isinstance(number, SYMBOLS) or number.node.has_hint()


def differs(number: Any, none: float) -> bool:
    """Whether a number is not the one that means that there is no such term; one that is not known is not."""
    return isinstance(number, TensorNumber) or not is_known(number) or bool(number != none)


is_traced = torch.compiler.is_dynamo_compiling
"""Whether dynamo runs this code, to which a symbol looks like any number."""


def may_hold(condition: Any) -> bool:
    """A comparison of sizes; True where nothing is known."""
    if not is_traced() and not isinstance(condition, torch.SymBool):
        return bool(condition)
    # It imports sympy, which a process that traces has.
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return guard_or_true(condition)


def is_sure(condition: Any) -> bool:
    """A comparison of sizes; False where nothing is known."""
    return not may_hold(torch.sym_not(condition))


def example_of(number: Any) -> Any:
    """What a number is while it is traced; UNKNOWN where that is not known, any other as it is."""
    if not isinstance(number, SYMBOLS):
        return number
    return float(number.node.hint) if number.node.has_hint() else UNKNOWN


def as_tensor(number: Any, device: torch.device | None = None) -> Tensor:
    """A number as a tensor (), float64. The product is what torch.compile makes of tensors alone; the copy to
    a device is outside of any CUDA graph."""
    tensor = torch.ones((), dtype=torch.float64) * number
    return tensor if device is None else tensor.to(device)


def quotient(number: Any, divisor: Any) -> Any:
    """Of two numbers. That of symbols is a tensor's: torch 2.11 makes constants of expressions of symbols."""
    if not (is_symbolic(number) or is_symbolic(divisor)):
        return number / divisor
    return TensorNumber(example_of(number) / example_of(divisor), as_tensor(number) / as_tensor(divisor))


def holds(condition: Any) -> bool:
    """A comparison of sizes. Where only the data knows them it holds, and is asserted in the graph."""
    if type(condition) is bool and not is_traced():
        return condition
    if not may_hold(condition):
        return False
    torch._check(condition)
    return True


def same_shape(shape: Any, want: Any) -> bool:
    """Whether two shapes are equal, as `holds` says of each dimension."""
    if len(shape) != len(want):
        return False
    return all([holds(size == other) for size, other in zip(shape, want, strict=True)])
