"""Given ids of each token as the kernels take them (arguments.TERMS' topk)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import NO_CLASS

BUCKETS = 4
"""For each id of a token, about: few ids lie between where a bucket begins and what a tile wants."""
LEAST_SHIFT = 8
"""No bucket has fewer classes than a tile."""


class Topk(NamedTuple):
    """ids (n, K) int32, ascending. order (n, K) int64: where each was given. starts (n, buckets) int32, of
    2^shift classes each. known (n, K) bool, as given: whether an id is a class of a valid token."""

    ids: Tensor
    order: Tensor
    starts: Tensor
    shift: int
    known: Tensor

    @classmethod
    def of(cls, given: Tensor | None, valid: Tensor, classes: int) -> Topk | None:
        """None where there are no ids."""
        if given is None or given.shape[1] == 0:
            return None
        n, K = given.shape
        known = (given >= 0) & (given < classes) & valid.unsqueeze(1)
        each = torch.where(known, given, NO_CLASS).int().contiguous()
        ids, order = each.sort(dim=1, stable=True)
        shift = max((classes // (BUCKETS * K)).bit_length() - 1, LEAST_SHIFT)
        edges = torch.arange(0, classes, 1 << shift, dtype=torch.int32, device=given.device)
        starts = torch.searchsorted(ids, edges.expand(n, -1).contiguous(), out_int32=True)
        return cls(ids, order, starts, shift, known)

    def added_to(self, loss: Any, values: Tensor) -> Any:
        """The loss with the term. values (n, K): in the order of `ids`."""
        return loss.with_terms(
            "topk",
            topk_ids=self.ids.data_ptr(),
            topk_starts=self.starts.data_ptr(),
            topk_values=values.data_ptr(),
            topk=self.ids.shape[1],
            topk_buckets=self.starts.shape[1],
            topk_shift=self.shift,
        )

    def as_given(self, values: Tensor) -> Tensor:
        """Values in the order of `ids` as the ids were given; 0 where those are not known."""
        found = torch.zeros_like(values).scatter_(1, self.order, values)
        return found.masked_fill_(~self.known, 0)
