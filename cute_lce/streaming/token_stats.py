"""Numbers of each token from logits with terms, window by window, and the gradients by them. On a CPU
token_rows.py gives them the rows alone that are not ignored.

z = softcap((hidden @ weight.T + bias) scale) / temperature. The gradient by z of any combination of the
numbers is, with coefficients of each row,

    p (softmax + gap_factor (z - row_max)) + uniform class_weight + onehots

and the gradient by the product is that times dz / d(product).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .. import maths
from ..exchange import Merge, RowSums
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
from ..logit_term import term_of
from ..torch_ops import logit_of, slope_of
from . import memory
from .backward import add_product
from .products import Products, accumulate_dtype, add_mm, mm, without_autocast
from .rows import classify, in_window, is_ignored, is_valid, without_ignored


class _Logits:
    """z of a window of products, and its derivative by them."""

    def __init__(self, operands: StatsOperands, options: StatsOptions, ignored: Tensor, acc: torch.dtype):
        self._options = options
        self._bias = None if operands.linear_bias is None else operands.linear_bias.to(acc)
        self._temperature: Tensor | float = options.temperature
        if operands.temperature is not None:
            # That of an ignored row does not matter.
            self._temperature = operands.temperature.to(acc).unsqueeze(1).masked_fill(ignored, 1)

    def of(
        self, product: Tensor, low: int, high: int, *, own: bool, needs_slope: bool = False
    ) -> tuple[Tensor, Tensor | None]:
        """(z, the derivative by what the softcap was applied to; None: 1, or not needed). own: whether the
        product may be overwritten. Few windows are alive at once."""
        z, slope = product if own else product.clone(), None
        if self._bias is not None:
            z.add_(self._bias[low:high])
        if self._options.logit_scale != 1:
            z.mul_(self._options.logit_scale)
        if self._options.softcap is not None:
            term = term_of(self._options.softcap)
            if term is None:
                z = maths.cap_ratio(z, 1.0 / self._options.softcap, torch.tanh_)
                slope = maths.cap_slope(z) if needs_slope else None
                z = maths.capped(z, self._options.softcap)
            else:
                z = logit_of(term, z)
                slope = slope_of(term, z) if needs_slope else None
                # The term may have given what it was given, or the slope z itself.
                return z / self._temperature, slope
        if isinstance(self._temperature, Tensor) or self._temperature != 1:
            z.div_(self._temperature)
        return z, slope

    @property
    def factor(self) -> Tensor | float:
        """What the derivative by the product is besides the slope: a number, or (n, 1)."""
        return self._options.logit_scale / self._temperature


class _Running:
    """The numbers over the windows so far; sums of exponentials are relative to exp(row_max)."""

    def __init__(self, operands: StatsOperands, options: StatsOptions, classes: Tensor, acc: torch.dtype):
        rows = operands.hidden.new_zeros((operands.hidden.shape[0],), dtype=acc)
        self._outputs, self._classes, self._ids = options.outputs, classes, operands.topk_ids
        self._class_weight = None if operands.class_weight is None else operands.class_weight.to(acc)
        # Not -inf, with which a window of -inf would become nan.
        self.row_max = torch.full_like(rows, torch.finfo(acc).min)
        self._columns = operands.weight.shape[0]
        self.row_sum, self.gap_sum, self.square_sum, self.logit_sum = (torch.zeros_like(rows) for _ in "abcd")
        # The sum of class_weight (row_max - z), and of class_weight.
        self.weighted_gap, self.weight_sum = torch.zeros_like(rows), rows.new_zeros(())
        self.target_logit = torch.zeros_like(rows)
        self.argmax = torch.zeros_like(rows, dtype=torch.int64)
        self.topk_logit = None if self._ids is None else rows.new_zeros(self._ids.shape)

    def add(self, z: Tensor, low: int, high: int) -> None:
        """z (n, high - low): the logits of a window, which are overwritten."""
        inside, column = in_window(self._classes, low, high)
        self.target_logit = torch.where(inside, z.gather(1, column).squeeze(1), self.target_logit)
        if self._ids is not None and self.topk_logit is not None:
            inside, column = _ids_in_window(self._ids, low, high)
            self.topk_logit = torch.where(inside, z.gather(1, column), self.topk_logit)
        if "argmax" in self._outputs or "is_top1" in self._outputs:
            # The first of equal ones wins.
            highest, index = z.max(1)
            self.argmax = torch.where(highest > self.row_max, index + low, self.argmax)
        else:
            highest = z.amax(1)
        before, self.row_max = self.row_max, torch.maximum(self.row_max, highest)
        rise, row_max = self.row_max - before, self.row_max.unsqueeze(1)
        shrunk = torch.exp(-rise)
        if "mean_logit" in self._outputs:
            self.logit_sum = self.logit_sum + z.sum(1)
        negative_gap = z.sub_(row_max)
        if "total_nll" in self._outputs:
            weight = None if self._class_weight is None else self._class_weight[low:high]
            gaps = negative_gap.sum(1) if weight is None else (negative_gap * weight).sum(1)
            self.weighted_gap = self.weighted_gap + self.weight_sum * rise - gaps
            self.weight_sum = self.weight_sum + (high - low if weight is None else weight.sum())
        if "entropy" in self._outputs:
            exponentials = negative_gap.exp()
            # 0 times -inf is 0 here.
            gaps = negative_gap.clamp_(min=torch.finfo(z.dtype).min).mul_(exponentials).sum(1)
            self.gap_sum = shrunk * (self.gap_sum + rise * self.row_sum) - gaps
        else:
            exponentials = negative_gap.exp_()
        if "log_sum_sq_probs" in self._outputs:
            self.square_sum = shrunk * shrunk * self.square_sum + exponentials.square().sum(1)
        self.row_sum = shrunk * self.row_sum + exponentials.sum(1)

    def sums(self, nowhere: Tensor | None) -> RowSums:
        """nowhere: rows whose target is no class; None: they are not known."""
        row_sum = self.row_sum if nowhere is None else self.row_sum.masked_fill(nowhere, torch.nan)
        found = RowSums(self.row_max, row_sum, self.target_logit)
        if "entropy" in self._outputs:
            found = found._replace(mean_gap=self.gap_sum / row_sum)
        if "total_nll" in self._outputs:
            found = found._replace(total_gap=self.weighted_gap, weight=self.weight_sum)
        if "log_sum_sq_probs" in self._outputs:
            found = found._replace(square_sum=self.square_sum)
        if "mean_logit" in self._outputs:
            found = found._replace(mean_logit=self.logit_sum / self._columns)
        if "argmax" in self._outputs or "is_top1" in self._outputs:
            is_top1 = self.argmax == self._classes
            is_top1 = is_top1 if nowhere is None else is_top1 & ~nowhere
            found = found._replace(argmax=self.argmax, is_top1=is_top1)
        if self._ids is not None:
            known = _are_classes(self._ids, self._columns)
            found = found._replace(topk_logit=self.topk_logit, topk_known=known)
        return found


def _ids_in_window(ids: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Whether each id is in the window, and its column there, 0 if it is not."""
    inside = (ids >= low) & (ids < high)
    return inside, torch.where(inside, ids - low, 0).long()


