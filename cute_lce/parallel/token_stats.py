"""The passes of numbers of each token over the ranks of a group: statistics of each shard, gathered and
folded, and their gradients.

    forward:  [gather hidden] -> sums over this shard's columns -> gather and fold them -> numbers
    backward: dinput's part -> begin its sum over the ranks -> what is left of dweight and dbias
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import ELSEWHERE, IGNORED
from ..exchange import RowSums
from ..implementation import (
    AllGradients,
    Request,
    Statistics,
    Stats,
    StatsOperands,
    StatsOptions,
    StatsSaved,
    StatsUpstream,
)
from ..ops.select import implementation
from .collectives import gather, start_sum
from .gathered import merged as merged_others
from .gathered import parts_of
from .tensor import Shard, request_of


class Found(NamedTuple):
    """What a forward gives; None for what there is none of.

    weight (): the number of all ranks' classes, or the sum of their class weights, if total_nll is asked for.
    For the backward: hidden (n, d), where that was gathered, and target (n,) and topk_ids (n, K), counted
    from this shard's first class. elsewhere (): weight without this shard's. ids_elsewhere (n, K): which ids
    are other shards' classes.
    """

    stats: Stats
    weight: Tensor | None
    hidden: Tensor | None
    target: Tensor
    topk_ids: Tensor | None
    elsewhere: Tensor | None
    ids_elsewhere: Tensor | None


def forward(
    operands: StatsOperands, options: StatsOptions, request: Request, shard: Shard, serving: Statistics
) -> Found:
    """operands: as numbers_of has them."""
    exchange = _Exchange(operands, options.ignore_index, shard)
    request, gathered = request_of(request, operands.hidden, shard), None
    if shard.sliced:
        gathered = gather(operands.hidden.contiguous(), shard.group).flatten(0, 1)
        operands = operands._replace(hidden=gathered)
    operands = operands._replace(target=exchange.targets.local, topk_ids=exchange.topk_ids)
    stats = serving.forward(operands, local_options(options), request, exchange.merge)
    return Found(
        stats,
        exchange.weight,
        gathered,
        exchange.targets.local,
        exchange.topk_ids,
        exchange.elsewhere,
        exchange.ids_elsewhere,
    )


def backward(
    upstream: StatsUpstream,
    operands: StatsOperands,
    saved: StatsSaved,
    elsewhere: Tensor | None,
    ids_elsewhere: Tensor | None,
    options: StatsOptions,
    request: Request,
    shard: Shard,
    serving: Statistics,
    out: Tensor | None = None,
) -> AllGradients:
    """operands: with Found's; out: as in implementation.Backward."""
    # Of logits of other shards this one has the lse.
    if upstream.total_nll is not None and elsewhere is not None:
        upstream = _with_lse(upstream, upstream.total_nll * elsewhere)
    if upstream.topk_logprob is not None and ids_elsewhere is not None:
        upstream = _with_lse(upstream, -torch.where(ids_elsewhere, upstream.topk_logprob, 0).sum(1))
    hidden = operands.hidden
    own = hidden[: hidden.shape[0] // shard.group.size()] if shard.sliced else hidden
    request = request_of(request, own, shard)

    def add_up(dinput: Tensor):
        return start_sum(dinput, hidden.dtype, shard.group, scatters=shard.sliced).wait

    reduces = add_up if shard.reduces else None
    return serving.backward(upstream, operands, saved, local_options(options), request, out, reduces)


def local_options(options: StatsOptions) -> StatsOptions:
    """For targets that are counted from a shard's first class."""
    return options._replace(ignore_index=IGNORED)


def _with_lse(upstream: StatsUpstream, dlse: Tensor) -> StatsUpstream:
    return upstream._replace(lse=dlse if upstream.lse is None else upstream.lse + dlse)


class _Exchange:
    """What the ranks exchange in a forward, once.

    targets, topk_ids: counted from this shard's first class. weight (): Numbers'; elsewhere (): that without
    this shard's; ids_elsewhere (n, K): which ids are other shards' classes; None before `merge`, and where
    they are not asked for.
    """

    def __init__(self, operands: StatsOperands, ignore_index: int, shard: Shard):
        hidden, weight, target = operands[:3]
        self._implementation, self._shard = implementation(hidden.device, hidden.dtype), shard
        self._target, self._ids, self._columns = target, operands.topk_ids, weight.shape[0]
        start = shard.start
        self.targets = self._implementation.localize(target, ignore_index, start, self._columns, shard.equal)
        self.topk_ids: Tensor | None = None
        if self._ids is not None:
            inside = (self._ids >= start) & (self._ids < start + self._columns)
            self.topk_ids = torch.where(inside, self._ids - start, ELSEWHERE)
        self.weight: Tensor | None = None
        self.elsewhere: Tensor | None = None
        self.ids_elsewhere: Tensor | None = None

    def merge(self, own: RowSums) -> RowSums:
        """See exchange.Merge."""
        row_max, row_sum, target_logit, mean_gap, total_gap, weight, *_ = own
        parts = [self.targets.header.to(row_max.dtype), row_max, row_sum, target_logit]
        if mean_gap is not None:
            parts.append(mean_gap)
        if total_gap is not None and weight is not None:
            parts += [total_gap, weight.view(1)]
        sums, others = torch.cat(parts), parts_of(own, self._shard.start, self._columns)
        size, n = sums.shape[0], row_max.shape[0]
        gathered = gather(torch.cat([sums, *others]) if others else sums, self._shard.group)
        merged = self._implementation.merge_sums(
            gathered, self.targets, entropy=mean_gap is not None, total=total_gap is not None
        )
        if others:
            given = gathered[:, size:], gathered[:, 1 : n + 1], own, merged, self._target, self._ids
            merged = merged_others(*given, equal=self._shard.equal)
        if own.topk_known is not None and merged.topk_known is not None:
            self.ids_elsewhere = merged.topk_known & ~own.topk_known
        if weight is not None:
            self.weight = gathered[:, size - 1].sum()
            self.elsewhere = self.weight - weight
            merged = merged._replace(weight=self.weight)
        return merged
