"""The kernels' host side: what one call allocates and launches. Same functions and signatures as streaming.py.

Arch-neutral: what differs between architectures is in the plan and behind `compiled`. Where a kernel does not exist
yet, the streaming implementation takes over from the kernels' row statistics.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from . import compiled, streaming
from . import plan as plans

_logger = logging.getLogger("cute_lce")

ARCHITECTURES = {(9, 0): "sm_90a"}
"""Compute capability -> the architecture that kernels are compiled for."""

REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}
"""The combine kernel's numbers for them."""

DTYPES = (torch.bfloat16, torch.float16)

empty_kept = streaming.empty_kept
forward_keep = streaming.forward_keep
grad_in_forward = streaming.grad_in_forward
scale_gradients = streaming.scale_gradients


def plan(n, d, V, dtype, device_type, schedule, reduction, need_dinput, need_dweight, window, workspace):
    """Decide the schedule and how many columns it keeps: (schedule, kept_columns). See streaming.plan.

    "auto" is "recompute", the one that has kernels; the others are the streaming implementation's.
    """
    if schedule in ("keep", "grad_in_forward") and (need_dinput or need_dweight):
        return streaming.plan(
            n, d, V, dtype, device_type, schedule, reduction, need_dinput, need_dweight, window, workspace
        )
    if workspace:
        least = plans.forward_bytes(n, V)
        if need_dinput or need_dweight:
            columns = min(window or plans.LEAST_STRIPE, V)
            least = max(least, plans.backward_bytes(n, d, V, columns, dtype is torch.float16, need_dinput))
        if workspace < least:
            raise streaming.refuse_workspace(schedule, workspace, least)
    return "recompute", 0


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for tensors of this device and dtype."""
    return dtype in DTYPES and torch.cuda.get_device_capability(device) in ARCHITECTURES


@functools.cache
def _architecture(device: torch.device) -> tuple[str, int]:
    """(architecture, SMs) of a device."""
    properties = torch.cuda.get_device_properties(device)
    return ARCHITECTURES[properties.major, properties.minor], properties.multi_processor_count


@functools.lru_cache(maxsize=4096)
def _prepare(device, dtype, target_dtype, n, d, V, window, workspace):
    """(plan, compiled function) of a forward: one dictionary look-up in the steady state."""
    arch, sms = _architecture(device)
    chosen = plans.forward(arch, n, d, V, sms, window, workspace)
    return chosen, compiled.forward(chosen.config, _name(dtype), _name(target_dtype))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rows(name: str, tensor: Tensor) -> Tensor:
    """The tensor itself if TMA can read its rows, else a copy whose rows are padded with zeros to 16 bytes."""
    rows, d = tensor.shape
    pitch = tensor.stride(0) if rows > 1 else d
    if tensor.stride(1) == 1 and d % 8 == 0 and pitch % 8 == 0 and pitch >= d and tensor.data_ptr() % 16 == 0:
        return tensor
    copy = tensor.new_zeros(rows, -(-d // 8) * 8)
    copy[:, :d] = tensor
    _log_copy(name, tuple(tensor.shape), tuple(tensor.stride()), copy.nbytes)
    return copy


@functools.cache
def _log_copy(name: str, shape: tuple[int, ...], stride: tuple[int, ...], nbytes: int) -> None:
    _logger.warning(
        "%s of shape %s and strides %s: the kernels want consecutive features, a multiple of 8 of them, and rows that "
        "begin at multiples of 16 bytes; every call makes a padded copy of %d bytes",
        name,
        shape,
        stride,
        nbytes,
    )


def forward(input, linear_weight, target, ignore_index, reduction, window, workspace):
    """The paper's Algorithm 1 with windows: one GEMM whose logits stay in registers, and one small kernel."""
    device, n = input.device, input.shape[0]
    loss = torch.empty((n,) if reduction == "none" else (), dtype=torch.float32, device=device)
    row_max = torch.empty((n,), dtype=torch.float32, device=device)
    row_sum = torch.empty((n,), dtype=torch.float32, device=device)
    num_valid = torch.empty((), dtype=torch.int64, device=device)
    if n == 0:
        return loss.zero_(), row_max, row_sum, num_valid.zero_()
    hidden, weight = _rows("input", input), _rows("linear_weight", linear_weight)
    if target.stride(0) != 1:
        target = target.contiguous()
    chosen, function = _prepare(
        device, hidden.dtype, target.dtype, n, hidden.shape[1], weight.shape[0], window, workspace
    )
    scratch = torch.empty((chosen.workspace_floats,), dtype=torch.float32, device=device)
    function(
        hidden,
        weight,
        target,
        ignore_index,
        REDUCTIONS[reduction],
        loss.data_ptr(),
        row_max.data_ptr(),
        row_sum.data_ptr(),
        num_valid.data_ptr(),
        scratch.data_ptr(),
        chosen.windows,
        chosen.tiles_per_window,
        chosen.group_m,
        chosen.clusters,
        chosen.paced,
    )
    return loss, row_max, row_sum, num_valid


