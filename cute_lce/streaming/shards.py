"""Shards of the vocabulary: targets counted from a shard's first class, and the merge of their statistics,
the paper's rule in the shards' order, so that all who fold the same numbers have the same bits."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import maths
from ..arguments import ELSEWHERE, IGNORED
from ..exchange import LocalTargets, Merged, RowSums
from ..options import LossOptions
from .rows import is_ignored, is_valid, reduce


def localize(target: Tensor, ignore_index: int, start: int, columns: int, equal: bool) -> LocalTargets:
    """See implementation.Implementation."""
    inside = (target >= start) & (target < start + columns)
    local = torch.where(inside, target - start, ELSEWHERE)
    local = torch.where(is_ignored(target, ignore_index), IGNORED, local)
    header = torch.full((1,), columns if equal else 0, dtype=torch.float32, device=target.device)
    return LocalTargets(local, header)


def merge(gathered: Tensor, targets: LocalTargets, loss: LossOptions) -> Merged:
    """See implementation.Implementation."""
    row_max, row_sum, target_logit = fold(*_statistics(gathered, targets))
    valid = is_valid(targets.local, loss.ignore_index)
    nowhere = valid & _is_nowhere(target_logit, gathered)
    total, row_sum, num_valid = reduce(row_max, row_sum, target_logit, valid, nowhere, loss.reduction)
    return Merged(total, row_max, row_sum, num_valid)


def merge_sums(gathered: Tensor, targets: LocalTargets, *, entropy: bool, total: bool) -> RowSums:
    """See implementation.Implementation."""
    n = targets.local.shape[0]
    row_maxima, row_sums, target_logits = _statistics(gathered, targets)
    row_max, row_sum, target_logit = fold(row_maxima, row_sums, target_logits)
    nowhere = is_valid(targets.local, IGNORED) & _is_nowhere(target_logit, gathered)
    row_sum = row_sum.masked_fill(nowhere, torch.nan)
    reference, more = _finite(row_max), gathered[:, 3 * n + 1 :]
    mean_gap = total_gap = None
    if entropy:
        weights = maths.rescaled(row_sums, row_maxima, reference, torch.exp)
        gaps = more[:, :n] + (reference - row_maxima)
        # A shard without any probability may have any gap.
        mean_gap = folded(torch.where(weights > 0, weights * gaps, 0)) / row_sum
        more = more[:, n:]
    if total:
        rises = reference - _finite(row_maxima)
        total_gap = folded(more[:, :n] + rises * more[:, n : n + 1])
    return RowSums(row_max, row_sum, target_logit, mean_gap, total_gap)


def _statistics(gathered: Tensor, targets: LocalTargets) -> tuple[Tensor, Tensor, Tensor]:
    """row_max, row_sum and target logits (shards, n)."""
    n = targets.local.shape[0]
    row_max, row_sum, target_logit = gathered[:, 1 : 3 * n + 1].unflatten(1, (3, n)).unbind(1)
    return row_max, row_sum, target_logit


def _is_nowhere(target_logit: Tensor, gathered: Tensor) -> Tensor:
    counts = gathered[:, 0]
    return target_logit.isnan() | (counts != counts[0]).any()


def _finite(row_max: Tensor) -> Tensor:
    """What elements are relative to. The difference of two infinities is not formed."""
    return row_max.masked_fill(row_max == -torch.inf, 0)


def folded(terms: Tensor) -> Tensor:
    """The sum over shards, in their order."""
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def fold(row_max: Tensor, row_sum: Tensor, target_logit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics (shards, n) of disjoint sets of columns as those of their union, (n,). A target logit
    becomes nan unless exactly one shard has one."""
    highest = row_max.amax(0)
    total = folded(maths.rescaled(row_sum, row_max, _finite(highest), torch.exp))
    logit = target_logit[0]
    for other in target_logit[1:]:
        logit = torch.where(logit.isnan(), other, logit)
    owners = (~target_logit.isnan()).sum(0)
    return highest, total, logit.masked_fill(owners != 1, torch.nan)