def empty_kept(operands: StatsOperands, options: StatsOptions, kept_columns: int) -> dict[str, Tensor]:
    hidden = operands.hidden
    return {"kept": hidden.new_empty((hidden.shape[0], kept_columns), dtype=accumulate_dtype(hidden.dtype))}


@without_autocast
def forward(
    operands: StatsOperands,
    options: StatsOptions,
    request: Request,
    merge: Merge | None,
    kept: Tensor | None = None,
) -> Stats:
    """See implementation.Statistics. kept: memory for what is kept; None: new."""
    hidden, weight, target = operands[:3]
    n, V = hidden.shape[0], weight.shape[0]
    if merge is None:
        valid, classes, out_of_range = classify(target, options.ignore_index, V)
    else:
        valid, classes, out_of_range = is_valid(target, options.ignore_index), target.long(), None
    ignored = ~valid.unsqueeze(1)
    products = Products(without_ignored(hidden, ignored), weight)
    logits = _Logits(operands, options, ignored, products.acc)
    kept_columns = request.kept_columns
    if kept is None and kept_columns:
        kept = empty_kept(operands, options, kept_columns)["kept"]
    running = _Running(operands, options, classes, products.acc)
    for low, high in memory.windows(operands, request, memory.copies_of(options)):
        out = hidden.new_empty((n, high - low), dtype=products.acc)
        if kept is not None and low < kept_columns:
            out = kept[:, low:high]
        product = mm(products.hidden, products.weight(low, high).mT, out)
        own = kept is None or low >= kept_columns
        running.add(logits.of(product, low, high, own=own)[0], low, high)
        # Freed before the next window's is allocated.
        del out, product
    own = running.sums(out_of_range)
    if merge is not None:
        elsewhere = ~_are_classes(target, V)
        own = merge(own._replace(target_logit=own.target_logit.masked_fill(elsewhere, torch.nan)))
    return _numbers(own, options, valid)._replace(kept=kept)


