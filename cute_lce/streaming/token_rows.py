"""token_stats.py's functions, which on a CPU get the rows that are not ignored alone."""

from __future__ import annotations

import torch
from torch import Tensor

from ..exchange import Merge, RowSums, Sum
from ..implementation import (
    AllGradients,
    Request,
    RowLoss,
    Stats,
    StatsOperands,
    StatsOptions,
    StatsSaved,
    StatsUpstream,
)
from . import memory, token_stats
from .products import without_autocast
from .rows import classify, first_rows, of_all_rows, valid_rows


def forward(
    operands: StatsOperands, options: StatsOptions, request: Request, merge: Merge | None = None
) -> Stats:
    rows = valid_rows(operands.target, options.ignore_index)
    if rows is None:
        return token_stats.forward(operands, options, request, merge)
    n = operands.hidden.shape[0]
    kept = None
    if request.kept_columns:
        kept = token_stats.empty_kept(operands, options, request.kept_columns)["kept"]
    if merge is None:
        # An error counts all rows.
        classify(operands.target, options.ignore_index, operands.weight.shape[0])

    def of_some(own: RowSums) -> RowSums:
        # The ranks' sums are of all rows.
        assert merge is not None
        others = {"row_sum": 1, "target_logit": torch.nan}
        every = {
            name: of_all_rows(each, rows, n, others.get(name, 0))
            for name, each in own._asdict().items()
            if name != "weight" and each is not None
        }
        merged = merge(own._replace(**every))
        return merged._replace(**{name: getattr(merged, name)[rows] for name in every})

    part, own = _some(operands, rows), None if kept is None else first_rows(kept, len(rows))
    request = memory.request_of_rows(request, operands.hidden, rows)
    found = token_stats.forward(part, options, request, None if merge is None else of_some, own)
    numbers = {
        name: of_all_rows(each, rows, n)
        for name, each in found._replace(kept=None)._asdict().items()
        if each is not None
    }
    return Stats(**numbers)._replace(kept=kept)


def backward(
    upstream: StatsUpstream,
    operands: StatsOperands,
    saved: StatsSaved,
    options: StatsOptions,
    request: Request,
    out: Tensor | None = None,
    add_up: Sum | None = None,
) -> AllGradients:
    dtype = operands.hidden.dtype
    rounded = dtype if add_up is None else None
    dinput, dweight, dbias = _gradients(upstream, operands, saved, options, request, out, rounded)
    if dinput is not None and add_up is not None:
        dinput = add_up(dinput)()
    return dinput, dweight, None if dbias is None else dbias.to(dtype)


@without_autocast
def _gradients(
    upstream: StatsUpstream,
    operands: StatsOperands,
    saved: StatsSaved,
    options: StatsOptions,
    request: Request,
    out: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> AllGradients:
    """token_stats.gradients; dtype: what dinput is rounded to, None: it is in acc."""
    n, rows = operands.hidden.shape[0], valid_rows(operands.target, options.ignore_index)
    if rows is not None:
        request = memory.request_of_rows(request, operands.hidden, rows)
        operands = _some(operands, rows)
        upstream = StatsUpstream(*(None if each is None else each[rows] for each in upstream))
        kept = None if saved.kept is None else saved.kept[: len(rows)]
        # What there is none of may be empty.
        by_row = {
            name: each[rows]
            for name, each in saved._asdict().items()
            if name != "kept" and each is not None and each.shape[:1] == (n,)
        }
        saved = saved._replace(**by_row, kept=kept)
    dinput, dweight, dbias = token_stats.gradients(upstream, operands, saved, options, request, out)
    return None if dinput is None else of_all_rows(dinput, rows, n, dtype=dtype), dweight, dbias


@without_autocast
def grad_in_forward(
    operands: StatsOperands, options: StatsOptions, row_loss: RowLoss, request: Request
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    n, rows = operands.hidden.shape[0], valid_rows(operands.target, options.ignore_index)
    if rows is not None:
        classify(operands.target, options.ignore_index, operands.weight.shape[0])
        operands = _some(operands, rows)
        factors = row_loss.target_weight, row_loss.token_weight
        row_loss = RowLoss(row_loss.terms, *(None if each is None else each[rows] for each in factors))
    found = token_stats.grad_in_forward(operands, options, row_loss, request)
    losses, dinput = (None if each is None else of_all_rows(each, rows, n) for each in found[:2])
    assert losses is not None
    return losses, dinput, *found[2:]


def _some(operands: StatsOperands, rows: Tensor) -> StatsOperands:
    temperature, topk_ids = operands.temperature, operands.topk_ids
    return operands._replace(
        hidden=operands.hidden[rows],
        target=operands.target[rows],
        temperature=None if temperature is None else temperature[rows],
        topk_ids=None if topk_ids is None else topk_ids[rows],
    )
