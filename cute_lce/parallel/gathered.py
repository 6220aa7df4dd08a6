"""What the shards of a vocabulary gather of a row besides sums: which classes they have, and what numbers of
a token that only the streaming path computes are made of.

    of each shard, acc: [its first class, its classes] square_sum (n,) mean_logit (n,) argmax (n,)
                        topk_logit (n, K), of which there is what the call asks for
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..exchange import RowSums
from ..maths import rescaled
from ..streaming.shards import folded

_NAMES = "square_sum", "mean_logit", "argmax", "topk_logit"


class Classes(NamedTuple):
    """Of each shard, int64 (shards,): the first class and their number."""

    start: Tensor
    count: Tensor

    def inside(self, ids: Tensor) -> Tensor:
        """Whether each shard has a class of the whole vocabulary, (shards, *ids.shape)."""
        first, count = (each.view(-1, *[1] * ids.dim()) for each in self)
        return (ids >= first) & (ids < first + count)


def parts_of(own: RowSums, start: int, columns: int) -> list[Tensor]:
    """What a shard of classes [start, start + columns) gives; nothing where sums suffice."""
    given = [(name, getattr(own, name)) for name in _NAMES]
    parts = [_as_number(each, own.row_max) for _, each in given if each is not None]
    if not parts:
        return []
    # Not torch.tensor, which copies from the host and waits.
    numbers = [own.row_max.new_full((1,), each, dtype=torch.int64) for each in (start, columns)]
    return [*(_as_number(each, own.row_max) for each in numbers), *parts]


def merged(
    gathered: Tensor,
    row_maxima: Tensor,
    own: RowSums,
    sums: RowSums,
    target: Tensor,
    ids: Tensor | None,
    *,
    equal: bool,
) -> RowSums:
    """sums with what is made of `gathered` (shards, ...), what parts_of gave. own: this shard's. row_maxima
    (shards, n): theirs. target (n,), ids (n, K): classes of the whole vocabulary. equal: whether the shards
    should have as many; argmax is -1 where they do not."""
    numbers, rest = _as_integer(gathered[:, :2]), gathered[:, 2:]
    classes = Classes(*numbers.unbind(1))
    found = {}
    for name in _NAMES:
        like = getattr(own, name)
        if like is not None:
            found[name], rest = rest[:, : like.numel()].unflatten(1, like.shape), rest[:, like.numel() :]
    if "square_sum" in found:
        rise = row_maxima, sums.row_max, torch.exp
        found["square_sum"] = folded(rescaled(rescaled(found["square_sum"], *rise), *rise))
    if "mean_logit" in found:
        part = classes.count.to(gathered.dtype) / classes.count.sum()
        found["mean_logit"] = folded(found["mean_logit"] * part.unsqueeze(1))
    if "argmax" in found:
        top = _as_integer(found["argmax"]) + classes.start.unsqueeze(1)
        # The first of equal ones wins, in whatever order the shards are.
        highest = row_maxima == row_maxima.amax(0)
        top = top.masked_fill(~highest, torch.iinfo(top.dtype).max).amin(0).masked_fill(~highest.any(0), 0)
        if equal:
            top = torch.where((classes.count == classes.count[0]).all(), top, -1)
        found["argmax"], found["is_top1"] = top, top == target
    if "topk_logit" in found and ids is not None:
        inside = classes.inside(ids)
        owners = inside.sum(0)
        logit = folded(torch.where(inside, found["topk_logit"], 0))
        found["topk_logit"], found["topk_known"] = logit.masked_fill(owners > 1, torch.nan), owners > 0
    return sums._replace(**found)


def _as_number(tensor: Tensor, like: Tensor) -> Tensor:
    """Flat; integers with their bits as those of a number in like's dtype."""
    if not tensor.is_floating_point():
        wide = torch.int64 if like.dtype is torch.float64 else torch.int32
        tensor = tensor.to(wide).view(like.dtype)
    return tensor.reshape(-1)


def _as_integer(tensor: Tensor) -> Tensor:
    wide = torch.int64 if tensor.dtype is torch.float64 else torch.int32
    return tensor.contiguous().view(wide).long()
