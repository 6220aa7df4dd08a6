"""The portable implementation: plain torch, window by window over the vocabulary, never the logits.

It is what a CPU, a GPU without kernels, fp32 and float64 run, and it is the seam: another implementation
(launch.py) has functions of the same names and signatures. The two may be mixed, because all that passes from
a forward to a backward are the row statistics (and what is kept, which is private to one implementation).

    plan(n, d, V, dtype, device_type, schedule, reduction, need_dinput, need_dweight, window, workspace)
        -> (schedule, kept_columns)      "recompute", "keep" or "grad_in_forward"; ints may be symbolic
    forward(input, linear_weight, target, ignore_index, reduction, window, workspace)
        -> (loss, row_max, row_sum, num_valid)
    loss(input, linear_weight, target, ignore_index, reduction, window, workspace)
        -> loss                          where nothing needs a gradient
    empty_kept(input, kept_columns)
        -> (kept, kept_reference)        uninitialised; what forward_keep returns has these shapes
    forward_keep(input, linear_weight, target, ignore_index, reduction, window, workspace, kept_columns)
        -> (loss, row_max, row_sum, num_valid, kept, kept_reference)
    backward(dloss, input, linear_weight, target, row_max, row_sum, num_valid, kept, kept_reference,
             ignore_index, reduction, window, workspace, need_dinput, need_dweight)
        -> (dinput or None, dweight or None)       kept and kept_reference are None when nothing was kept
    grad_in_forward(input, linear_weight, target, ignore_index, reduction, window, workspace,
                    need_dinput, need_dweight)
        -> (loss, num_valid, dinput_accumulator or None, dweight_accumulator or None)
    scale_gradients(dloss, num_valid, dinput_accumulator or None, dweight_accumulator or None,
                    reduction, dtype)
        -> (dinput or None, dweight or None)

Shapes, with "acc" for float32 (float64 for float64):
    input (n, d), linear_weight (V, d): one dtype, any strides. target (n,): int64 or int32, any stride.
    loss: acc, () for "mean" and "sum", (n,) for "none". dloss: loss's shape and dtype, any strides.
    row_max, row_sum: acc (n,), sum_v exp(z_v) = row_sum exp(row_max). row_sum is nan where the target is
        out of range, from which every gradient of that row becomes nan, whatever its upstream gradient. An
        ignored row has its ordinary statistics.
    num_valid: int64 (), the targets that are not ignored.
    A row's loss is log(row_sum) + (row_max - target_logit), which has no cancellation under a common offset
    of its logits.
    The accumulators: acc (n, d) and (V, d), the gradients of the sum of the rows' losses.
    dinput (n, d), dweight (V, d): input's dtype, contiguous.
    window: columns of the vocabulary at once; 0: the implementation's choice.
    workspace: bytes that may be allocated beyond the results; 0: the default, which yields where the least
        needs more.

Nothing here synchronises with a device, except that on a CPU the targets are checked. No argument is
written to.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

DEFAULT_WORKSPACE_BYTES = 1 << 30
"""What workspace_mb=None means, in bytes: 1024 MiB. It bounds what "keep" keeps and the windows."""

# One window of logits in the accumulation dtype: it should stay in a CPU's cache, and fill a GPU.
_CPU_LOGITS_BYTES = 8 << 20
_GPU_LOGITS_BYTES = 256 << 20
# grad_in_forward holds a chunk of tokens times the whole vocabulary, and reads and writes all of dW a chunk.
_CHUNK_BYTES = 128 << 20
_WINDOW_MULTIPLE = 64
_LEAST_CHUNK = 16
# Vectors of n elements that live at once: statistics, targets, masks and their successors.
_ROW_BYTES = 128
# What CUDA's reductions over long rows allocate.
_REDUCTION_BYTES = 4 << 20


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _multiplies_narrow(device_type: str) -> bool:
    """CUDA multiplies bf16 and float16 operands into float32; elsewhere they are widened first."""
    return device_type == "cuda"


def _without_autocast(function):
    """Run the body with autocast off: under it a float32 matmul would come out in bf16."""

    @functools.wraps(function)
    def wrapper(first: Tensor, *args):
        device_type = first.device.type
        if torch.is_autocast_enabled(device_type):
            with torch.autocast(device_type, enabled=False):
                return function(first, *args)
        return function(first, *args)

    return wrapper


# ----------------------------------------------------------------------------------------------------------
# The plan: pure integers, which may be symbolic


def _costs(n, d, V, dtype, device_type, need_dinput, need_dweight):
    """Bytes beyond the results of a sweep over windows: (fixed, for each column of a window)."""
    acc = accumulate_dtype(dtype).itemsize
    narrow = dtype.itemsize < acc
    rounded = narrow and _multiplies_narrow(device_type)
    widened = narrow and not rounded
    fixed, column = _ROW_BYTES * n + (_REDUCTION_BYTES if device_type == "cuda" else 0), n * acc
    if widened:
        fixed += n * d * acc
        column += d * acc
    if rounded and (need_dinput or need_dweight):
        column += n * dtype.itemsize
    if narrow and need_dinput:
        fixed += n * d * acc * (2 if rounded else 1)
    if need_dweight and not rounded:
        fixed += n * d * acc
        column += d * acc if widened else 0
    if need_dweight and rounded and dtype is torch.float16:
        fixed += n * d * (acc + dtype.itemsize)
        column += d * acc
    return fixed, column


def _chunk_costs(n, d, V, dtype, device_type, need_dinput, need_dweight):
    """Bytes of grad_in_forward beyond its loss: (fixed, each column of a window, each token of a chunk)."""
    acc = accumulate_dtype(dtype).itemsize
    narrow = dtype.itemsize < acc
    rounded = narrow and _multiplies_narrow(device_type)
    fixed = _ROW_BYTES * n + (n * d * acc if need_dinput else 0) + (V * d * acc if need_dweight else 0)
    token = V * acc + (V * dtype.itemsize if rounded else 0) + 2 * d * acc + _ROW_BYTES
    return fixed, d * acc if narrow else 0, token


def _least_window(V, window):
    return min(window or _WINDOW_MULTIPLE, V)


def refuse_workspace(schedule, workspace, least) -> ValueError:
    mib = 1 << 20
    least_mb = -(-int(least) * 1000 // mib) / 1000
    return ValueError(
        f"workspace_mb: got {int(workspace) / mib:.3f}, want at least {least_mb:.3f} "
        f"for schedule={schedule!r} with these shapes, dtype and window"
    )


def plan(n, d, V, dtype, device_type, schedule, reduction, need_dinput, need_dweight, window, workspace):
    """Decide the schedule and how many columns it keeps: (schedule, kept_columns).

    "keep" keeps what the workspace holds beside its windows. "auto" is "keep" where the caller gives a
    workspace, else "recompute", which needs the least. Raises ValueError naming the least workspace_mb where
    the one given is too small, and naming schedule where "grad_in_forward" meets a per-token upstream
    gradient and a weight that needs a gradient.
    """
    wants_gradient = need_dinput or need_dweight
    if schedule == "auto" and workspace:
        schedule = "keep"
    if schedule == "grad_in_forward" and wants_gradient:
        if reduction == "none" and need_dweight:
            raise ValueError(
                "schedule: got 'grad_in_forward' with reduction='none' and a linear_weight that needs a "
                "gradient, which it would form before the upstream gradients are known; want reduction "
                "'mean' or 'sum', a frozen linear_weight, or another schedule"
            )
        if workspace:
            fixed, column, token = _chunk_costs(n, d, V, dtype, device_type, need_dinput, need_dweight)
            least = fixed + column * _least_window(V, window) + token * min(_LEAST_CHUNK, n)
            if workspace < least:
                raise refuse_workspace(schedule, workspace, least)
        return schedule, 0
    if not workspace and (schedule != "keep" or not wants_gradient):
        return "recompute", 0
    fixed, column = _costs(n, d, V, dtype, device_type, need_dinput, need_dweight)
    least = fixed + column * _least_window(V, window)
    if workspace and workspace < least:
        raise refuse_workspace(schedule, workspace, least)
    if schedule != "keep" or not wants_gradient or n == 0:
        return "recompute", 0
    kept = ((workspace or DEFAULT_WORKSPACE_BYTES) - least) // (n * accumulate_dtype(dtype).itemsize)
    if kept >= V:
        return "keep", V
    kept = kept // _WINDOW_MULTIPLE * _WINDOW_MULTIPLE
    return ("keep", kept) if kept > 0 else ("recompute", 0)


def _windows(input, linear_weight, window, workspace, need_dinput, need_dweight, kept_columns=0):
    """The half-open ranges of the vocabulary of one sweep; none of them crosses the end of what is kept."""
    (n, d), V = input.shape, linear_weight.shape[0]
    if not window:
        on_cpu = input.device.type == "cpu"
        logits = n * accumulate_dtype(input.dtype).itemsize
        window = (_CPU_LOGITS_BYTES if on_cpu else _GPU_LOGITS_BYTES) // max(logits, 1)
        fixed, column = _costs(n, d, V, input.dtype, input.device.type, need_dinput, need_dweight)
        spare = (workspace or DEFAULT_WORKSPACE_BYTES) - fixed - kept_columns * logits
        window = min(window, spare // max(column, 1))
        window = max(window // _WINDOW_MULTIPLE, 1) * _WINDOW_MULTIPLE
    return [
        (low, min(low + window, end))
        for start, end in ((0, kept_columns), (kept_columns, V))
        for low in range(start, end, window)
    ]


def _chunks(input, linear_weight, window, workspace, need_dinput, need_dweight):
    """The chunks of tokens of grad_in_forward and its windows: two lists of half-open ranges."""
    (n, d), V = input.shape, linear_weight.shape[0]
    on_cpu = input.device.type == "cpu"
    fixed, column, token = _chunk_costs(n, d, V, input.dtype, input.device.type, need_dinput, need_dweight)
    if not window:
        # A window only bounds what narrow operands cost: the widened weight, or a product to accumulate.
        logits_bytes = _CPU_LOGITS_BYTES if on_cpu else _GPU_LOGITS_BYTES
        window = V if not column else max(logits_bytes // column, _WINDOW_MULTIPLE)
        if workspace:
            spare = workspace - fixed - token * min(_LEAST_CHUNK, n)
            window = min(window, max(spare // max(column, 1), _WINDOW_MULTIPLE))
        window = min(window, V)
    chunk = (_CHUNK_BYTES if on_cpu else _GPU_LOGITS_BYTES) // token
    if workspace:
        chunk = min(chunk, (workspace - fixed - column * window) // token)
    chunk = max(chunk, _LEAST_CHUNK)
    return (
        [(low, min(low + chunk, n)) for low in range(0, n, chunk)],
        [(low, min(low + window, V)) for low in range(0, V, window)],
    )


# ----------------------------------------------------------------------------------------------------------
# Pieces


class _Operands:
    """The two factors of every matrix product, as the device multiplies them with an accumulation in acc."""

    def __init__(self, input: Tensor, linear_weight: Tensor):
        self.acc = accumulate_dtype(input.dtype)
        narrow = input.dtype is not self.acc
        self.rounded = narrow and _multiplies_narrow(input.device.type)
        self._widened = narrow and not self.rounded
        self._linear_weight = linear_weight
        self.hidden = input.to(self.acc) if self._widened else input

    def weight(self, low: int, high: int) -> Tensor:
        window = self._linear_weight[low:high]
        return window.to(self.acc) if self._widened else window


def _mm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    if a.dtype is out.dtype:
        return torch.mm(a, b, out=out)
    return torch.mm(a, b, out_dtype=out.dtype, out=out)


def _add_mm(accumulator: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype is accumulator.dtype:
        accumulator.addmm_(a, b)
    else:
        # torch.addmm with out_dtype wants an accumulator of the operands' dtype in torch 2.9.
        accumulator += torch.mm(a, b, out_dtype=accumulator.dtype)


class _Buffer:
    """One window of logits, reused by every window of a sweep."""

    def __init__(self, rows: int, ranges: list[tuple[int, int]], like: Tensor, dtype: torch.dtype):
        self._rows = rows
        self._storage = like.new_empty(
            rows * max((high - low for low, high in ranges), default=0), dtype=dtype
        )

    def window(self, columns: int) -> Tensor:
        return self._storage[: self._rows * columns].view(self._rows, columns)


def _classify(target: Tensor, ignore_index: int, V: int) -> tuple[Tensor, Tensor, Tensor]:
    """(valid, a class that exists for each row, rows with a target out of range); a CPU refuses the last."""
    valid = target != ignore_index
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


def _in_window(classes: Tensor, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Whether each row's class is in the window, and its column there as (n, 1); 0 stands for outside."""
    inside = (classes >= low) & (classes < high)
    return inside, torch.where(inside, classes - low, 0).unsqueeze(1)