def _numbers(sums: RowSums, options: StatsOptions, valid: Tensor) -> Stats:
    row_max, log_row_sum = sums.row_max, sums.row_sum.log()
    entropy = total_nll = log_sum_sq_probs = None
    if sums.mean_gap is not None:
        entropy = maths.entropy(log_row_sum, sums.mean_gap)
    if sums.total_gap is not None and sums.weight is not None:
        total_nll = sums.weight * log_row_sum + sums.total_gap
    if sums.square_sum is not None:
        log_sum_sq_probs = maths.log_sum_sq_probs(log_row_sum, sums.square_sum.log())
    found = Stats(
        logprob=maths.logprob(log_row_sum, row_max, sums.target_logit),
        lse=maths.lse(log_row_sum, row_max),
        entropy=entropy,
        total_nll=total_nll,
        argmax=sums.argmax,
        is_top1=sums.is_top1,
        log_sum_sq_probs=log_sum_sq_probs,
        mean_logit=sums.mean_logit,
    )
    wanted = {
        name: torch.where(valid, value, torch.zeros_like(value))
        for name, value in found._asdict().items()
        if name in options.outputs and value is not None
    }
    if sums.topk_logit is not None and sums.topk_known is not None:
        each = maths.logprob(log_row_sum.unsqueeze(1), row_max.unsqueeze(1), sums.topk_logit)
        wanted["topk_logprob"] = torch.where(valid.unsqueeze(1) & sums.topk_known, each, 0)
    return Stats(
        **wanted,
        row_max=row_max,
        row_sum=sums.row_sum,
        mean_gap=sums.mean_gap,
        # Kernels read these in the backward; this path has the shapes that they have.
        target_logit=sums.target_logit if options.saves_logits else None,
        topk_logit=sums.topk_logit if options.saves_logits else None,
    )


def _are_classes(ids: Tensor, V: int) -> Tensor:
    return (ids >= 0) & (ids < V)


class Coefficients(NamedTuple):
    """See the file's docstring; (n,), but topk (n, K): of each of the ids, which may be equal. 0 in ignored
    rows. target: wherever the target is, of a shard too."""

    softmax: Tensor
    gap_factor: Tensor | None
    uniform: Tensor | None
    target: Tensor | None
    topk: Tensor | None

    def times(self, factor: Tensor) -> Coefficients:
        gap_factor, uniform, target = (None if each is None else each * factor for each in self[1:4])
        topk = None if self.topk is None else self.topk * factor.unsqueeze(1)
        return Coefficients(self.softmax * factor, gap_factor, uniform, target, topk)

    def size(self) -> Tensor:
        """A bound of the coefficients."""
        total = self.softmax.abs()
        for each in self[1:4]:
            total = total if each is None else total + each.abs()
        return total if self.topk is None else total + self.topk.abs().sum(1)


def coefficients_of(
    upstream: StatsUpstream, operands: StatsOperands, saved: StatsSaved, ignored: Tensor
) -> Coefficients:
    given = StatsUpstream(
        *(None if each is None else _of_valid(each, ignored, saved.row_max.dtype) for each in upstream)
    )
    gap_factor = uniform = topk = None
    softmax = torch.zeros_like(saved.row_max) if given.logprob is None else -given.logprob
    if given.lse is not None:
        softmax = softmax + given.lse
    if given.entropy is not None and saved.mean_gap is not None:
        constant, gap_factor = maths.entropy_upstream(given.entropy, saved.mean_gap)
        softmax = softmax + constant.masked_fill_(ignored, 0)
    if given.total_nll is not None:
        every = operands.class_weight
        total = operands.weight.shape[0] if every is None else every.to(softmax.dtype).sum()
        if isinstance(total, Tensor):
            softmax = torch.addcmul(softmax, given.total_nll, total)
        else:
            softmax = torch.add(softmax, given.total_nll, alpha=total)
        uniform = -given.total_nll
    if given.topk_logprob is not None and operands.topk_ids is not None:
        classes = _are_classes(operands.topk_ids, operands.weight.shape[0])
        each = torch.where(classes, given.topk_logprob, 0)
        softmax, topk = softmax - each.sum(1), each
    return Coefficients(softmax, gap_factor, uniform, given.logprob, topk)


