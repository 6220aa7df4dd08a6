"""What a LogitTerm's functions are given for tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

exp, log, log1p, tanh, sqrt, abs = torch.exp, torch.log, torch.log1p, torch.tanh, torch.sqrt, torch.abs


def where(condition: Tensor, a: Any, b: Any) -> Tensor:
    if not isinstance(a, Tensor) and not isinstance(b, Tensor):
        # Of two numbers torch would make the default dtype, which may round them.
        a = torch.as_tensor(a, dtype=torch.float64, device=condition.device)
    return torch.where(condition, a, b)


def minimum(a: Any, b: Any) -> Tensor:
    return where(a < b, a, b)


def maximum(a: Any, b: Any) -> Tensor:
    return where(a > b, a, b)
