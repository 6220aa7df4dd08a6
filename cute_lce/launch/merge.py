"""Calls over several ranks: a shard's targets, and the merge of the ranks' statistics, a kernel each."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..arguments import IGNORED, MERGE_ROWS, RankStatistics, ShardTargets
from ..compile import cache
from ..compile.frozen import freeze
from ..exchange import LocalTargets, Merged, RowSums
from ..options import LossOptions
from ..plan.kernels import MergeKey
from ..plan.problem import ceil_div
from ..streaming import STREAMING
from .device import dtype_name, gpu_of, loss_arguments, template


@functools.lru_cache(maxsize=256)
def _prepared(
    device: torch.device, target_dtype: torch.dtype, reduction: str, ignore_index: int
) -> tuple[Callable[..., None], Any, Any, Any]:
    """What every launch takes: the function, the loss, and what stands for absent ShardTargets and
    RankStatistics."""
    function = cache.get(MergeKey(gpu_of(device).arch, dtype_name(target_dtype)))
    # The loss's other numbers are in the statistics.
    loss = loss_arguments(LossOptions(reduction, ignore_index))
    return function, loss, _absent(ShardTargets), _absent(RankStatistics)


def _absent(group: type[ShardTargets] | type[RankStatistics]) -> Any:
    return freeze(group(*[0] * len(group._fields)))


def localize(target: Tensor, ignore_index: int, start: int, columns: int, equal: bool) -> LocalTargets:
    """See implementation.Implementation."""
    if target.shape[0] == 0:
        return STREAMING.localize(target, ignore_index, start, columns, equal)
    target = target.resolve_neg().contiguous()
    local = torch.empty_like(target)
    # The header, Merge's counter and its blocks.
    size = 2 + 2 * ceil_div(target.shape[0], MERGE_ROWS)
    scratch = torch.empty((size,), dtype=torch.float32, device=target.device)
    address = scratch.data_ptr()
    targets = ShardTargets(
        local=local.data_ptr(),
        header=address,
        arrived=address + 4,
        start=start,
        columns=columns,
        count=columns if equal else 0,
    )
    function, loss, _, no_ranks = _prepared(target.device, target.dtype, "none", ignore_index)
    function(target, loss, targets, no_ranks)
    return LocalTargets(local, scratch[:1], scratch)


def merge(gathered: Tensor, targets: LocalTargets, loss: LossOptions) -> Merged:
    """See implementation.Implementation."""
    if targets.local.shape[0] == 0:
        return STREAMING.merge(gathered, targets, loss)
    return _merge(gathered, targets, loss)


def merge_sums(gathered: Tensor, targets: LocalTargets, *, entropy: bool, total: bool) -> RowSums:
    """See implementation.Implementation."""
    n = targets.local.shape[0]
    if n == 0:
        return STREAMING.merge_sums(gathered, targets, entropy=entropy, total=total)
    row = template(gathered.device, torch.float32, n)
    wanted = {"target_logit": True, "mean_gap": entropy, "total_gap": total}
    more = {name: torch.empty_like(row) for name, is_wanted in wanted.items() if is_wanted}
    merged = _merge(gathered, targets, _OF_ROWS, **{name: each.data_ptr() for name, each in more.items()})
    return RowSums(merged.row_max, merged.row_sum, **more)


_OF_ROWS = LossOptions("none", IGNORED)


def _merge(gathered: Tensor, targets: LocalTargets, loss: LossOptions, **more: int) -> Merged:
    """more: addresses of RankStatistics."""
    n, device = targets.local.shape[0], gathered.device
    row = template(device, torch.float32, n)
    row_max, row_sum = torch.empty_like(row), torch.empty_like(row)
    total = torch.empty_like(row if loss.reduction == "none" else template(device, torch.float32))
    num_valid = torch.empty_like(template(device, torch.int64))
    assert targets.scratch is not None
    scratch = targets.scratch.data_ptr()
    ranks = RankStatistics(
        gathered=gathered.data_ptr(),
        ranks=gathered.shape[0],
        pitch=gathered.shape[1],
        row_max=row_max.data_ptr(),
        row_sum=row_sum.data_ptr(),
        loss=total.data_ptr(),
        num_valid=num_valid.data_ptr(),
        blocks=scratch + 8,
        arrived=scratch + 4,
        **more,
    )
    function, arguments, no_targets, _ = _prepared(
        device, targets.local.dtype, loss.reduction, loss.ignore_index
    )
    function(targets.local, arguments, no_targets, ranks)
    return Merged(total, row_max, row_sum, num_valid)