def _of_valid(upstream: Tensor, ignored: Tensor, acc: torch.dtype) -> Tensor:
    return upstream.masked_fill(ignored if upstream.dim() == 1 else ignored.unsqueeze(1), 0).to(acc)


LEAST_GAP = -1024.0
"""Of a logit and the row's maximum; below it exp is 0 in float64 too."""


def _at_last(ids: Tensor, values: Tensor) -> Tensor:
    """The sum of the values of equal ids, where the id occurs last in its row; 0 elsewhere. Adding these in
    any order gives the same bits."""
    ids, order = ids.sort(dim=1, stable=True)
    sums, step = values.gather(1, order), 1
    while step < ids.shape[1]:
        # Equal ids are side by side: each has the sum of itself and step - 1 before it.
        same = ids[:, step:] == ids[:, :-step]
        sums[:, step:] += torch.where(same, sums[:, :-step], 0)
        step *= 2
    goes_on = ids[:, 1:] == ids[:, :-1]
    sums[:, :-1].masked_fill_(goes_on, 0)
    return torch.zeros_like(values).scatter_(1, order, sums)


@without_autocast
def gradients(
    upstream: StatsUpstream,
    operands: StatsOperands,
    saved: StatsSaved,
    options: StatsOptions,
    request: Request,
    out: Tensor | None = None,
) -> AllGradients:
    """dinput and dbias in acc, dweight in its dtype or added to `out`. Of a shard dinput is its part."""
    hidden, weight, target = operands[:3]
    (n, d), V, dtype = hidden.shape, weight.shape[0], hidden.dtype
    ignored = is_ignored(target, options.ignore_index)
    ignored_rows = ignored.unsqueeze(1)
    products = Products(without_ignored(hidden, ignored_rows), weight)
    acc = products.acc
    logits = _Logits(operands, options, ignored_rows, acc)
    coefficients, factor, outer = coefficients_of(upstream, operands, saved, ignored), logits.factor, None
    scaled_hidden, weight_scale = products.hidden, None
    if products.rounded and dtype is torch.float16:
        # Its range is too small for upstream / n: the rows' factors are applied in float32.
        outer = coefficients.size() * (factor.squeeze(1) if isinstance(factor, Tensor) else factor)
        weight_scale = outer.abs().amax().clamp(min=torch.finfo(acc).tiny) if n else outer.new_ones(())
        scaled_hidden = (products.hidden * (outer / weight_scale).unsqueeze(1)).to(dtype)
        size = coefficients.size()
        coefficients, factor = coefficients.times(torch.where(size == 0, 0, 1 / size)), 1.0
    each_weight = None if operands.class_weight is None else operands.class_weight.to(acc)
    softmax = maths.softmax_factor(coefficients.softmax, saved.row_sum).masked_fill_(ignored, 0)
    gap_factor = coefficients.gap_factor
    if gap_factor is not None:
        gap_factor = maths.softmax_factor(gap_factor, saved.row_sum).masked_fill_(ignored, 0).unsqueeze(1)
    topk, ids = coefficients.topk, operands.topk_ids
    if topk is not None and ids is not None:
        topk = _at_last(ids, topk)
    # One in another shard is in no window.
    classes = target.long()
    dinput = hidden.new_zeros((n, d), dtype=acc) if request.need_dinput else None
    dweight = None if not request.need_dweight else weight.new_empty((V, d)) if out is None else out
    dbias = hidden.new_empty((V,), dtype=acc) if request.need_dbias else None
    for low, high in memory.windows(operands, request, memory.copies_of(options)):
        window = products.weight(low, high)
        is_kept = saved.kept is not None and low < request.kept_columns
        if saved.kept is not None and is_kept:
            product = saved.kept[:, low:high]
        else:
            product = mm(products.hidden, window.mT, hidden.new_empty((n, high - low), dtype=acc))
        z, slope = logits.of(product, low, high, own=not is_kept, needs_slope=True)
        del product
        gap = z.sub_(saved.row_max.unsqueeze(1))
        if gap_factor is None:
            dlogits = gap.exp_().mul_(softmax.unsqueeze(1))
        else:
            dlogits = gap.exp()
            # 0 times -inf is 0 here.
            gap.clamp_(min=LEAST_GAP).mul_(gap_factor).add_(softmax.unsqueeze(1))
            dlogits.mul_(gap)
        del z, gap
        if coefficients.uniform is not None:
            row = coefficients.uniform.unsqueeze(1)
            dlogits.add_(row if each_weight is None else row * each_weight[low:high])
        if coefficients.target is not None:
            inside, column = in_window(classes, low, high)
            dlogits.scatter_add_(1, column, torch.where(inside, coefficients.target, 0).unsqueeze(1))
        if topk is not None and ids is not None:
            inside, column = _ids_in_window(ids, low, high)
            dlogits.scatter_add_(1, column, torch.where(inside, topk, 0))
        if isinstance(factor, Tensor) or factor != 1:
            dlogits.mul_(factor)
        if slope is not None:
            dlogits.mul_(slope)
        del slope
        dlogits.masked_fill_(ignored_rows, 0)
        if dbias is not None:
            torch.sum(dlogits if outer is None else dlogits * outer.unsqueeze(1), 0, out=dbias[low:high])
        if products.rounded:
            dlogits = dlogits.to(dtype)
        if dinput is not None:
            add_mm(dinput, dlogits, window)
        if dweight is not None and out is not None:
            add_product(dweight[low:high], dlogits.mT, scaled_hidden, weight_scale)
        elif dweight is not None and dlogits.dtype is dtype and weight_scale is None:
            torch.mm(dlogits.mT, scaled_hidden, out=dweight[low:high])
        elif dweight is not None:
            found = mm(dlogits.mT, scaled_hidden, hidden.new_empty((high - low, d), dtype=acc))
            dweight[low:high] = found if weight_scale is None else found.mul_(weight_scale)
            del found
        # Freed before the next window's are allocated.
        del dlogits, window
    if dinput is not None and outer is not None:
        dinput.mul_(outer.unsqueeze(1))
    return dinput, dweight if out is None else None, dbias


