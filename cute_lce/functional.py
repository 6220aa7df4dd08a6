"""The public call."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from . import ops, options
from .options import ComputeOptions, LossOptions

_fused_linear_cross_entropy = torch.ops.cute_lce.fused_linear_cross_entropy.default


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    schedule: str = "auto",
    workspace_mb: float | None = None,
    window: int | None = None,
) -> Tensor:
    """Cross entropy of ``input @ linear_weight.T`` with class indices, without the logits in memory.

    Names and order are those of torch.nn.functional.linear_cross_entropy; reference.linear_cross_entropy is
    the definition. The one difference from torch: if every target is ignored, "mean" gives 0 and zero
    gradients where torch gives nan.

    Args:
        input: (..., d), the hidden states: bfloat16, float16, float32 or float64, any strides (where neither
            rows nor columns are consecutive elements, a copy may be made).
        linear_weight: (V, d), input's dtype and device, any strides.
        target: (...), class indices in [0, V) or ignore_index: int64 or int32, input's device, any strides.
        reduction: "mean" divides the sum of the rows' losses by the number of targets that are not ignored;
            "sum"; or "none", which accepts any upstream gradient (expanded, strided).
        ignore_index: rows with this target have loss 0 and no gradient. None means -100, as in torch. A nan
            or inf in such a row of input does not matter, except that on a GPU "recompute" in bfloat16 and
            "grad_in_forward" in bfloat16 and float16 make linear_weight's gradient nan, as torch does.
        schedule: how the backward obtains the logits.
            "recompute" computes them again, window by window: the least memory, any upstream gradient.
            "keep" keeps from forward to backward as many of their columns as workspace_mb holds, and
            recomputes the others: any upstream gradient.
            "grad_in_forward" forms the gradients in the forward, for a scalar upstream gradient, and holds
            them in float32 (4 (n + V) d bytes) until the backward. Reduction "none" then requires a
            linear_weight that needs no gradient.
            "auto" picks one that can serve the call; the streaming path takes "recompute", or "keep" where
            workspace_mb is given. If nothing needs a gradient, every schedule is a forward that keeps
            nothing.
        workspace_mb: the most that the call, its backward included, may allocate beyond its results (the loss
            and the gradients), in MiB (2**20 bytes). None means the environment's CUTE_LCE_WORKSPACE_MB, or
            2304, raised automatically if a call needs more; a number is never raised. By prediction,
            "auto" and "recompute" are never slower with more, and with the least that the kernels accept take
            1.8 times as long as the matrix products alone, or 1.5 times the best where that is longer.
        window: columns of the vocabulary per window; None: chosen from the shapes. It changes results by
            rounding only.

    Returns:
        The loss in nats, float32 (float64 for float64): target's shape for "none", else a scalar.

    Each gradient has the dtype of its tensor; it is accumulated in float32 (float64 for float64) and rounded
    once. Under autocast, input and linear_weight are cast as torch's linear casts them. Differentiating a
    gradient again raises RuntimeError ("grad_in_forward" raises at once under create_graph=True), and so does
    forward-mode differentiation. torch.func's vmap supports every schedule, its grad, vjp and jacrev all but
    "grad_in_forward"; batched calls are computed one after another.

    Raises:
        TypeError: a dtype, or a Python type, other than the above.
        ValueError: a shape, a value or a device other than the above; a workspace_mb too small for the
            schedule (it names the least that fits); on a CPU, a target outside [0, V) that is not
            ignore_index. On a GPU, where checking would synchronise, such a row's loss and its input's
            gradient, and hence the weight's gradient, are nan, whatever its upstream gradient, and nothing
            outside the tensors is read; CUTE_LCE_CHECK_TARGETS=1 in the environment makes it a device-side
            assertion there.
    """
    if workspace_mb is None:
        workspace_mb = options.DEFAULT_WORKSPACE_MB
    values = reduction, ignore_index, schedule, workspace_mb, window
    plain = ops.is_plain_eager(input, linear_weight, target)
    loss, compute = _remembered_options(values) if plain else _options(*values)
    return call(input, linear_weight, target, loss, compute, plain)


def _options(*values: Any) -> tuple[LossOptions, ComputeOptions]:
    """Both objects of their fields' values, in order."""
    fields = len(LossOptions._fields)
    return LossOptions(*values[:fields]), ComputeOptions(*values[fields:])


_known_options = functools.lru_cache(maxsize=1024, typed=True)(_options)


def _remembered_options(values: tuple) -> tuple[LossOptions, ComputeOptions]:
    """The same, checked once for the same values."""
    try:
        return _known_options(*values)
    except TypeError:
        # A value that cannot be hashed, or one that is refused, which happens again here.
        return _options(*values)


def call(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    loss: LossOptions,
    compute: ComputeOptions,
    plain: bool,
) -> Tensor:
    """linear_cross_entropy with options that are made already. plain: ops.is_plain_eager of the tensors."""
    if plain:
        return ops.linear_cross_entropy(input, linear_weight, target, loss, compute, watched=False)
    for name, value in (("input", input), ("linear_weight", linear_weight), ("target", target)):
        if not isinstance(value, Tensor):
            raise TypeError(f"{name}: got {type(value).__name__}, want a torch.Tensor")
    return _fused_linear_cross_entropy(input, linear_weight, target, **loss._asdict(), **compute._asdict())
