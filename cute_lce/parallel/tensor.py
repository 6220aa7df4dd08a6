"""The paper's tensor and sequence parallelism: the passes of calls whose weight is a shard of the vocabulary.

    forward:  [gather hidden] -> statistics of this shard -> gather and fold them -> finish
    backward: dinput's part -> begin its sum over the ranks -> what is left of dweight

The sum and its rounding run beside what is left of dweight. Every rank makes the same collectives, whose
sizes depend on no values.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..arguments import IGNORED, Operands
from ..implementation import BothGradients, Halfway, Request, Results, Saved
from ..ops.prepared import Prepared
from ..ops.select import implementation
from ..options import LossOptions
from ..plan.overlap import sum_seconds
from ..plan.problem import Collective
from .collectives import gather, is_local, start_sum


class Shard(NamedTuple):
    """How a call is spread over the ranks of a group.

    start: the first class of this rank's shard. equal: whether it was derived from the rank. sliced: whether
    hidden is this rank's slice of the tokens, of which the group has all. reduces: whether dinput is summed
    over the group, or left as this shard's part. sm_margin: SMs that are left to this sum.
    """

    group: ProcessGroup
    start: int
    equal: bool
    sliced: bool = False
    reduces: bool = True
    sm_margin: int = 0


def request_of(request: Request, hidden: Tensor, shard: Shard) -> Request:
    """The request of a shard. hidden (..., d): the rank's."""
    beside, ranks = None, shard.group.size()
    if shard.reduces and shard.sm_margin:
        d = hidden.shape[-1]
        n = hidden.numel() // max(d, 1) * (ranks if shard.sliced else 1)
        width, sms = hidden.dtype.itemsize, shard.sm_margin
        local = is_local(shard.group)
        seconds = sum_seconds(n, d, width, ranks, sms, scatters=shard.sliced, is_local=local)
        beside = Collective(seconds, sms)
    return request._replace(shard=True, is_summed=shard.reduces, beside=beside)


class ShardedPasses(Prepared):
    """The passes of calls of one kind. target is that of every token of the group, flat, in rank order."""

    def __init__(self, operands: Operands, request: Request, shard: Shard):
        """operands: of the call; only their devices, dtypes and sizes matter."""
        hidden = operands.hidden
        super().__init__(implementation(hidden.device, hidden.dtype), request_of(request, hidden, shard))
        self.shard = shard

    def run(self, operands: Operands, loss: LossOptions) -> tuple[Results, Tensor | None, Tensor]:
        """The results; hidden of all tokens, None: as given; and the targets as this shard has them."""
        hidden, weight, target = operands
        shard, group = self.shard, self.shard.group
        local, columns = local_loss(loss), weight.shape[0]
        targets = self._implementation.localize(target, loss.ignore_index, shard.start, columns, shard.equal)
        if shard.sliced:
            hidden = gather(hidden.contiguous(), group).flatten(0, 1)
        operands, own = Operands(hidden, weight, targets.local), []
        step = self._folded(columns)
        for first in range(0, columns, step):
            part = operands
            if step < columns:
                weight_part = weight[first : first + step]
                at = self._implementation.localize(target, loss.ignore_index, shard.start + first, step, True)
                part = operands._replace(weight=weight_part, target=at.local)
            forward = self._prepared_forward(part, local)
            found = forward.statistics(part, local)
            assert found.row_max is not None
            assert found.row_sum is not None
            own += targets.header.to(found.loss.dtype), found.row_max, found.row_sum, found.loss
        gathered = gather(torch.cat(own), group).view(-1, 3 * targets.local.shape[0] + 1)
        total, row_max, row_sum, num_valid = self._implementation.merge(gathered, targets, local)
        found = found._replace(row_max=row_max, row_sum=row_sum)
        finished = forward.finish(operands, local, found)
        results = Results(total, row_max, row_sum, num_valid, finished.kept, finished.kept_scale)
        return results, hidden if shard.sliced else None, targets.local

    def _folded(self, columns: int) -> int:
        """How many columns' statistics are gathered at a time: the shard's, or those of the caller's window
        if it divides equal shards and nothing is kept: their order is then that of any number of ranks."""
        window = self.request.limits.window
        if window and self.shard.equal and not self.request.kept_columns and columns % window == 0:
            return window
        return columns

    def backward(
        self,
        dloss: Tensor,
        saved: Saved,
        loss: LossOptions,
        needed: tuple[bool, ...],
        out: Tensor | None = None,
    ) -> BothGradients:
        shard, local = self.shard, local_loss(loss)
        backward = self._prepared_backward(needed, saved, local, out)
        halfway = backward.dinput(dloss, saved, local, out)
        assert isinstance(halfway, Halfway)
        dinput, begun, dtype = halfway.dinput, None, saved.hidden.dtype
        if dinput is not None and shard.reduces:
            begun = start_sum(dinput, dtype, shard.group, scatters=shard.sliced)
            halfway = halfway._replace(join=begun.wait)
        _, dweight = backward.dweight(dloss, saved, local, halfway, out)
        if begun is not None:
            return begun.wait(), dweight
        return None if dinput is None else dinput.to(dtype), dweight


@functools.lru_cache(maxsize=256)
def local_loss(loss: LossOptions) -> LossOptions:
    """The loss for targets that are counted from a shard's first class."""
    return loss._replace(ignore_index=IGNORED)
