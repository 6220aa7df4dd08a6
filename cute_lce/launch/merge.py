"""Calls over several ranks: a shard's targets, and the merge of the ranks' statistics, a kernel each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..arguments import MERGE_ROWS, RankStatistics, ShardTargets
from ..compile import cache
from ..compile.frozen import freeze
from ..implementation import LocalTargets, Merged
from ..options import LossOptions
from ..plan.kernels import MergeKey
from ..plan.problem import ceil_div
from ..streaming import STREAMING
from .device import dtype_name, gpu_of, loss_arguments


@functools.lru_cache(maxsize=64)
def _function(device: torch.device, target_dtype: torch.dtype) -> Callable[..., None]:
    return cache.get(MergeKey(gpu_of(device).arch, dtype_name(target_dtype)))


@functools.cache
def _absent(group: type[ShardTargets] | type[RankStatistics]) -> Any:
    return freeze(group(*[0] * len(group._fields)))


def localize(target: Tensor, ignore_index: int, start: int, columns: int, equal: bool) -> LocalTargets:
    """See implementation.Implementation."""
    if target.shape[0] == 0:
        return STREAMING.localize(target, ignore_index, start, columns, equal)
    target = target.contiguous()
    local = torch.empty_like(target)
    # The header, and Merge's counter.
    scratch = torch.empty((2,), dtype=torch.float32, device=target.device)
    targets = ShardTargets(
        local=local.data_ptr(),
        header=scratch.data_ptr(),
        arrived=scratch.data_ptr() + 4,
        start=start,
        columns=columns,
        count=columns if equal else 0,
    )
    loss = loss_arguments(LossOptions("none", ignore_index))
    _function(target.device, target.dtype)(target, loss, targets, _absent(RankStatistics))
    return LocalTargets(local, scratch[:1], scratch)


def merge(gathered: Tensor, targets: LocalTargets, loss: LossOptions) -> Merged:
    """See implementation.Implementation."""
    n = targets.local.shape[0]
    if n == 0:
        return STREAMING.merge(gathered, targets, loss)
    device = gathered.device

    def rows(count: int) -> Tensor:
        return torch.empty((count,), dtype=torch.float32, device=device)

    row_max, row_sum, blocks = rows(n), rows(n), rows(2 * ceil_div(n, MERGE_ROWS))
    total = rows(n) if loss.reduction == "none" else torch.empty((), dtype=torch.float32, device=device)
    num_valid = torch.empty((), dtype=torch.int64, device=device)
    assert targets.scratch is not None
    ranks = RankStatistics(
        gathered=gathered.data_ptr(),
        ranks=gathered.shape[0],
        row_max=row_max.data_ptr(),
        row_sum=row_sum.data_ptr(),
        loss=total.data_ptr(),
        num_valid=num_valid.data_ptr(),
        blocks=blocks.data_ptr(),
        arrived=targets.scratch.data_ptr() + 4,
    )
    function = _function(device, targets.local.dtype)
    # Its other numbers are in the statistics.
    arguments = loss_arguments(LossOptions(loss.reduction, loss.ignore_index))
    function(targets.local, arguments, _absent(ShardTargets), ranks)
    return Merged(total, row_max, row_sum, num_valid)
