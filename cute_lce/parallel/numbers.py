"""Numbers of each token over the ranks of a group: statistics of each shard, gathered and folded, and their
gradients.

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
from ..ops import Destination
from ..ops.autograd import NO_DOUBLE_BACKWARD, add_to_destination, apply_of, kind_of
from ..ops.select import implementation, statistics
from ..ops.terms import decide
from ..options import ComputeOptions, LossOptions
from . import ranks
from .call import Spread, shard_of
from .collectives import gather, start_sum
from .gathered import merged as merged_others
from .gathered import parts_of
from .tensor import Shard, request_of


class Numbers(NamedTuple):
    """What a call's options name. weight (): the number of all ranks' classes, or the sum of their class
    weights, if total_nll is asked for."""

    stats: Stats
    weight: Tensor | None


def numbers_of(
    operands: StatsOperands,
    options: StatsOptions,
    loss: LossOptions,
    compute: ComputeOptions,
    spread: Spread,
    destination: Destination | None = None,
) -> Numbers:
    """Of operands in two dimensions: linear_weight, linear_bias and class_weight are this rank's rows, hidden
    perhaps its slice of the tokens, and what else is of each token of all tokens, rank by rank."""
    serving = statistics(operands, options, compute.schedule)
    _, how = decide(operands, options, compute, loss.reduction, destination, serving)
    if ranks.CHECK_RANKS:
        _check_ranks(operands, options, how.request, loss, compute, spread)
    shard = shard_of(spread, operands.weight)
    request = request_of(how.request, operands.hidden, shard)
    *found, weight = _eager(_How(options, request, shard, serving, how.destination), operands)
    return Numbers(Stats(**dict(zip(options.outputs, found, strict=True))), weight)


@torch.compiler.disable()
def _check_ranks(
    operands: StatsOperands,
    options: StatsOptions,
    request: Request,
    loss: LossOptions,
    compute: ComputeOptions,
    spread: Spread,
) -> None:
    others = {
        name: None if each is None else str(each.dtype)
        for name, each in operands._asdict().items()
        if name in ("linear_bias", "class_weight", "temperature", "topk_ids")
    }
    values = {
        f"{name}'s values": None if each is None else ranks.digest(each)
        for name, each in (("temperature", operands.temperature), ("topk_ids", operands.topk_ids))
    }
    needs = request.need_dinput, request.need_dweight
    ranks.check(
        *(operands[:3], needs, loss, compute, spread),
        options=tuple(options),
        **others,
        **values,
        need_dbias=request.need_dbias,
    )


class _How(NamedTuple):
    options: StatsOptions
    request: Request
    shard: Shard
    serving: Statistics
    destination: Destination | None


@torch.compiler.disable()
def _eager(how: _How, operands: StatsOperands) -> tuple[Tensor | None, ...]:
    return apply_of(_ShardedStats)(how, *operands)


class _ShardedStats(torch.autograd.Function):
    """The numbers that how.options name, and Numbers.weight."""

    @staticmethod
    def forward(ctx, how, *tensors):  # pyright: ignore[reportIncompatibleMethodOverride]
        operands, shard = StatsOperands(*tensors), how.shard
        hidden, weight, _ = operands[:3]
        exchange = _Exchange(operands, how)
        options = how.options._replace(ignore_index=IGNORED)
        if shard.sliced:
            hidden = gather(hidden.contiguous(), shard.group).flatten(0, 1)
        operands = operands._replace(hidden=hidden, target=exchange.targets.local, topk_ids=exchange.topk_ids)
        found = how.serving.forward(operands, options, how.request, exchange.merge)
        ctx.how = how._replace(options=options)
        ctx.set_materialize_grads(False)
        saved = (getattr(found, name) for name in StatsSaved._fields)
        ctx.save_for_backward(*operands, *saved, exchange.elsewhere, exchange.ids_elsewhere)
        if how.destination is not None:
            ctx.destination, ctx.kind = how.destination, kind_of(how.destination.out)
            ctx.dtype = weight.dtype
        fixed = [exchange.weight]
        fixed += [getattr(found, name) for name in options.outputs if name not in StatsUpstream._fields]
        ctx.mark_non_differentiable(*(each for each in fixed if each is not None))
        return *(getattr(found, name) for name in options.outputs), exchange.weight

    @staticmethod
    def backward(ctx, *dresults):  # pyright: ignore[reportIncompatibleMethodOverride]
        given = next((each for each in dresults if each is not None), None)
        if given is None:
            return None, *_by_operands(None, None, None)
        if torch.is_grad_enabled():
            raise RuntimeError(NO_DOUBLE_BACKWARD)
        how, (*tensors, elsewhere, ids_elsewhere) = ctx.how, ctx.saved_tensors
        count, shard = len(StatsOperands._fields), how.shard
        operands, saved = StatsOperands(*tensors[:count]), StatsSaved(*tensors[count:])
        by_name = dict(zip(how.options.outputs, dresults[:-1], strict=True))
        upstream = StatsUpstream(**{name: by_name.get(name) for name in StatsUpstream._fields})
        # Of logits of other shards this one has the lse.
        if upstream.total_nll is not None:
            upstream = _with_lse(upstream, upstream.total_nll * elsewhere)
        if upstream.topk_logprob is not None:
            upstream = _with_lse(upstream, -torch.where(ids_elsewhere, upstream.topk_logprob, 0).sum(1))
        dtype = operands.hidden.dtype

        def add_up(dinput: Tensor):
            return start_sum(dinput, dtype, shard.group, scatters=shard.sliced).wait

        _, need_dinput, need_dweight, _, need_dbias, *_ = ctx.needs_input_grad

        def run(needed: tuple[bool, bool], out: Tensor | None) -> AllGradients:
            request = how.request._replace(
                need_dinput=needed[0], need_dweight=needed[1], need_dbias=need_dbias
            )
            reduces = add_up if shard.reduces else None
            return how.serving.backward(upstream, operands, saved, how.options, request, out, reduces)

        if how.destination is None:
            return None, *_by_operands(*run((need_dinput, need_dweight), None))
        found = add_to_destination(ctx, given, (operands.hidden, operands.weight), run)
        return None, *_by_operands(*found)


def _with_lse(upstream: StatsUpstream, dlse: Tensor) -> StatsUpstream:
    return upstream._replace(lse=dlse if upstream.lse is None else upstream.lse + dlse)


def _by_operands(dinput: Tensor | None, dweight: Tensor | None, dbias: Tensor | None):
    return dinput, dweight, None, dbias, None, None, None


class _Exchange:
    """What the ranks exchange in a forward, once.

    targets, topk_ids: counted from this shard's first class. weight (): Numbers'; elsewhere (): that without
    this shard's; ids_elsewhere (n, K): which ids are other shards' classes; None before `merge`, and where
    they are not asked for.
    """

    def __init__(self, operands: StatsOperands, how: _How):
        hidden, weight, target = operands[:3]
        self._implementation, self._shard = implementation(hidden.device, hidden.dtype), how.shard
        self._target, self._ids, self._columns = target, operands.topk_ids, weight.shape[0]
        start = how.shard.start
        self.targets = self._implementation.localize(
            target, how.options.ignore_index, start, self._columns, how.shard.equal
        )
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
