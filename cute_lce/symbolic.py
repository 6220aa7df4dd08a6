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
"""Stands for a number of which nothing is known while it is traced: in every number's range, and no default."""


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


def may_hold(condition: Any) -> bool:
    """A comparison of sizes; True where nothing is known."""
    if not isinstance(condition, torch.SymBool):
        return bool(condition)
    # It imports sympy, which a process that traces has.
    from torch.fx.experimental.symbolic_shapes import guard_or_true

    return guard_or_true(condition)


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


def same_shape(shape: Any, want: Any) -> bool:
    """Whether two shapes are equal. Of sizes that only the data knows that is asserted in the graph."""
    if len(shape) != len(want):
        return False
    for size, other in zip(shape, want, strict=True):
        if isinstance(size, int) and isinstance(other, int):
            if size != other:
                return False
        elif not may_hold(size == other):
            return False
        else:
            torch._check(size == other)
    return True
