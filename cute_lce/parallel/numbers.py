"""Numbers of each token over the ranks of a group: statistics of each shard, gathered and folded, and their
gradients.

    forward:  [gather hidden] -> sums over this shard's columns -> gather and fold them -> numbers
    backward: dinput's part -> begin its sum over the ranks -> what is left of dweight and dbias
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import IGNORED
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
from ..streaming import STATISTICS
from . import ranks
from .call import Spread, shard_of
from .collectives import gather, start_sum
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
    perhaps its slice of the tokens, and what else is of each token of all tokens, rank by rank. The outputs
    are names of implementation.SHARDED."""
    serving, compute = _serving(operands, options, compute)
    _, how = decide(operands, options, compute, loss.reduction, destination, serving)
    if ranks.CHECK_RANKS:
        _check_ranks(operands, options, how.request, loss, compute, spread)
    shard = shard_of(spread, operands.weight)
    request = request_of(how.request, operands.hidden, shard)
    *found, weight = _eager(_How(options, request, shard, serving, how.destination), operands)
    return Numbers(Stats(**dict(zip(options.outputs, found, strict=True))), weight)


def _serving(
    operands: StatsOperands, options: StatsOptions, compute: ComputeOptions
) -> tuple[Statistics, ComputeOptions]:
    """What serves a shard. The kernels keep no rows of one whose onehot's share depends on another shard's
    class weight, and no smoothed ones: what is added to kept rows would be to those of a stripe whose dweight
    waits, too."""
    serving = statistics(operands, options, compute.schedule)
    may_keep = not options.label_smoothing and (not options.z_loss or operands.class_weight is None)
    if serving is STATISTICS or may_keep:
        return serving, compute
    if compute.schedule == "keep":
        return STATISTICS, compute
    return serving, compute._replace(schedule="recompute")


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
        if name in ("linear_bias", "class_weight", "temperature")
    }
    values = None if operands.temperature is None else ranks.digest(operands.temperature)
    needs = request.need_dinput, request.need_dweight
    ranks.check(
        *(operands[:3], needs, loss, compute, spread),
        options=tuple(options),
        **others,
        **{"temperature's values": values},
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
        operands = operands._replace(hidden=hidden, target=exchange.targets.local)
        found = how.serving.forward(operands, options, how.request, exchange.merge)
        ctx.how = how._replace(options=options)
        ctx.set_materialize_grads(False)
        saved = (getattr(found, name) for name in StatsSaved._fields)
        ctx.save_for_backward(*operands, *saved, exchange.elsewhere)
        if how.destination is not None:
            ctx.destination, ctx.kind = how.destination, kind_of(how.destination.out)
            ctx.dtype = weight.dtype
        if exchange.weight is not None:
            ctx.mark_non_differentiable(exchange.weight)
        return *(getattr(found, name) for name in options.outputs), exchange.weight

    @staticmethod
    def backward(ctx, *dresults):  # pyright: ignore[reportIncompatibleMethodOverride]
        given = next((each for each in dresults if each is not None), None)
        if given is None:
            return None, *_by_operands(None, None, None)
        if torch.is_grad_enabled():
            raise RuntimeError(NO_DOUBLE_BACKWARD)
        how, (*tensors, elsewhere) = ctx.how, ctx.saved_tensors
        count, shard = len(StatsOperands._fields), how.shard
        operands, saved = StatsOperands(*tensors[:count]), StatsSaved(*tensors[count:])
        upstream = StatsUpstream(**dict(zip(how.options.outputs, dresults[:-1], strict=True)))
        if upstream.total_nll is not None:
            # lse counts as often as the group has classes.
            dlse = upstream.total_nll * elsewhere
            upstream = upstream._replace(lse=dlse if upstream.lse is None else upstream.lse + dlse)
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


def _by_operands(dinput: Tensor | None, dweight: Tensor | None, dbias: Tensor | None):
    return dinput, dweight, None, dbias, None, None, None


class _Exchange:
    """What the ranks exchange in a forward, once.

    targets: of this shard. weight (): Numbers'; elsewhere (): that without this shard's; None before `merge`,
    and where total_nll is not asked for.
    """

    def __init__(self, operands: StatsOperands, how: _How):
        hidden, weight, target = operands[:3]
        self._implementation, self._group = implementation(hidden.device, hidden.dtype), how.shard.group
        self.targets = self._implementation.localize(
            target, how.options.ignore_index, how.shard.start, weight.shape[0], how.shard.equal
        )
        self.weight: Tensor | None = None
        self.elsewhere: Tensor | None = None

    def merge(self, own: RowSums) -> RowSums:
        """See exchange.Merge."""
        row_max, row_sum, target_logit, mean_gap, total_gap, weight = own
        parts = [self.targets.header.to(row_max.dtype), row_max, row_sum, target_logit]
        if mean_gap is not None:
            parts.append(mean_gap)
        if total_gap is not None and weight is not None:
            parts += [total_gap, weight.view(1)]
        gathered = gather(torch.cat(parts), self._group)
        merged = self._implementation.merge_sums(
            gathered, self.targets, entropy=mean_gap is not None, total=total_gap is not None
        )
        if weight is None:
            return merged
        self.weight = gathered[:, -1].sum()
        self.elsewhere = self.weight - weight
        return merged._replace(weight=self.weight)