@functools.lru_cache(maxsize=4096)
def _prepare_backward(device, dtype, target_dtype, n, d, V, need_dinput, window, workspace):
    """(plan, compiled function) of a backward."""
    arch, sms = _architecture(device)
    chosen = plans.backward(arch, n, d, V, sms, dtype is torch.float16, need_dinput, window, workspace)
    return chosen, compiled.backward(chosen.logits, chosen.gradient, _name(dtype), _name(target_dtype))


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
    """The paper's Algorithm 2 in stripes: logits again, dlogits, and the two gradients' GEMMs; see kernels.backward.

    float16 cannot hold upstream / n: its dlogits are softmax - onehot, dinput's rows are scaled when they are rounded,
    and dweight is made with a copy of the hidden rows scaled by factor / max factor, the maximum applied at the end.
    """
    if kept is not None or input.shape[0] == 0:
        return streaming.backward(
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
        )
    device, dtype = input.device, input.dtype
    hidden, weight = _rows("input", input), _rows("linear_weight", linear_weight)
    (n, d), V = hidden.shape, weight.shape[0]
    if target.stride(0) != 1:
        target = target.contiguous()
    chosen, function = _prepare_backward(device, dtype, target.dtype, n, d, V, need_dinput, window, workspace)
    scaled_hidden, factor, weight_factor = hidden, row_sum, row_sum
    if dtype is torch.float16:
        factor = torch.where(target != ignore_index, streaming.row_upstream(dloss, num_valid, reduction), 0)
        weight_factor = factor.abs().amax().clamp_(min=torch.finfo(torch.float32).tiny)
        scaled_hidden = (hidden * (factor / weight_factor).unsqueeze(1)).to(dtype)
    several = len(chosen.stripes) > 1
    dinput = hidden.new_empty((n, d)) if need_dinput else None
    dweight = weight.new_empty((V, d)) if need_dweight else None
    dlogits = hidden.new_empty((n, chosen.pitch))
    accumulator = torch.empty((n, d) if need_dinput and several else (0,), dtype=torch.float32, device=device)
    progress = torch.zeros((3 * len(chosen.stripes),), dtype=torch.int32, device=device)
    for i, (first, columns, ints) in enumerate(chosen.stripes):
        function(
            hidden,
            weight,
            scaled_hidden,
            target,
            ignore_index,
            reduction == "mean",
            dloss.data_ptr(),
            dloss.stride(0) if dloss.dim() else 0,
            row_max.data_ptr(),
            row_sum.data_ptr(),
            num_valid.data_ptr(),
            factor.data_ptr(),
            weight_factor.data_ptr(),
            dlogits.data_ptr(),
            accumulator.data_ptr(),
            0 if dinput is None else dinput.data_ptr(),
            0 if dweight is None else dweight.data_ptr(),
            progress.data_ptr() + 12 * i,
            chosen.pitch,
            first,
            columns,
            i == 0,
            i == len(chosen.stripes) - 1,
            ints,
        )
    if d != input.shape[1]:
        dinput, dweight = (
            None if gradient is None else gradient[:, : input.shape[1]].contiguous() for gradient in (dinput, dweight)
        )
    return dinput, dweight