@without_autocast
def grad_in_forward(
    operands: StatsOperands, options: StatsOptions, row_loss: RowLoss, request: Request
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The paper's Algorithms 3 and 4: chunk by chunk over tokens, a forward that keeps, and its backward."""
    hidden, weight = operands.hidden, operands.weight
    (n, d), V = hidden.shape, weight.shape[0]
    acc = Products(hidden[:0], weight).acc
    token_ranges, ranges = memory.chunks(operands, request, memory.copies_of(options))
    window = max((high - low for low, high in ranges), default=1)
    request = request._replace(limits=request.limits._replace(window=window), kept_columns=V)
    losses = hidden.new_empty((n,), dtype=acc)
    dinput = hidden.new_zeros((n, d), dtype=acc) if request.need_dinput else None
    dweight = weight.new_zeros((V, d), dtype=acc) if request.need_dweight else None
    dbias = hidden.new_zeros((V,), dtype=acc) if request.need_dbias else None
    for start, stop in token_ranges:
        part = operands._replace(
            hidden=hidden[start:stop],
            target=operands.target[start:stop],
            temperature=None if operands.temperature is None else operands.temperature[start:stop],
        )
        own = row_loss._replace(
            target_weight=None if row_loss.target_weight is None else row_loss.target_weight[start:stop],
            token_weight=None if row_loss.token_weight is None else row_loss.token_weight[start:stop],
        )
        stats = forward(part, options, request, None)
        assert stats.row_max is not None
        assert stats.row_sum is not None
        assert stats.logprob is not None
        losses[start:stop] = own.losses(-stats.logprob, stats, V)
        saved = StatsSaved(stats.row_max, stats.row_sum, stats.mean_gap, stats.kept)
        upstream = own.upstream(torch.ones_like(stats.logprob), stats, V)
        del stats
        dinput_part, _, dbias_part = gradients(upstream, part, saved, options, request, dweight)
        if dinput is not None and dinput_part is not None:
            dinput[start:stop] = dinput_part
        if dbias is not None and dbias_part is not None:
            dbias += dbias_part
    return losses, dinput, dweight, dbias
