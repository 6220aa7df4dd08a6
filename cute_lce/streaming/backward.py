"""The paper's Algorithm 2, window by window: logits (again, or kept), dlogits, and both products."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from .. import maths
from ..arguments import Operands
from ..implementation import BothGradients, Halfway, Request, Saved
from ..options import LossOptions
from .memory import CPU_LOGITS_BYTES, dlogits_columns, holds_dlogits, request_of_rows, windows
from .products import ADDS_WIDE, LogitsBuffer, Products, accumulate_dtype, add_mm, mm, without_autocast
from .rows import (
    computes_some_rows,
    grad_scale,
    is_valid,
    of_all_rows,
    subtract_target,
    valid_rows,
    without_ignored,
)

GPU_PART_BYTES = 32 << 20
"""Of a product that is added to a gradient of another dtype, on a GPU."""


class StreamingBackward:
    """See implementation.Backward. One sweep computes both gradients; `dinput` runs it, of a shard too."""

    def __init__(self, operands: Operands, loss: LossOptions, request: Request):
        self._request = request

    def dinput(
        self, dloss: Tensor, saved: Saved, loss: LossOptions, out: Tensor | None = None
    ) -> BothGradients | Halfway:
        gradients = _sweep(dloss, saved, loss, self._request, out)
        return Halfway(*gradients) if self._request.shard else gradients

    def dweight(
        self,
        dloss: Tensor,
        saved: Saved,
        loss: LossOptions,
        gradients: BothGradients | Halfway,
        out: Tensor | None = None,
    ) -> BothGradients:
        return gradients[0], gradients[1]


def unpacked(saved: Saved, kept_columns: int) -> Saved:
    """See implementation.Implementation. Nothing is packed here."""
    return saved


@without_autocast
def _sweep(
    dloss: Tensor, saved: Saved, loss: LossOptions, request: Request, out: Tensor | None
) -> BothGradients:
    """dinput of a shard in acc."""
    n, dtype = saved.hidden.shape[0], None if request.shard else saved.hidden.dtype
    rows = valid_rows(saved.target, loss.ignore_index)
    if rows is not None:
        request = request_of_rows(request, saved.hidden, rows)
        by_row = (each[rows] for each in (saved.hidden, saved.target, saved.row_max, saved.row_sum))
        hidden, target, row_max, row_sum = by_row
        kept = None if saved.kept is None else saved.kept[: len(rows)]
        saved = Saved(hidden, saved.weight, target, row_max, row_sum, saved.num_valid, kept, saved.kept_scale)
        dloss = dloss[rows] if dloss.dim() else dloss
    dinput, dweight = _gradients(dloss, saved, loss, request, out)
    return None if dinput is None else of_all_rows(dinput, rows, n, dtype=dtype), dweight


def _gradients(
    dloss: Tensor, saved: Saved, loss: LossOptions, request: Request, out: Tensor | None
) -> BothGradients:
    """dinput, in acc or rounded, and dweight.

    A row's dlogits are factor * (exp(z - row_max) - row_sum * onehot) with factor = upstream / row_sum.

    The factor is applied outside the matrix products (to dinput's rows at the end, and to a copy of the
    hidden rows for dweight), except where 16-bit operands are multiplied: there dlogits are rounded once,
    including the factor in bfloat16, and as softmax - onehot in float16, whose range is too small for
    upstream / n. The factor of an ignored row is 0. A CPU that multiplies bfloat16 holds all rounded dlogits
    where they fit, so that each gradient is one sum.
    """
    valid = is_valid(saved.target, loss.ignore_index)
    ignored = ~valid.unsqueeze(1)
    hidden, kept = without_ignored(saved.hidden, ignored), saved.kept
    (n, d), V = hidden.shape, saved.weight.shape[0]
    products = Products(hidden, saved.weight)
    acc, dtype = products.acc, hidden.dtype
    row_max = without_ignored(saved.row_max.unsqueeze(1), ignored)
    # One outside [0, V), of a row of nan or of another shard, is in no window.
    classes = saved.target.long()
    kept_columns = request.kept_columns
    ranges = windows(saved.operands, request)
    buffer = LogitsBuffer(n, ranges, hidden, acc)
    every_dlogits = None
    if out is None and holds_dlogits(saved.operands, request):
        # oneDNN reads beyond a row and multiplies that with 0. The next row may be nan, so rows are apart.
        every_dlogits = hidden.new_zeros((n, dlogits_columns(V)))[:, :V]

    upstream = torch.where(valid, grad_scale(dloss, saved.num_valid, loss), 0)
    inner, outer = None, torch.where(valid, maths.softmax_factor(upstream, saved.row_sum), 0)
    if every_dlogits is not None or (products.rounded and dtype is torch.bfloat16):
        inner, outer = outer, None
    elif products.rounded:
        inner, outer = torch.where(valid, maths.softmax_factor(1, saved.row_sum), 0), upstream

    dinput = dweight = scaled_hidden = weight_scale = None
    if request.need_dinput and every_dlogits is None:
        dinput = hidden.new_zeros((n, d), dtype=acc)
    if request.need_dweight and every_dlogits is None:
        dweight = saved.weight.new_empty((V, d)) if out is None else out
        if outer is not None and products.rounded:
            # The largest factor is left out of the rounded copy and applied in float32.
            weight_scale = outer.abs().amax().clamp(min=torch.finfo(acc).tiny) if n else outer.new_ones(())
            scaled_hidden = (products.hidden * (outer / weight_scale).unsqueeze(1)).to(dtype)
        elif outer is not None:
            scaled_hidden = products.hidden * outer.unsqueeze(1)
        else:
            scaled_hidden = products.hidden

    for low, high in ranges:
        dlogits = buffer.window(high - low)
        weight = None if every_dlogits is not None else products.weight(low, high)
        if kept is None or low >= kept_columns:
            assert weight is not None
            logits = maths.logits(mm(products.hidden, weight.mT, dlogits), loss)
        else:
            logits = kept[:, low:high]
        subtract = functools.partial(torch.sub, out=dlogits)
        maths.exponential(logits, row_max, torch.exp_, subtract)
        subtract_target(dlogits, classes, saved.row_sum, low, high)
        if inner is not None:
            dlogits.mul_(inner.unsqueeze(1))
        if every_dlogits is not None:
            every_dlogits[:, low:high] = dlogits
        elif products.rounded:
            dlogits = dlogits.to(dtype)
        if dinput is not None and weight is not None:
            add_mm(dinput, dlogits, weight)
        if dweight is not None and scaled_hidden is not None:
            stripe = dweight[low:high]
            if out is not None:
                add_product(stripe, dlogits.mT, scaled_hidden, weight_scale)
            elif dtype is dlogits.dtype and weight_scale is None:
                torch.mm(dlogits.mT, scaled_hidden, out=stripe)
            else:
                product = mm(dlogits.mT, scaled_hidden, hidden.new_empty(stripe.shape, dtype=acc))
                stripe.copy_(product if weight_scale is None else product.mul_(weight_scale))
                del product
        # Freed before the next window's are allocated.
        del dlogits, logits, weight
    if every_dlogits is not None:
        dinput = every_dlogits @ saved.weight if request.need_dinput else None
        return dinput, every_dlogits.mT @ hidden if request.need_dweight else None
    if dinput is not None:
        dinput = dinput if outer is None else dinput.mul_(outer.unsqueeze(1))
        if not computes_some_rows(hidden.device.type):
            # 0 times an infinite weight is nan.
            dinput.masked_fill_(ignored, 0)
    return dinput, dweight if out is None else None


def add_product(out: Tensor, a: Tensor, b: Tensor, scale: Tensor | None) -> None:
    """Add scale a @ b to `out`, in acc and rounded once: where dtypes differ some rows at a time, beside the
    workspace."""
    acc = accumulate_dtype(b.dtype)
    if out.dtype is acc and scale is None and (a.dtype is acc or ADDS_WIDE):
        add_mm(out, a, b)
        return
    part_bytes = CPU_LOGITS_BYTES if out.device.type == "cpu" else GPU_PART_BYTES
    step = max(part_bytes // (acc.itemsize * out.shape[1]), 1)
    for low in range(0, out.shape[0], step):
        part = out[low : low + step]
        product = mm(a[low : low + step], b, b.new_empty(part.shape, dtype=acc))
        part.copy_((product if scale is None else product.mul_(scale)).add_(part))
