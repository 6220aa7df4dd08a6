"""The loss of each row, or their sum, from a row's numbers: one node of autograd in a plain eager call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..implementation import RowLoss, Stats
from .autograd import apply_of
from .plain import is_plain_eager


def row_losses(
    row_loss: RowLoss, stats: Stats, classes: int | Tensor, *, total: bool, nll: Tensor | None = None
) -> Tensor:
    """row_loss.losses (n,), or with `total` their sum (). nll (n,): instead of -stats.logprob."""
    first = stats.logprob if nll is None else nll
    assert first is not None
    # A Function may not return what it was given: autograd takes that for a view.
    is_nll = nll is not None and row_loss.target_weight is None and row_loss.token_weight is None
    if is_nll or not (first.requires_grad and is_plain_eager(first, first, first)):
        losses = row_loss.losses(-first if nll is None else nll, stats, classes)
        return losses.sum() if total else losses
    how = row_loss.terms, classes, nll is None, total
    return apply_of(_RowLosses)(how, first, stats.lse, stats.total_nll, *row_loss[1:])


class _RowLosses(torch.autograd.Function):
    """how: the terms, the number of classes, whether the first tensor is logprob instead of nll, and whether
    the losses are added up."""

    @staticmethod
    def forward(ctx: Any, how: tuple, first: Tensor, *others: Tensor | None) -> Tensor:
        (terms, classes, is_logprob, total), (lse, total_nll, *factors) = how, others
        ctx.how, ctx.rows = how, first.shape
        ctx.save_for_backward(lse, *factors)
        stats = Stats(lse=lse, total_nll=total_nll)
        losses = RowLoss(terms, *factors).losses(-first if is_logprob else first, stats, classes)
        return losses.sum() if total else losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        terms, classes, is_logprob, _ = ctx.how
        lse, *factors = ctx.saved_tensors
        dnll, *others = RowLoss(terms, *factors).upstream_of_nll(dlosses, lse, classes)
        found = (-dnll if is_logprob else dnll, *others)
        return None, *(None if each is None else each.expand(ctx.rows) for each in found), None, None