def _subtract_target(exponentials: Tensor, classes: Tensor, row_sum: Tensor, low: int, high: int) -> None:
    """exp(z - row_max) - row_sum * onehot, in place: row_sum times the softmax minus the onehot."""
    inside, column = _in_window(classes, low, high)
    entry = exponentials.gather(1, column)
    entry -= torch.where(inside, row_sum, 0).unsqueeze(1)
    exponentials.scatter_(1, column, entry)


def _reduce(row_max, row_sum, target_logit, valid, out_of_range, reduction):
    """(loss, row_sum, num_valid); row_sum becomes nan where the target is out of range."""
    row_sum = row_sum.masked_fill(out_of_range, torch.nan)
    loss = torch.where(valid, row_sum.log() + (row_max - target_logit), 0)
    num_valid = valid.sum()
    if reduction != "none":
        loss = loss.sum()
        if reduction == "mean":
            loss = loss / num_valid.clamp(min=1)
    return loss, row_sum, num_valid


def row_upstream(dloss: Tensor, num_valid: Tensor, reduction: str) -> Tensor:
    """The gradient of the result by one row's loss: () or, for "none", (n,)."""
    return dloss / num_valid.clamp(min=1) if reduction == "mean" else dloss


# ----------------------------------------------------------------------------------------------------------
# The implementation


