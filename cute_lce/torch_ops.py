"""A LogitTerm's functions on tensors, and what they are given for these."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .logit_term import LogitTerm


def logit_of(term: LogitTerm, x: Tensor) -> Tensor:
    """z, of x's shape and dtype; it may be x."""
    return _like(x, term.logit(x, TensorOps(x)))


def slope_of(term: LogitTerm, z: Tensor) -> Tensor:
    """dz/dx, of z's shape and dtype; it may be z."""
    return _like(z, term.slope(z, TensorOps(z)))


def _like(x: Tensor, found: Any) -> Tensor:
    return (found if isinstance(found, Tensor) else x.new_full((), found)).to(x.dtype).expand_as(x)


class TensorOps:
    """What LogitTerm calls ops: numbers become tensors like those that they are used with."""

    def __init__(self, like: Tensor):
        self._like = like

    def _tensor(self, x: Any) -> Tensor:
        return x if isinstance(x, Tensor) else self._like.new_full((), x)

    def exp(self, x: Any) -> Tensor:
        return torch.exp(self._tensor(x))

    def log(self, x: Any) -> Tensor:
        return torch.log(self._tensor(x))

    def log1p(self, x: Any) -> Tensor:
        return torch.log1p(self._tensor(x))

    def tanh(self, x: Any) -> Tensor:
        return torch.tanh(self._tensor(x))

    def sqrt(self, x: Any) -> Tensor:
        return torch.sqrt(self._tensor(x))

    def abs(self, x: Any) -> Tensor:
        return torch.abs(self._tensor(x))

    def where(self, condition: Any, a: Any, b: Any) -> Tensor:
        if not isinstance(condition, Tensor):
            return self._tensor(a if condition else b)
        return torch.where(condition, self._tensor(a), self._tensor(b))

    # nan where either argument is. Of equal ones b has the gradient.
    def minimum(self, a: Any, b: Any) -> Tensor:
        a, b = self._tensor(a), self._tensor(b)
        return torch.where((a < b) | a.isnan(), a, b)

    def maximum(self, a: Any, b: Any) -> Tensor:
        a, b = self._tensor(a), self._tensor(b)
        return torch.where((a > b) | a.isnan(), a, b)
