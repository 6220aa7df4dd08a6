"""What is exchanged between the shards of a vocabulary in the course of a pass.

Shapes as in implementation.py: acc is float32, or float64 for float64; n tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor


class LocalTargets(NamedTuple):
    """Targets counted from a shard's first class: local (n,), arguments.ELSEWHERE outside its columns and
    IGNORED for ignore_index. header (1,) fp32: begins the shard's statistics. scratch: for a merge."""

    local: Tensor
    header: Tensor
    scratch: Tensor | None = None


class Merged(NamedTuple):
    """Of the whole vocabulary, as in Results. Where no shard has the target, or several have, or the headers
    differ, a row's loss and row_sum are nan."""

    loss: Tensor
    row_max: Tensor
    row_sum: Tensor
    num_valid: Tensor


class RowSums(NamedTuple):
    """What numbers of a row are made of, acc (n,) but for those named: sums over a set of columns.

    row_max, row_sum: as in Results. target_logit: nan where the target is not among the columns. mean_gap:
    sum p (row_max - z) with p the softmax over these columns, of use where row_sum is not 0. total_gap: sum
    of class_weight (row_max - z), with 0 for a row_max of -inf; weight (): sum of class_weight, or the number
    of columns: both or neither. square_sum: as row_sum, of squares of exponentials. mean_logit: of z. argmax
    int64: the first column with the largest z; is_top1 bool: whether it is the target. topk_logit (n, K): z
    of given ids, of use where topk_known bool (n, K): whether an id is among the columns. None for what is
    not asked for.
    """

    row_max: Tensor
    row_sum: Tensor
    target_logit: Tensor
    mean_gap: Tensor | None = None
    total_gap: Tensor | None = None
    weight: Tensor | None = None
    square_sum: Tensor | None = None
    mean_logit: Tensor | None = None
    argmax: Tensor | None = None
    is_top1: Tensor | None = None
    topk_logit: Tensor | None = None
    topk_known: Tensor | None = None


Merge = Callable[[RowSums], RowSums]
"""Of a shard's sums those of the whole vocabulary: a collective. row_sum and mean_gap are then nan where
Merged's row_sum is."""
Sum = Callable[[Tensor], Callable[[], Tensor]]
"""Begins the sum of a shard's dinput, in acc, over the shards, and gives what waits for it: then the current
stream may read what that returns. The argument holds nothing of use afterwards."""