def _forward(input, linear_weight, target, ignore_index, reduction, window, workspace, kept, needs_gradient):
    n, V = input.shape[0], linear_weight.shape[0]
    operands = _Operands(input, linear_weight)
    valid, classes, out_of_range = _classify(target, ignore_index, V)
    kept_columns = kept.shape[1] if kept is not None else 0
    # The backward's windows are the larger ones, so that a plan that fits one sweep fits the other.
    ranges = _windows(input, linear_weight, window, workspace, needs_gradient, needs_gradient, kept_columns)
    buffer = _Buffer(n, ranges, input, operands.acc)
    # The least finite number stands for -inf, which would make nan of a window of -inf.
    row_max = input.new_full((n,), torch.finfo(operands.acc).min, dtype=operands.acc)
    row_sum = torch.zeros_like(row_max)
    target_logit = torch.zeros_like(row_max)
    for low, high in ranges:
        exponentials = buffer.window(high - low)
        logits = exponentials if kept is None or low >= kept_columns else kept[:, low:high]
        _mm(operands.hidden, operands.weight(low, high).mT, logits)
        inside, column = _in_window(classes, low, high)
        target_logit = torch.where(inside, logits.gather(1, column).squeeze(1), target_logit)
        new_max = torch.maximum(row_max, logits.amax(1))
        torch.sub(logits, new_max.unsqueeze(1), out=exponentials)
        row_sum = row_sum * (row_max - new_max).exp_() + exponentials.exp_().sum(1)
        row_max = new_max
    loss, row_sum, num_valid = _reduce(row_max, row_sum, target_logit, valid, out_of_range, reduction)
    return loss, row_max, row_sum, num_valid


