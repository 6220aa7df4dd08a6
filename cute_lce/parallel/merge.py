"""The merge of row statistics over shards of the vocabulary: the paper's rule, in rank order.

Every rank gathers the same numbers and folds them in the same order, so that all get the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from .. import maths
from .collectives import gather


def merge(
    row_max: Tensor, row_sum: Tensor, target_logit: Tensor, columns: int, equal: bool, group: ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """(row_max, row_sum, target_logit) of the whole vocabulary, from a shard's, (n,) each in acc.

    One all-gather of 3 n + 1 numbers. columns: of this shard. equal: whether its first class was derived
    from its rank, which is right if all shards have as many classes: every target is nan if they do not.
    Ranks' shards of -inf (row_sum 0) change nothing. A target logit becomes nan unless exactly one shard has
    one.
    """
    header = row_max.new_full((1,), columns if equal else 0)
    gathered = gather(torch.cat((header, row_max, row_sum, target_logit)), group)
    n, counts = row_max.shape[0], gathered[:, 0]
    highest, total, logit = fold(*gathered[:, 1:].unflatten(1, (3, n)).unbind(1))
    uneven = (counts != counts[0]).any()
    return highest, total, logit.masked_fill(uneven, torch.nan)


def fold(row_max: Tensor, row_sum: Tensor, target_logit: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics (ranks, n) of disjoint sets of columns as those of their union, (n,)."""
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
