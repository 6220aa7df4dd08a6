"""The loss of each row, or their sum, from a row's numbers: one node of autograd in a plain eager call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..implementation import RowLoss, Stats, StatsUpstream
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
    if is_nll or not (first.requires_grad and is_plain_eager(first)):
        row_loss = row_loss.with_tensors(first.device)
        losses = row_loss.losses(-first if nll is None else nll, stats, classes)
        return losses.sum() if total else losses
    how = row_loss.terms, classes, nll is None, total
    return apply_of(_RowLosses)(how, *row_loss[1:], first, *(getattr(stats, name) for name in _OTHERS))


_OTHERS = StatsUpstream._fields[1:]
"""The differentiable numbers besides logprob."""


class _RowLosses(torch.autograd.Function):
    """how: the terms, the number of classes, whether `first` is logprob instead of nll, and whether the
    losses are added up. others: _OTHERS of stats."""

    @staticmethod
    def forward(
        ctx: Any,
        how: tuple,
        target_weight: Tensor | None,
        token_weight: Tensor | None,
        first: Tensor,
        *others: Tensor | None,
    ) -> Tensor:
        terms, classes, is_logprob, total = how
        ctx.how, ctx.rows = how, first.shape
        ctx.save_for_backward(target_weight, token_weight, *others)
        stats, row_loss = _stats(others), RowLoss(terms, target_weight, token_weight)
        losses = row_loss.losses(-first if is_logprob else first, stats, classes)
        return losses.sum() if total else losses

    @staticmethod
    def backward(ctx: Any, dlosses: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        terms, classes, is_logprob, _ = ctx.how
        target_weight, token_weight, *others = ctx.saved_tensors
        row_loss = RowLoss(terms, target_weight, token_weight)
        upstream = row_loss.upstream(dlosses, _stats(others), classes)
        if not is_logprob and upstream.logprob is not None:
            upstream = upstream._replace(logprob=-upstream.logprob)
        found = (None if each is None else each.expand(ctx.rows) for each in upstream)
        return None, None, None, *found


def _stats(others: Sequence[Tensor | None]) -> Stats:
    return Stats(**dict(zip(_OTHERS, others, strict=True)))