@_without_autocast
def forward(input, linear_weight, target, ignore_index, reduction, window, workspace):
    """The paper's Algorithm 1, with windows for its single columns. See the module's docstring."""
    return _forward(input, linear_weight, target, ignore_index, reduction, window, workspace, None, False)


def loss(*arguments):
    """The loss alone of `forward`."""
    return forward(*arguments)[0]


def empty_kept(input, kept_columns):
    """Uninitialised (kept, kept_reference): logits (n, kept_columns) in acc; the reference is unused."""
    acc = accumulate_dtype(input.dtype)
    return input.new_empty((input.shape[0], kept_columns), dtype=acc), input.new_empty((0,), dtype=acc)


@_without_autocast
def forward_keep(input, linear_weight, target, ignore_index, reduction, window, workspace, kept_columns):
    """forward, which also keeps the logits of the first kept_columns of the vocabulary."""
    kept, kept_reference = empty_kept(input, kept_columns)
    loss, row_max, row_sum, num_valid = _forward(
        input, linear_weight, target, ignore_index, reduction, window, workspace, kept, True
    )
    return loss, row_max, row_sum, num_valid, kept, kept_reference


@_without_autocast
def backward(
    dloss,
    input,
    linear_weight,
    target,
    row_max,
    row_sum,
    num_valid,
    kept,
    kept_reference,
    ignore_index,
    reduction,
    window,
    workspace,
    need_dinput,
    need_dweight,
):
    """The paper's Algorithm 2: window by window, the logits again (or as kept), dlogits, and what they add.

    A row's dlogits are factor * (exp(z - row_max) - row_sum * onehot) with factor = upstream / row_sum. The
    factor enters outside the matrix products (dinput's rows at the end, a scaled copy of the hidden rows for
    dweight), except where narrow operands are multiplied: there dlogits are rounded once, with the factor in
    bf16, and as softmax - onehot in float16, whose range is too small for upstream / n.
    An ignored row's dlogits are 0 and its row of a scaled copy too, whatever it holds: 0 times nan is nan.
    """
    (n, d), V = input.shape, linear_weight.shape[0]
    operands = _Operands(input, linear_weight)
    acc, dtype = operands.acc, input.dtype
    valid = target != ignore_index
    ignored = ~valid.unsqueeze(1)
    classes = target.long().clamp(0, V - 1)
    kept_columns = kept.shape[1] if kept is not None else 0
    ranges = _windows(input, linear_weight, window, workspace, need_dinput, need_dweight, kept_columns)
    buffer = _Buffer(n, ranges, input, acc)

    upstream = torch.where(valid, row_upstream(dloss, num_valid, reduction), 0)
    inner = None
    outer = torch.where(valid, upstream / row_sum, 0)
    if operands.rounded:
        inner, outer = (
            (outer, None) if dtype is torch.bfloat16 else (torch.where(valid, 1 / row_sum, 0), upstream)
        )

    dinput = dweight = scaled_hidden = weight_scale = None
    if need_dinput:
        dinput = input.new_zeros((n, d), dtype=acc)
    if need_dweight:
        dweight = linear_weight.new_empty((V, d))
        scaled_hidden = operands.hidden
        if outer is not None and operands.rounded:
            # The largest factor stays out of the rounded copy and comes back in float32.
            weight_scale = outer.abs().amax().clamp(min=torch.finfo(acc).tiny) if n else outer.new_ones(())
            scaled_hidden = operands.hidden * (outer / weight_scale).unsqueeze(1)
            scaled_hidden = scaled_hidden.masked_fill_(ignored, 0).to(dtype)
        elif outer is not None:
            scaled_hidden = (operands.hidden * outer.unsqueeze(1)).masked_fill_(ignored, 0)

    for low, high in ranges:
        dlogits = buffer.window(high - low)
        weight = operands.weight(low, high)
        if kept is None or low >= kept_columns:
            _mm(operands.hidden, weight.mT, dlogits).sub_(row_max.unsqueeze(1))
        else:
            torch.sub(kept[:, low:high], row_max.unsqueeze(1), out=dlogits)
        _subtract_target(dlogits.exp_(), classes, row_sum, low, high)
        dlogits.masked_fill_(ignored, 0)
        if inner is not None:
            dlogits.mul_(inner.unsqueeze(1))
        if operands.rounded:
            dlogits = dlogits.to(dtype)
        if dinput is not None:
            _add_mm(dinput, dlogits, weight)
        if dweight is not None and scaled_hidden is not None:
            stripe = dweight[low:high]
            if dtype is dlogits.dtype and weight_scale is None:
                torch.mm(dlogits.mT, scaled_hidden, out=stripe)
            else:
                product = _mm(dlogits.mT, scaled_hidden, input.new_empty(stripe.shape, dtype=acc))
                stripe.copy_(product if weight_scale is None else product.mul_(weight_scale))
                del product
        # The next window's are made before these names are bound to them.
        del dlogits, weight
    if dinput is not None:
        dinput = (dinput if outer is None else dinput.mul_(outer.unsqueeze(1))).to(dtype)
    return dinput, dweight


