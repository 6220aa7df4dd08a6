"""The backward of a call without rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..implementation import BothGradients, Halfway, Request, Saved
from ..options import LossOptions


@dataclass(frozen=True)
class EmptyBackward:
    """See implementation.Backward."""

    request: Request

    def dinput(
        self, dloss: Tensor, saved: Saved, loss: LossOptions, out: Tensor | None = None
    ) -> BothGradients | Halfway:
        shard = self.request.shard
        dinput = _zeros(saved.hidden.float() if shard else saved.hidden) if self.request.need_dinput else None
        return Halfway(dinput, None) if shard else (dinput, None)

    def dweight(
        self,
        dloss: Tensor,
        saved: Saved,
        loss: LossOptions,
        gradients: BothGradients | Halfway,
        out: Tensor | None = None,
    ) -> BothGradients:
        writes = self.request.need_dweight and out is None
        return gradients[0], _zeros(saved.weight) if writes else None


def _zeros(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor, memory_format=torch.contiguous_format)
