"""Given ids of each token as the kernels take them (arguments.TERMS' topk)."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..arguments import TOPK_CLASSES, TOPK_TOKENS

MOST_TOKENS = 2**31 // TOPK_CLASSES
"""An entry has a token and a class in 32 bits."""


def fits(shape: Any, classes: int) -> bool:
    """Whether the kernels take (n, K) ids: their numbers, by which they step 32 at a time, have 32 bits. Of
    symbolic sizes nothing is asked."""
    n, K = shape
    if not all(type(each) is int for each in (n, K, classes)):
        return True
    return n <= MOST_TOKENS and n * K < 2**31 - 64 and _units(classes) * _blocks(n) < 2**31


def _units(classes: int) -> int:
    return -(-classes // TOPK_CLASSES)


def _blocks(n: int) -> int:
    return -(-n // TOPK_TOKENS)


class Topk(NamedTuple):
    """The ids that are classes of valid tokens, in the kernels' order, and behind them the others.

    entries (n K,) int32; starts (units blocks + 1,) int32. order (n K,) int64: where each was given. known
    (n, K) bool, as given: whether it is a class of a valid token. units, blocks: their numbers.
    """

    entries: Tensor
    starts: Tensor
    order: Tensor
    known: Tensor
    units: int
    blocks: int

    @classmethod
    def of(cls, given: Tensor | None, valid: Tensor, classes: int, *, compacted: bool) -> Topk | None:
        """None where there are no ids. compacted: whether the pass computes valid tokens alone."""
        if given is None or given.shape[1] == 0:
            return None
        n, device = given.shape[0], given.device
        units, blocks = _units(classes), _blocks(n)
        known = ((given >= 0) & (given < classes)).logical_and_(valid.unsqueeze(1))
        if compacted:
            token = valid.cumsum(0, dtype=torch.int32) - 1
        else:
            token = torch.arange(n, dtype=torch.int32, device=device)
        token, given = token.unsqueeze(1), given.int()
        key = torch.add(token // TOPK_TOKENS, given // TOPK_CLASSES, alpha=blocks)
        key, order = key.masked_fill_(~known, units * blocks).reshape(-1).sort(stable=True)
        starts = torch.arange(units * blocks + 1, dtype=torch.int32, device=device)
        starts = torch.searchsorted(key, starts, out_int32=True)
        entries = torch.add(given % TOPK_CLASSES, token, alpha=TOPK_CLASSES).reshape(-1)[order]
        return cls(entries, starts, order, known, units, blocks)

    def added_to(self, loss: Any, values: Tensor) -> Any:
        """The loss with what the term reads. values (n K,): of the entries."""
        return loss._replace(
            topk_entries=self.entries.data_ptr(),
            topk_starts=self.starts.data_ptr(),
            topk_values=values.data_ptr(),
            topk_units=self.units,
            topk_blocks=self.blocks,
        )

    def as_given(self, values: Tensor) -> Tensor:
        """(n, K) of values of the entries; of use where the ids are known."""
        return torch.empty_like(values).scatter_(0, self.order, values).view(self.known.shape)