@_without_autocast
def grad_in_forward(
    input, linear_weight, target, ignore_index, reduction, window, workspace, need_dinput, need_dweight
):
    """The paper's Algorithm 3: chunk by chunk over tokens, the logits once, and loss and gradients from them.

    The division of "mean" is not in the accumulators: scale_gradients has it, in the pass that rounds.
    """
    (n, d), V = input.shape, linear_weight.shape[0]
    valid, classes, out_of_range = _classify(target, ignore_index, V)
    acc = accumulate_dtype(input.dtype)
    chunks, ranges = _chunks(input, linear_weight, window, workspace, need_dinput, need_dweight)
    row_max, row_sum, target_logit = (input.new_empty((n,), dtype=acc) for _ in range(3))
    dinput = input.new_zeros((n, d), dtype=acc) if need_dinput else None
    dweight = linear_weight.new_zeros((V, d), dtype=acc) if need_dweight else None
    buffer = _Buffer(V, chunks, input, acc)
    for start, stop in chunks:
        operands = _Operands(input[start:stop], linear_weight)
        logits = buffer.window(stop - start).view(stop - start, V)
        for low, high in ranges:
            _mm(operands.hidden, operands.weight(low, high).mT, logits[:, low:high])
        column = classes[start:stop].unsqueeze(1)
        target_logit[start:stop] = logits.gather(1, column).squeeze(1)
        maximum = logits.amax(1).clamp_(min=torch.finfo(acc).min)
        total = logits.sub_(maximum.unsqueeze(1)).exp_().sum(1)
        row_max[start:stop], row_sum[start:stop] = maximum, total
        total = total.masked_fill(out_of_range[start:stop], torch.nan)
        logits.scatter_(1, column, logits.gather(1, column) - total.unsqueeze(1))
        factor = torch.where(valid[start:stop], 1 / total, 0).unsqueeze(1)
        ignored = ~valid[start:stop].unsqueeze(1)
        logits.masked_fill_(ignored, 0)
        if operands.rounded:
            dlogits, scaled_hidden = logits.mul_(factor).to(input.dtype), operands.hidden
        else:
            dlogits = logits
            scaled_hidden = (operands.hidden * factor).masked_fill_(ignored, 0) if need_dweight else None
        for low, high in ranges:
            if dinput is not None:
                _add_mm(dinput[start:stop], dlogits[:, low:high], operands.weight(low, high))
            if dweight is not None and scaled_hidden is not None:
                _add_mm(dweight[low:high], dlogits[:, low:high].mT, scaled_hidden)
        if dinput is not None and not operands.rounded:
            dinput[start:stop].mul_(factor)
    loss, _, num_valid = _reduce(row_max, row_sum, target_logit, valid, out_of_range, reduction)
    return loss, num_valid, dinput, dweight


@_without_autocast
def scale_gradients(dloss, num_valid, dinput_accumulator, dweight_accumulator, reduction, dtype):
    """The paper's Algorithm 4: round(upstream * accumulator), out of place, in one pass and the only cast."""
    upstream = row_upstream(dloss, num_valid, reduction)
    dinput = dweight = None
    if dinput_accumulator is not None:
        factor = upstream.unsqueeze(1) if reduction == "none" else upstream
        dinput = _scaled(dinput_accumulator, factor, dtype)
    if dweight_accumulator is not None:
        dweight = _scaled(dweight_accumulator, upstream, dtype)
    return dinput, dweight


def _scaled(accumulator: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """round(factor * accumulator), some rows at a time: a CPU makes a copy in acc of what it casts."""
    out = accumulator.new_empty(accumulator.shape, dtype=dtype)
    rows = accumulator.shape[0]
    step = rows if out.device.type != "cpu" else max(_CPU_LOGITS_BYTES // max(accumulator.shape[1] * 8, 1), 1)
    for low in range(0, rows, max(step, 1)):
        part = slice(low, low + step)
        torch.mul(accumulator[part], factor[part] if factor.dim() else factor, out=out[part])
    return out
