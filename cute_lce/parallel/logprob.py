"""linear_logprob over the ranks of a group: statistics of each shard, gathered and folded, and its gradients.

    forward:  sums over this shard's columns -> gather and fold them -> numbers of each token
    backward: this shard's part of dinput, dweight and dbias -> sum dinput over the group

The streaming path serves it on every device, but for what is a plain call (ops.logprob.Call.is_plain).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..arguments import IGNORED
from ..implementation import Request, Stats, StatsOperands, StatsOptions, StatsSaved, StatsUpstream
from ..ops.autograd import NO_DOUBLE_BACKWARD, apply_of
from ..ops.logprob import Call, Wanted, call_of
from ..ops.plain import is_plain_eager
from ..ops.terms import decide
from ..options import ComputeOptions, LossOptions, TermOptions
from ..streaming import STATISTICS, shards, token_rows, token_stats
from . import call as plain_call
from . import ranks
from .call import Spread
from .collectives import gather, start_sum
from .tensor import Shard


def linear_logprob(
    given: StatsOperands,
    wanted: Wanted,
    loss: LossOptions,
    terms: TermOptions,
    compute: ComputeOptions,
    spread: Spread,
) -> list[Tensor]:
    """The numbers that wanted.outputs names, in its order; see cute_lce.linear_logprob. given: as the caller
    has them, linear_weight and linear_bias this rank's rows."""
    call = call_of(given, wanted, loss, terms, compute)
    outputs = call.options.outputs
    for name in outputs:
        if name not in token_stats.SHARDED_OUTPUTS:
            names = ", ".join(token_stats.SHARDED_OUTPUTS)
            raise ValueError(f"outputs: got {name!r} with tp_group, want names of {names}")
    operands, group = call.operands, spread.tp_group
    if call.is_plain:
        plain = is_plain_eager(*call.plain_operands)
        losses = plain_call.call(*call.plain_operands, call.plain_loss, compute, spread, plain)
        return [-losses.view(call.shape)]
    _, how = decide(operands, call.options, compute, "none", None, STATISTICS)
    if ranks.CHECK_RANKS:
        _check_ranks(call, how.request, loss, compute, spread)
    equal, start = spread.vocab_start is None, spread.vocab_start
    if start is None:
        start = group.rank() * operands.weight.shape[0]
    shard = Shard(group, start, equal, reduces=spread.grad_input == "reduced")
    found = _eager(_How(call.options, how.request, shard), operands)
    return call.named(Stats(**dict(zip(outputs, found, strict=True))))


@torch.compiler.disable()
def _check_ranks(
    call: Call, request: Request, loss: LossOptions, compute: ComputeOptions, spread: Spread
) -> None:
    bias, temperature = call.operands.linear_bias, call.operands.temperature
    ranks.check(
        (*call.plain_operands,),
        (request.need_dinput, request.need_dweight),
        *(loss, compute, spread),
        options=tuple(call.options),
        linear_bias=None if bias is None else (str(bias.dtype), request.need_dbias),
        temperature=None if temperature is None else str(temperature.dtype),
    )


class _How(NamedTuple):
    options: StatsOptions
    request: Request
    shard: Shard


@torch.compiler.disable()
def _eager(how: _How, operands: StatsOperands) -> tuple[Tensor, ...]:
    return apply_of(_ShardedStats)(how, *operands)


class _ShardedStats(torch.autograd.Function):
    """The numbers that how.options name, of operands in two dimensions."""

    @staticmethod
    def forward(ctx, how, *tensors):  # pyright: ignore[reportIncompatibleMethodOverride]
        operands, shard, V = StatsOperands(*tensors), how.shard, tensors[1].shape[0]
        here = shards.localize(operands.target, how.options.ignore_index, shard.start, V, shard.equal)
        operands = operands._replace(target=here.local)
        options = how.options._replace(ignore_index=IGNORED)

        def merge(own: token_stats.RowSums) -> token_stats.RowSums:
            header = here.header.to(own.row_max.dtype)
            gathered = gather(torch.cat((header, *own)), shard.group)
            counts, n = gathered[:, 0], own.row_max.shape[0]
            sums = shards.fold_sums(gathered[:, 1:].unflatten(1, (4, n)))
            differ = (counts != counts[0]).any()
            return sums._replace(target_logit=sums.target_logit.masked_fill(differ, torch.nan))

        found = token_rows.merged_forward(operands, options, how.request, merge)
        assert found.row_max is not None
        assert found.row_sum is not None
        ctx.how = how._replace(options=options)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*operands, found.row_max, found.row_sum, found.mean_gap, found.kept)
        return tuple(getattr(found, name) for name in options.outputs)

    @staticmethod
    def backward(ctx, *dresults):  # pyright: ignore[reportIncompatibleMethodOverride]
        if torch.is_grad_enabled():
            raise RuntimeError(NO_DOUBLE_BACKWARD)
        (options, request, shard), tensors = ctx.how, ctx.saved_tensors
        count = len(StatsOperands._fields)
        operands, saved = StatsOperands(*tensors[:count]), StatsSaved(*tensors[count:])
        upstream = StatsUpstream(**dict(zip(options.outputs, dresults, strict=True)))
        _, need_dinput, need_dweight, _, need_dbias, *_ = ctx.needs_input_grad
        request = request._replace(need_dinput=need_dinput, need_dweight=need_dweight, need_dbias=need_dbias)
        dinput, dweight, dbias = token_rows.gradients(upstream, operands, saved, options, request)
        dtype = operands.hidden.dtype
        if dinput is not None and shard.reduces:
            dinput = start_sum(dinput, dtype, shard.group, scatters=False).wait()
        dinput, dbias = (None if each is None else each.to(dtype) for each in (dinput, dbias))
        return None, dinput, dweight, None, dbias, None, None, None
