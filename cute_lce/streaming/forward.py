"""The paper's Algorithm 1, with windows instead of single columns."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import maths
from ..arguments import Operands
from ..implementation import Request, Results
from ..options import LossOptions
from .memory import request_of_rows, windows
from .products import LogitsBuffer, Products, accumulate_dtype, mm, without_autocast
from .rows import (
    classify,
    first_rows,
    in_window,
    is_valid,
    of_all_rows,
    reduce,
    valid_rows,
    without_ignored,
)


def empty_kept(hidden: Tensor, kept_columns: int) -> tuple[Tensor, Tensor]:
    """Uninitialised (kept, kept_scale): logits (n, kept_columns) in acc; the scale is unused."""
    acc = accumulate_dtype(hidden.dtype)
    return hidden.new_empty((hidden.shape[0], kept_columns), dtype=acc), hidden.new_empty((0,), dtype=acc)


class StreamingForward:
    """See implementation.Forward. Keeps logits, in the accumulation dtype."""

    def __init__(self, operands: Operands, loss: LossOptions, request: Request):
        # A window costs the backward more memory. If something is kept, a workspace that holds one sweep must
        # hold the other too, so both have the backward's windows.
        keeps = request.kept_columns > 0
        self._request = request._replace(need_dinput=keeps, need_dweight=keeps)

    def statistics(self, operands: Operands, loss: LossOptions) -> Results:
        return _sweep(operands, loss, self._request)

    def finish(self, operands: Operands, loss: LossOptions, results: Results) -> Results:
        return results


@without_autocast
def _sweep(operands: Operands, loss: LossOptions, request: Request) -> Results:
    hidden, weight, target = operands
    n, V = hidden.shape[0], weight.shape[0]
    checked = None if request.shard else classify(target, loss.ignore_index, V)
    classes = target.long() if checked is None else checked[1]
    kept_columns = request.kept_columns
    kept, kept_scale = empty_kept(hidden, kept_columns) if kept_columns else (None, None)
    rows = valid_rows(target, loss.ignore_index)
    if rows is None:
        read = operands
        if kept is not None:
            # A backward reads what is kept of every row.
            ignored = ~is_valid(target, loss.ignore_index).unsqueeze(1)
            read = operands._replace(hidden=without_ignored(hidden, ignored))
        found = _columns(read, classes, loss, request, kept)
    else:
        part = Operands(hidden[rows], weight, target[rows])
        own = None if kept is None else first_rows(kept, len(rows))
        found = _columns(part, classes[rows], loss, request_of_rows(request, hidden, rows), own)
    others = 0, 1, torch.nan if request.shard else 0
    row_max, row_sum, target_logit = (
        of_all_rows(each, rows, n, other) for each, other in zip(found, others, strict=True)
    )
    if checked is None:
        return Results(target_logit, row_max, row_sum, None, kept, kept_scale)
    valid, _, out_of_range = checked
    total, row_sum, num_valid = reduce(row_max, row_sum, target_logit, valid, out_of_range, loss.reduction)
    return Results(total, row_max, row_sum, num_valid, kept, kept_scale)


def _columns(
    operands: Operands, classes: Tensor, loss: LossOptions, request: Request, kept: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """row_max, row_sum and target_logit of some rows, whose logits are written to kept (rows, columns)."""
    n, kept_columns = operands.hidden.shape[0], request.kept_columns
    products = Products(operands.hidden, operands.weight)
    ranges = windows(operands, request)
    buffer = LogitsBuffer(n, ranges, operands.hidden, products.acc)
    # Not -inf, with which a window of -inf would become nan.
    row_max = operands.hidden.new_full((n,), torch.finfo(products.acc).min, dtype=products.acc)
    row_sum = torch.zeros_like(row_max)
    target_logit = torch.full_like(row_max, torch.nan if request.shard else 0)
    for low, high in ranges:
        exponentials = buffer.window(high - low)
        logits = exponentials if kept is None or low >= kept_columns else kept[:, low:high]
        maths.logits(mm(products.hidden, products.weight(low, high).mT, logits), loss)
        inside, column = in_window(classes, low, high)
        target_logit = torch.where(inside, logits.gather(1, column).squeeze(1), target_logit)
        new_max = torch.maximum(row_max, logits.amax(1))
        subtract = functools.partial(torch.sub, out=exponentials)
        maths.exponential(logits, new_max.unsqueeze(1), torch.exp_, subtract)
        row_sum = maths.rescaled(row_sum, row_max, new_max, torch.exp_) + exponentials.sum(1)
        row_max = new_max
    return row_max, row_sum, target_logit
