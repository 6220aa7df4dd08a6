"""Shards of the vocabulary: targets counted from a shard's first class, and the merge of their statistics,
the paper's rule in the shards' order, so that all who fold the same numbers have the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import maths
from ..arguments import ELSEWHERE, IGNORED
from ..implementation import LocalTargets, Merged
from ..options import LossOptions
from .rows import is_ignored, reduce
from .token_stats import RowSums


def localize(target: Tensor, ignore_index: int, start: int, columns: int, equal: bool) -> LocalTargets:
    """See implementation.Implementation."""
    inside = (target >= start) & (target < start + columns)
    local = torch.where(inside, target - start, ELSEWHERE)
    local = torch.where(is_ignored(target, ignore_index), IGNORED, local)
    header = torch.full((1,), columns if equal else 0, dtype=torch.float32, device=target.device)
    return LocalTargets(local, header)


def merge(gathered: Tensor, targets: LocalTargets, loss: LossOptions) -> Merged:
    """See implementation.Implementation."""
    n, counts = targets.local.shape[0], gathered[:, 0]
    row_max, row_sum, target_logit = fold(*gathered[:, 1:].unflatten(1, (3, n)).unbind(1))
    valid = ~is_ignored(targets.local, loss.ignore_index)
    nowhere = valid & (target_logit.isnan() | (counts != counts[0]).any())
    total, row_sum, num_valid = reduce(row_max, row_sum, target_logit, valid, nowhere, loss.reduction)
    return Merged(total, row_max, row_sum, num_valid)


def fold(row_max: Tensor, row_sum: Tensor, target_logit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics (shards, n) of disjoint sets of columns as those of their union, (n,). A target logit
    becomes nan unless exactly one shard has one."""
    highest = row_max.amax(0)
    # The difference of two infinities is not formed.
    reference = highest.masked_fill(highest == -torch.inf, 0)
    terms = maths.rescaled(row_sum, row_max, reference, torch.exp)
    total, logit = terms[0], target_logit[0]
    for term, other in zip(terms[1:], target_logit[1:], strict=True):
        total = total + term
        logit = torch.where(logit.isnan(), other, logit)
    owners = (~target_logit.isnan()).sum(0)
    return highest, total, logit.masked_fill(owners != 1, torch.nan)


def fold_sums(gathered: Tensor) -> RowSums:
    """The same of RowSums, (shards, 4, n)."""
    row_max, row_sum, target_logit, gap_sum = gathered.unbind(1)
    highest, total, logit = fold(row_max, row_sum, target_logit)
    reference = highest.masked_fill(highest == -torch.inf, 0)
    # Of a gap in a shard relative to the maximum of all.
    gaps = maths.rescaled(gap_sum + (reference - row_max) * row_sum, row_max, reference, torch.exp)
    gap_total = gaps[0]
    for gap in gaps[1:]:
        gap_total = gap_total + gap
    return RowSums(highest, total, logit, gap_total)
