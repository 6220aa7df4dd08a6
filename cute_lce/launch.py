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

plan = streaming.plan
empty_kept = streaming.empty_kept
forward_keep = streaming.forward_keep
backward = streaming.backward
grad_in_forward = streaming.grad_in_forward
scale_gradients = streaming.scale_gradients


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for tensors of this device and dtype."""
    return dtype in DTYPES and torch.cuda.get_device_capability(device) in ARCHITECTURES


@functools.cache
def _architecture(device: torch.device) -> tuple[str, int]:
    """(architecture, SMs) of a device."""
    properties = torch.cuda.get_device_properties(device)
    return ARCHITECTURES[properties.major, properties.minor], properties.multi_processor_count


@functools.lru_cache(maxsize=4096)
def _prepare(device, dtype, target_dtype, n, d, V, window):
    """(plan, compiled function) of a forward: one dictionary look-up in the steady state."""
    arch, sms = _architecture(device)
    chosen = plans.forward(arch, n, d, V, sms, window)
    names = str(dtype).removeprefix("torch."), str(target_dtype).removeprefix("torch.")
    return chosen, compiled.forward(chosen.config, *names)


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
        device, hidden.dtype, target.dtype, n, hidden.shape[1], weight.shape[0], window
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
