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

    packed: int32, of entries (n K,); starts (units blocks + 1,); order (n K,): where each was given; and a
    number more where tokens are compacted. known (n, K) bool, as given: whether it is a class of a valid
    token; None: read of a forward. shape: (n, K). units, blocks: their numbers.
    """

    packed: Tensor
    known: Tensor | None
    shape: torch.Size
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
        length = _length(given.shape, units, blocks) + compacted
        packed = torch.empty((length,), dtype=torch.int32, device=device)
        found = cls(packed, known, given.shape, units, blocks)
        entries, starts, placed = found._parts()
        numbers = torch.arange(units * blocks + 1, dtype=torch.int32, device=device)
        torch.searchsorted(key, numbers, out_int32=True, out=starts)
        entry = torch.add(given % TOPK_CLASSES, token, alpha=TOPK_CLASSES)
        torch.index_select(entry.reshape(-1), 0, order, out=entries)
        placed.copy_(order)
        return found

    @classmethod
    def again(cls, packed: Tensor | None, given: Tensor, classes: int, *, compacted: bool) -> Topk | None:
        """Of what a forward saved; None where it did not, or computed other tokens."""
        units, blocks = _units(classes), _blocks(given.shape[0])
        if packed is None or packed.shape[0] != _length(given.shape, units, blocks) + compacted:
            return None
        return cls(packed, None, given.shape, units, blocks)

    def added_to(self, loss: Any, values: Tensor) -> Any:
        """The loss with what the term reads. values (n K,): of the entries."""
        entries, starts, _ = self._parts()
        return loss._replace(
            topk_entries=entries.data_ptr(),
            topk_starts=starts.data_ptr(),
            topk_values=values.data_ptr(),
            topk_units=self.units,
            topk_blocks=self.blocks,
        )

    def ordered(self, values: Tensor) -> Tensor:
        """(n K,), of the entries, of values (n, K) as given."""
        return values.reshape(-1).index_select(0, self._parts()[2])

    def as_given(self, values: Tensor) -> Tensor:
        """(n, K) of values of the entries; of use where the ids are known."""
        return torch.empty_like(values).scatter_(0, self._parts()[2].long(), values).view(self.shape)

    def _parts(self) -> tuple[Tensor, ...]:
        """entries, starts and order."""
        ids, starts = self.shape.numel(), self.units * self.blocks + 1
        return self.packed[: 2 * ids + starts].split_with_sizes([ids, starts, ids])


def _length(shape: torch.Size, units: int, blocks: int) -> int:
    return 2 * shape.numel() + units * blocks + 1
