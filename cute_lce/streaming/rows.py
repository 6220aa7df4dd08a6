"""Operations on rows of logits: targets, losses, factors."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import maths
from ..options import LossOptions


def is_ignored(target: Tensor, ignore_index: int) -> Tensor:
    """Whether each target is ignore_index, in int64: int32 would wrap an ignore_index beyond its range."""
    return target.long() == ignore_index


def classify(target: Tensor, ignore_index: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """(valid, a class in [0, V) for each row, target out of range); on a CPU the last raises ValueError."""
    valid = ~is_ignored(target, ignore_index)
    out_of_range = valid & ((target < 0) | (target >= V))
    if target.device.type == "cpu":
        _refuse_targets(target, out_of_range, ignore_index, V)
    return valid, target.long().clamp(0, V - 1), out_of_range


def _refuse_targets(target: Tensor, out_of_range: Tensor, ignore_index: int, V: int) -> None:
    if out_of_range.any():
        row = int(out_of_range.nonzero()[0])
        raise ValueError(
            f"target: got {int(target[row])} at token {row}, want a class in [0, {V}) "
            f"or ignore_index={ignore_index}"
        )


def in_window(classes: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Whether each row's class is in the window, and its column there as (n, 1), 0 if it is not."""
    inside = (classes >= low) & (classes < high)
    return inside, torch.where(inside, classes - low, 0).unsqueeze(1)


def subtract_target(exponentials: Tensor, classes: Tensor, row_sum: Tensor, low: int, high: int) -> None:
    """exp(z - row_max) - row_sum * onehot, in place: row_sum times the softmax minus the onehot."""
    inside, column = in_window(classes, low, high)
    onehot = torch.where(inside, row_sum, 0).unsqueeze(1)
    exponentials.scatter_(1, column, maths.dlogits(exponentials.gather(1, column), onehot))


def reduce(row_max, row_sum, target_logit, valid, out_of_range, reduction):
    """(loss, row_sum, num_valid); row_sum becomes nan where the target is out of range."""
    row_sum = row_sum.masked_fill(out_of_range, torch.nan)
    loss = torch.where(valid, maths.row_loss(row_sum.log(), row_max, target_logit), 0)
    num_valid = valid.sum()
    if reduction != "none":
        loss = loss.sum()
        if reduction == "mean":
            loss = loss / num_valid.clamp(min=1)
    return loss, row_sum, num_valid


def of_rows(dloss: Tensor, num_valid: Tensor, loss: LossOptions) -> Tensor:
    """The gradient of the result by rows' losses: () or, for "none", (n,)."""
    if loss.reduction == "mean":
        return maths.mean_upstream(dloss, num_valid.clamp(min=1))
    return dloss


def grad_scale(dloss: Tensor, num_valid: Tensor, loss: LossOptions) -> Tensor:
    """The same by a row's products, but for the softmax."""
    return maths.product_gradient(of_rows(dloss, num_valid, loss), loss)
