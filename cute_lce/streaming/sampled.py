"""Cross entropy over each row's target and a sample of the classes, which all rows share.

Column by column of the sample, in windows; a row's own class is left out of it where it was sampled too. The
numbers of a row are those of all its columns, the target's last: nothing is subtracted from a sum. Gradients
by weight are added class by class in the order of the sample, then of the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import maths
from .memory import CPU_LOGITS_BYTES, GPU_LOGITS_BYTES
from .products import Products, add_mm, mm, multiplies_narrow, without_autocast
from .rows import classify, of_all_rows, valid_rows

_WINDOW_MULTIPLE = 64


class SampledOperands(NamedTuple):
    """hidden (n, d), weight (V, d), linear_bias (V,): one dtype. target (n,), sampled_ids (m,): int64 or
    int32. sampled_log_q (m,), target_log_q (n,): any floating dtype, or both None: zeros."""

    hidden: Tensor
    weight: Tensor
    target: Tensor
    sampled_ids: Tensor
    linear_bias: Tensor | None = None
    sampled_log_q: Tensor | None = None
    target_log_q: Tensor | None = None


class SampledOptions(NamedTuple):
    """window: columns of the sample at once; 0: chosen."""

    ignore_index: int
    logit_scale: float
    remove_accidental_hits: bool
    window: int


class SampledStats(NamedTuple):
    """What the backward needs, acc (n,): row_max of all columns, and relative to its exponential `others`,
    the sum over the sample, and row_sum, of the target too."""

    row_max: Tensor
    others: Tensor
    row_sum: Tensor


class _Sample:
    """The operands of both passes: valid rows, the sample's columns, the target's logits."""

    def __init__(self, operands: SampledOperands, options: SampledOptions):
        weight, V = operands.weight, operands.weight.shape[0]
        self.valid, self.classes, self.out_of_range = classify(operands.target, options.ignore_index, V)
        hidden = operands.hidden
        if hidden.device.type != "cpu":
            hidden = hidden.masked_fill(~self.valid.unsqueeze(1), 0)
        ids = operands.sampled_ids.long()
        known = (ids >= 0) & (ids < V)
        if ids.device.type == "cpu" and not known.all():
            raise ValueError(f"sampled_ids: got {int(ids[~known][0])}, want classes in [0, {V})")
        self.ids = ids.clamp(0, V - 1)
        columns = weight[self.ids]
        if hidden.dtype is torch.float16 and multiplies_narrow(hidden.device.type):
            # Its range is too small for upstream / n.
            hidden, columns = hidden.float(), columns.float()
        self.products = Products(hidden, columns)
        self.hidden, self.acc = self.products.hidden, self.products.acc
        self._weight, self._scale = weight, options.logit_scale
        self._removes = options.remove_accidental_hits
        self._shift = torch.where(
            known, self._shifts(operands.linear_bias, operands.sampled_log_q), torch.nan
        )
        n, m = hidden.shape[0], ids.shape[0]
        window = options.window
        on_cpu = hidden.device.type == "cpu"
        self._bytes = CPU_LOGITS_BYTES if on_cpu else GPU_LOGITS_BYTES
        if not window:
            window = self._bytes // max(2 * n * self.acc.itemsize, 1)
            window = max(window // _WINDOW_MULTIPLE, 1) * _WINDOW_MULTIPLE
        self.windows = [(low, min(low + window, m)) for low in range(0, m, window)]
        self._bias, self._target_log_q = operands.linear_bias, operands.target_log_q

    def _shifts(self, bias: Tensor | None, log_q: Tensor | None) -> Tensor:
        """What is added to the scaled products of the sample's columns."""
        shift = self.ids.new_zeros(self.ids.shape, dtype=self.acc)
        if bias is not None:
            shift = shift + bias[self.ids].to(self.acc) * self._scale
        return shift if log_q is None else shift - log_q.to(self.acc)

    def logits(self, low: int, high: int) -> Tensor:
        """z (n, high - low), -inf where the row's target was sampled."""
        z = self.hidden.new_empty((self.hidden.shape[0], high - low), dtype=self.acc)
        mm(self.hidden, self.products.weight(low, high).mT, z)
        z.mul_(self._scale).add_(self._shift[low:high])
        if self._removes:
            z.masked_fill_(self.classes.unsqueeze(1) == self.ids[low:high], -torch.inf)
        return z

    def slices(self, count: int, columns: int) -> list[slice]:
        """Of so many rows of acc, so few that copies of them are no larger than a window."""
        step = max(self._bytes // max(2 * columns * self.acc.itemsize, 1), 1)
        return [slice(low, low + step) for low in range(0, count, step)]

    def target_rows(self, rows: slice) -> Tensor:
        """Of weight, for some tokens, in acc."""
        return self._weight[self.classes[rows]].to(self.acc)

    def target_logits(self) -> Tensor:
        n, d = self.hidden.shape
        z = self.hidden.new_empty((n,), dtype=self.acc)
        for rows in self.slices(n, d):
            z[rows] = (self.hidden[rows].to(self.acc) * self.target_rows(rows)).sum(1)
        if self._bias is not None:
            z += self._bias[self.classes].to(self.acc)
        z *= self._scale
        if self._target_log_q is not None:
            z -= self._target_log_q.to(self.acc)
        return z.masked_fill_(~self.valid, 0)


def forward(operands: SampledOperands, options: SampledOptions) -> tuple[Tensor, SampledStats]:
    """Each row's loss, 0 where it is ignored, in acc."""
    n, rows = operands.target.shape[0], valid_rows(operands.target, options.ignore_index)
    if rows is not None:
        # An error counts all rows.
        classify(operands.target, options.ignore_index, operands.weight.shape[0])
        operands = _some(operands, rows)
    loss, stats = _forward(operands, options)
    return of_all_rows(loss, rows, n), SampledStats(*(of_all_rows(each, rows, n) for each in stats))


def _some(operands: SampledOperands, rows: Tensor) -> SampledOperands:
    log_q = None if operands.target_log_q is None else operands.target_log_q[rows]
    hidden, target = operands.hidden[rows], operands.target[rows]
    return operands._replace(hidden=hidden, target=target, target_log_q=log_q)


@without_autocast
def _forward(operands: SampledOperands, options: SampledOptions) -> tuple[Tensor, SampledStats]:
    sample = _Sample(operands, options)
    target_logit = sample.target_logits()
    # Not -inf, whose difference to itself is nan.
    row_max = target_logit.clamp(min=torch.finfo(sample.acc).min)
    others = torch.zeros_like(row_max)
    for low, high in sample.windows:
        z = sample.logits(low, high)
        before, row_max = row_max, torch.maximum(row_max, z.amax(1))
        others = maths.rescaled(others, before, row_max, torch.exp)
        others = others + maths.exponential(z, row_max.unsqueeze(1), torch.exp_, torch.Tensor.sub_).sum(1)
    own = (target_logit - row_max).exp().masked_fill(sample.out_of_range, torch.nan)
    # The logarithm of others + own, which is near 1 in confident rows.
    loss = maths.row_loss(torch.log1p(others + (own - 1)), row_max, target_logit)
    return torch.where(sample.valid, loss, 0), SampledStats(row_max, others, others + own)


@without_autocast
def backward(
    operands: SampledOperands,
    options: SampledOptions,
    stats: SampledStats,
    dloss: Tensor,
    needed: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """(dinput, dweight, dbias), each rounded once; None for one that is not needed."""
    n, rows = operands.target.shape[0], valid_rows(operands.target, options.ignore_index)
    if rows is not None:
        operands, dloss = _some(operands, rows), dloss[rows]
        stats = SampledStats(*(each[rows] for each in stats))
    dinput, dweight, dbias = _backward(operands, options, stats, dloss, needed)
    dtype = operands.hidden.dtype
    return None if dinput is None else of_all_rows(dinput, rows, n, dtype=dtype), dweight, dbias


def _backward(
    operands: SampledOperands,
    options: SampledOptions,
    stats: SampledStats,
    dloss: Tensor,
    needed: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """dinput in acc, the others rounded."""
    sample = _Sample(operands, options)
    need_dinput, need_dweight, need_dbias = needed
    hidden, acc, dtype = sample.hidden, sample.acc, operands.hidden.dtype
    (n, d), (V, m) = hidden.shape, (operands.weight.shape[0], sample.ids.shape[0])
    upstream = torch.where(sample.valid, dloss, 0).to(acc) * options.logit_scale
    factor = torch.where(sample.valid, maths.softmax_factor(upstream, stats.row_sum), 0)
    # The target's softmax - 1, of which only the sample's part is left.
    own = torch.where(sample.valid, -factor * stats.others, 0)
    dinput = hidden.new_zeros((n, d), dtype=acc) if need_dinput else None
    dcolumns = hidden.new_empty((m, d), dtype=acc) if need_dweight else None
    dshift = hidden.new_empty((m,), dtype=acc) if need_dbias else None
    for low, high in sample.windows:
        z = sample.logits(low, high)
        dlogits = maths.exponential(z, stats.row_max.unsqueeze(1), torch.exp_, torch.Tensor.sub_)
        dlogits.mul_(factor.unsqueeze(1))
        if dshift is not None:
            torch.sum(dlogits, 0, out=dshift[low:high])
        if sample.products.rounded:
            dlogits = dlogits.to(hidden.dtype)
        if dinput is not None:
            add_mm(dinput, dlogits, sample.products.weight(low, high))
        if dcolumns is not None:
            mm(dlogits.mT, hidden, dcolumns[low:high])
    classes = torch.cat((sample.ids, sample.classes))
    dweight = dbias = None
    if dcolumns is not None:

        def rows(part: slice) -> Tensor:
            return torch.cat((dcolumns[:, part], own.unsqueeze(1) * hidden[:, part].to(acc)))

        dweight = operands.weight.new_zeros((V, d))
        _add_by_class(dweight, classes, rows, sample.slices(d, 2 * (m + n)))
    if dshift is not None:
        dbias = hidden.new_zeros((V, 1), dtype=dtype)
        _add_by_class(dbias, classes, lambda _: torch.cat((dshift, own)).unsqueeze(1), [slice(0, 1)])
        dbias = dbias.squeeze(1)
    if dinput is not None:
        for part in sample.slices(n, d):
            dinput[part].addcmul_(own[part].unsqueeze(1), sample.target_rows(part))
    return dinput, dweight, dbias


def _add_by_class(
    out: Tensor, classes: Tensor, rows: Callable[[slice], Tensor], columns: list[slice]
) -> None:
    """Write to out (V, d), which is 0, the sum of the rows of each class, rounded once. rows: some columns of
    (len(classes), d), in acc."""
    ordered, order = torch.sort(classes, stable=True)
    is_next = torch.cat((ordered.new_zeros(1), (ordered[1:] != ordered[:-1]).long()))
    # Of each row in that order, and where each place begins; places that no class has are empty.
    place = is_next.cumsum(0)
    begins = torch.searchsorted(place, torch.arange(len(place) + 1, device=place.device))
    for part in columns:
        # One after the other, where index_add_ and its like may add in any order; unsafe: without checks,
        # for which a device would be waited for.
        sums = torch.segment_reduce(rows(part)[order], "sum", offsets=begins, axis=0, unsafe=True)
        # A class's rows all write its sum.
        out[:, part].index_copy_(0, ordered, sums[place].to(out.dtype))
