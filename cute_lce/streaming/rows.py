"""Operations on rows of logits: targets, losses, factors."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import maths
from ..options import LossOptions

MOST_COPIED = 8 << 20
"""Bytes that are converted to another dtype at once."""


def is_ignored(target: Tensor, ignore_index: int) -> Tensor:
    """Whether each target is ignore_index, in int64: int32 would wrap an ignore_index beyond its range."""
    return target.long() == ignore_index


def is_valid(target: Tensor, ignore_index: int) -> Tensor:
    """Whether it is not ignored: as ~is_ignored, with one launch less."""
    return target.long() != ignore_index


def computes_some_rows(device_type: str) -> bool:
    """Whether the rows that are not ignored are computed alone: on a CPU. On a GPU a shape would depend on
    what is there only, and the host would wait for it."""
    return device_type == "cpu"


def valid_rows(target: Tensor, ignore_index: int) -> Tensor | None:
    """The rows (valid,) that are not ignored, if they are computed alone; None: all rows are computed."""
    if not computes_some_rows(target.device.type):
        return None
    ignored = is_ignored(target, ignore_index)
    return (~ignored).nonzero().squeeze(1) if ignored.any() else None


def without_ignored(values: Tensor, ignored: Tensor) -> Tensor:
    """values (n, k) with a valid row in the place of each row of ignored (n, 1), in a copy; zeros if all are.

    A nan in an ignored row would make dweight nan, even if its dlogits are 0. Zeros would, where a weight is
    infinite, as they do if no row is valid. On a CPU, where only valid rows are computed, values itself.
    """
    if computes_some_rows(values.device.type) or not len(values):
        return values
    first = ignored.to(torch.uint8).argmin(0)
    valid_row = values.index_select(0, first).masked_fill(ignored.all(), 0)
    return torch.where(ignored, valid_row, values)


def of_all_rows(
    values: Tensor, rows: Tensor | None, n: int, other: float = 0, dtype: torch.dtype | None = None
) -> Tensor:
    """values (valid, ...) of some of n rows as (n, ...), `other` elsewhere; None: they are of all rows.
    dtype: what they are rounded to; None: their own."""
    dtype = dtype or values.dtype
    if rows is None:
        return values.to(dtype)
    out = values.new_full((n, *values.shape[1:]), other, dtype=dtype)
    step = len(rows) if values.dtype is dtype else max(MOST_COPIED // max(values[:1].nbytes, 1), 1)
    for low in range(0, len(rows), max(step, 1)):
        part = slice(low, low + step)
        out.index_copy_(0, rows[part], values[part].to(dtype))
    return out


def first_rows(kept: Tensor, valid: int) -> Tensor:
    """The first rows of what is kept, which has memory for all: those of the valid rows. Others become 0."""
    kept[valid:] = 0
    return kept[:valid]


def classify(target: Tensor, ignore_index: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """(valid, a class in [0, V) for each row, target out of range); on a CPU the last raises ValueError."""
    valid = is_valid(target, ignore_index)
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
    """Whether each row's class is in the window, and its column there as (n, 1), any if it is not."""
    shifted = classes - low
    column = shifted.clamp(0, high - low - 1)
    return column == shifted, column.unsqueeze(1)


def subtract_target(exponentials: Tensor, classes: Tensor, row_sum: Tensor, low: int, high: int) -> None:
    """exp(z - row_max) - row_sum * onehot, in place: row_sum times the softmax minus the onehot."""
    inside, column = in_window(classes, low, high)
    exponentials.scatter_add_(1, column, torch.where(inside, -row_sum, 0).unsqueeze(1))


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
