"""The paper's tensor and sequence parallelism: the passes of calls whose weight is a shard of the vocabulary.

    forward:  [gather hidden] -> statistics of this shard -> gather and fold them -> finish
    backward: dinput's part -> begin its reduction -> what is left of dweight -> round dinput

The reduction runs beside what is left of dweight. Every rank makes the same collectives, whose sizes depend
on no values.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..arguments import Operands
from ..implementation import BothGradients, Halfway, Request, Results, Saved
from ..ops.prepared import Prepared
from ..ops.select import implementation
from ..options import IGNORE_INDEX, LossOptions
from ..streaming.rows import is_ignored
from .collectives import gather, start_scatter, start_sum
from .merge import merge

ELSEWHERE = -1
"""A target in another rank's shard, counted from this one's first class."""


class Shard(NamedTuple):
    """How a call is spread over the ranks of a group.

    start: the first class of this rank's shard. equal: whether it was derived from the rank. sliced: whether
    hidden is this rank's slice of the tokens, of which the group has all. reduces: whether dinput is summed
    over the group, or left as this shard's part.
    """

    group: ProcessGroup
    start: int
    equal: bool
    sliced: bool = False
    reduces: bool = True


class ShardedPasses(Prepared):
    """The passes of calls of one kind. target is that of every token of the group, flat, in rank order."""

    def __init__(self, operands: Operands, request: Request, shard: Shard):
        """operands: of the call; only their devices and dtypes matter."""
        hidden = operands.hidden
        super().__init__(implementation(hidden.device, hidden.dtype), request._replace(shard=True))
        self.shard = shard

    def run(self, operands: Operands, loss: LossOptions) -> tuple[Results, Tensor | None, Tensor]:
        """The results; hidden of all tokens, None: as given; and the targets as this shard has them."""
        hidden, weight, target = operands
        shard, group = self.shard, self.shard.group
        local, here = local_loss(loss), local_target(target, loss.ignore_index, shard.start, weight.shape[0])
        if shard.sliced:
            hidden = gather(hidden.contiguous(), group).flatten(0, 1)
        operands = Operands(hidden, weight, here)
        forward = self._forward
        if forward is None:
            forward = self._forward = self._implementation.forward(operands, local, self.request)
        found = forward.statistics(operands, local)
        assert found.row_max is not None
        assert found.row_sum is not None
        row_max, row_sum, target_logit = merge(
            found.row_max, found.row_sum, found.loss, weight.shape[0], shard.equal, group
        )
        merged = found._replace(loss=target_logit, row_max=row_max, row_sum=row_sum)
        finished = forward.finish(operands, local, merged)
        return finished, hidden if shard.sliced else None, here

    def backward(
        self,
        dloss: Tensor,
        saved: Saved,
        loss: LossOptions,
        needed: tuple[bool, ...],
        out: Tensor | None = None,
    ) -> BothGradients:
        shard, local = self.shard, local_loss(loss)
        key = needed if out is None else (*needed, out.dtype)
        added = None if out is None else out.dtype
        backward = self._backwards.get(key) or self._backward(needed, saved, local, added)
        halfway = backward.dinput(dloss, saved, local, out)
        assert isinstance(halfway, Halfway)
        dinput, begun = halfway.dinput, None
        if dinput is not None and shard.reduces:
            if shard.sliced:
                dinput, begun = start_scatter(dinput, shard.group)
            else:
                begun = start_sum(dinput, shard.group)
        _, dweight = backward.dweight(dloss, saved, local, halfway, out)
        if begun is not None:
            begun.wait()
        return None if dinput is None else dinput.to(saved.hidden.dtype), dweight


@functools.lru_cache(maxsize=256)
def local_loss(loss: LossOptions) -> LossOptions:
    """The loss for targets as `local_target` numbers them."""
    return loss._replace(ignore_index=IGNORE_INDEX)


def local_target(target: Tensor, ignore_index: int, start: int, columns: int) -> Tensor:
    """Targets counted from a shard's first class: ELSEWHERE outside its columns, IGNORE_INDEX if ignored."""
    here = target - start
    here = torch.where((target >= start) & (target < start + columns), here, ELSEWHERE)
    return torch.where(is_ignored(target, ignore_index), IGNORE_INDEX, here)
