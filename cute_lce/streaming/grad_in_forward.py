"""The paper's Algorithms 3 and 4: gradients computed in the forward, chunk by chunk over tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from .. import maths
from ..arguments import Operands
from ..implementation import Accumulated, Request
from ..options import LossOptions
from .memory import CPU_LOGITS_BYTES, chunks
from .products import LogitsBuffer, Products, accumulate_dtype, add_mm, mm, without_autocast
from .rows import (
    classify,
    is_ignored,
    of_all_rows,
    of_rows,
    reduce,
    valid_rows,
    without_ignored,
)


def empty_source(hidden: Tensor, need_dinput: bool) -> Tensor:
    """None: rows are the tokens'."""
    return hidden.new_empty((0,), dtype=torch.int32)


@without_autocast
def grad_in_forward(operands: Operands, loss: LossOptions, request: Request) -> Accumulated:
    """Compute each chunk's logits once, and the loss and both gradients from them.

    The accumulators do not include the division for "mean", which scale_gradients applies before it rounds.
    """
    n, V = operands.hidden.shape[0], operands.weight.shape[0]
    valid, classes, out_of_range = checked = classify(operands.target, loss.ignore_index, V)
    rows = valid_rows(operands.target, loss.ignore_index)
    if rows is not None:
        hidden, target = operands.hidden[rows], operands.target[rows]
        operands = Operands(hidden, operands.weight, target)
        checked = valid[rows], classes[rows], out_of_range[rows]
    statistics, dinput, dweight = _chunks(operands, checked, loss, request)
    row_max, row_sum, target_logit = (of_all_rows(each, rows, n, 1) for each in statistics)
    total, _, num_valid = reduce(row_max, row_sum, target_logit, valid, out_of_range, loss.reduction)
    return Accumulated(total, num_valid, None if dinput is None else of_all_rows(dinput, rows, n), dweight)


def _chunks(
    operands: Operands, checked: tuple[Tensor, Tensor, Tensor], loss: LossOptions, request: Request
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor | None, Tensor | None]:
    """(row_max, row_sum and target_logit, dinput, dweight). checked: what classify gives."""
    hidden, weight, _ = operands
    (n, d), V = hidden.shape, weight.shape[0]
    valid, classes, out_of_range = checked
    acc = accumulate_dtype(hidden.dtype)
    token_ranges, ranges = chunks(operands, request)
    row_max, row_sum, target_logit = (hidden.new_empty((n,), dtype=acc) for _ in range(3))
    dinput = hidden.new_empty((n, d), dtype=acc) if request.need_dinput else None
    # The first chunk writes dweight, if there is one.
    new_dweight = weight.new_empty if token_ranges else weight.new_zeros
    dweight = new_dweight((V, d), dtype=acc) if request.need_dweight else None
    buffer = LogitsBuffer(V, token_ranges, hidden, acc)
    ignored = ~valid.unsqueeze(1)
    hidden = without_ignored(hidden, ignored)
    for start, stop in token_ranges:
        products = Products(hidden[start:stop], weight)
        logits = buffer.window(stop - start).view(stop - start, V)
        for low, high in ranges:
            mm(products.hidden, products.weight(low, high).mT, logits[:, low:high])
        logits = maths.logits(logits, loss)
        column = classes[start:stop].unsqueeze(1)
        target_logit[start:stop] = logits.gather(1, column).squeeze(1)
        maximum = logits.amax(1).clamp_(min=torch.finfo(acc).min)
        total = maths.exponential(logits, maximum.unsqueeze(1), torch.exp_, torch.Tensor.sub_).sum(1)
        row_max[start:stop], row_sum[start:stop] = maximum, total
        total = total.masked_fill(out_of_range[start:stop], torch.nan)
        logits.scatter_add_(1, column, -total.unsqueeze(1))
        scale = maths.product_gradient(1, loss)
        factor = torch.where(valid[start:stop], maths.softmax_factor(scale, total), 0).unsqueeze(1)
        if products.rounded:
            dlogits, scaled_hidden = logits.mul_(factor).to(hidden.dtype), products.hidden
        else:
            dlogits, scaled_hidden = logits, products.hidden * factor
        for low, high in ranges:
            if dinput is not None:
                _sum_of_products(dinput[start:stop], dlogits[:, low:high], products.weight(low, high), low)
            if dweight is not None:
                _sum_of_products(dweight[low:high], dlogits[:, low:high].mT, scaled_hidden, start)
        if dinput is not None and not products.rounded:
            dinput[start:stop].mul_(factor)
    if dinput is not None:
        # 0 times an infinite weight is nan.
        dinput.masked_fill_(ignored, 0)
    return (row_max, row_sum, target_logit), dinput, dweight


def _sum_of_products(out: Tensor, a: Tensor, b: Tensor, part: int) -> None:
    """Write part 0 of a sum of products, add any other."""
    if part == 0:
        mm(a, b, out)
    else:
        add_mm(out, a, b)


@without_autocast
def scale_gradients(
    dloss: Tensor,
    target: Tensor,
    accumulated: Accumulated,
    loss: LossOptions,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """round(upstream * accumulator), out of place, in one pass that is also the only cast; dweight's is added
    to `out` if there is one."""
    upstream = of_rows(dloss, accumulated.num_valid, loss)
    if loss.reduction != "none":
        upstream = torch.where(accumulated.num_valid > 0, upstream, 0)
    dinput = dweight = None
    if accumulated.dinput is not None:
        # 0 times nan is nan: what flows into ignored rows, whose accumulators are 0, does not matter.
        ignored = is_ignored(target, loss.ignore_index)
        factor = torch.where(ignored, 0, upstream)
        if accumulated.source is None:
            dinput = _multiplied(accumulated.dinput, factor.unsqueeze(1), dtype)
        else:
            dinput = _scattered(accumulated.dinput, accumulated.source.long(), factor, ignored, dtype)
    if accumulated.dweight is not None and out is None:
        dweight = _multiplied(accumulated.dweight, upstream, dtype)
    elif accumulated.dweight is not None and out is not None:
        for part in _parts(out):
            torch.addcmul(out[part], accumulated.dweight[part], upstream, out=out[part])
    return dinput, dweight


def _multiplied(accumulator: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """round(factor * accumulator)."""
    out = accumulator.new_empty(accumulator.shape, dtype=dtype)
    for part in _parts(out):
        torch.mul(accumulator[part], factor[part] if factor.dim() else factor, out=out[part])
    return out


def _scattered(
    accumulator: Tensor, source: Tensor, factor: Tensor, ignored: Tensor, dtype: torch.dtype
) -> Tensor:
    """The same for a row of each token of `source`, to the tokens' rows; zeros in ignored ones."""
    out = accumulator.new_empty(accumulator.shape, dtype=dtype)
    for part in _parts(out, at_once=False):
        tokens = source[part]
        product = accumulator[part] * factor[tokens].unsqueeze(1)
        product.masked_fill_(ignored[tokens].unsqueeze(1), 0)
        out.index_copy_(0, tokens, product.to(dtype))
        # Not beside the next part's.
        del product
    return out


def _parts(out: Tensor, *, at_once: bool = True) -> Iterator[slice]:
    """Some rows at a time: on a CPU torch casts from a temporary in acc; at_once: all on other devices."""
    rows, columns = out.shape
    at_once = at_once and out.device.type != "cpu"
    step = max(rows if at_once else CPU_LOGITS_BYTES // max(columns * 8, 1), 1)
    for low in range(0, rows, step):
        yield slice(low, low + step)
