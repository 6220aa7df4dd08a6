"""The kernels' host side: what a call allocates and launches. Functions and signatures of streaming.py.

Arch-neutral: what differs between architectures is in the plan and behind `compiled`. Where a kernel does
not exist yet, the streaming implementation takes over from the kernels' row statistics.
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from . import compiled, streaming
from . import plan as plans

_logger = logging.getLogger("cute_lce")

ARCHITECTURES = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}
"""Compute capability -> the architecture that kernels are compiled for."""

LEAST_KEPT = 1 << 33
"""n d V below which "auto" does not keep: the logits' GEMM takes less time than keeping does."""

REDUCTIONS = {"none": 0, "sum": 1, "mean": 2}
"""The combine kernel's numbers for them."""

DTYPES = (torch.bfloat16, torch.float16)

grad_in_forward = streaming.grad_in_forward
scale_gradients = streaming.scale_gradients


def plan(n, d, V, dtype, device_type, schedule, reduction, need_dinput, need_dweight, window, workspace):
    """Decide the schedule and how many columns it keeps: (schedule, kept_columns). See streaming.plan.

    "auto" keeps what the workspace holds in bf16, and recomputes in float16, which cannot keep, and small
    products. "grad_in_forward" is the streaming implementation's.
    """
    wants_gradient = need_dinput or need_dweight
    half = dtype is torch.float16
    if schedule == "grad_in_forward" and wants_gradient:
        return streaming.plan(
            n, d, V, dtype, device_type, schedule, reduction, need_dinput, need_dweight, window, workspace
        )
    if schedule == "keep" and half and wants_gradient:
        raise ValueError(
            "schedule: got 'keep' with float16, whose range cannot hold the exponentials; want bfloat16, "
            "'recompute' or 'auto'"
        )
    if workspace:
        least = plans.forward_bytes(n, V)
        if wants_gradient:
            columns = min(window or plans.LEAST_STRIPE, V)
            least = max(least, plans.backward_bytes(n, d, V, columns, half, need_dinput, need_dweight))
        if workspace < least:
            raise streaming.refuse_workspace(schedule, workspace, least)
    if schedule == "recompute" or half or not wants_gradient or n == 0 or V < plans.LEAST_UNIT:
        return "recompute", 0
    if schedule == "auto" and n * d * V < LEAST_KEPT:
        return "recompute", 0
    kept = plans.kept_columns(n, d, V, need_dinput, need_dweight, window, workspace)
    return ("keep", kept) if kept > 0 else ("recompute", 0)


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for tensors of this device and dtype."""
    return dtype in DTYPES and torch.cuda.get_device_capability(device) in ARCHITECTURES


@functools.cache
def _architecture(device: torch.device) -> tuple[str, int]:
    """(architecture, SMs) of a device. Raises RuntimeError where its driver cannot load the kernels."""
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    name = f"{device} ({properties.name}, compute capability {capability[0]}.{capability[1]})"
    compiled.check_driver(ARCHITECTURES[capability], name)
    return ARCHITECTURES[capability], properties.multi_processor_count


@functools.lru_cache(maxsize=4096)
def _prepare(device, dtype, target_dtype, n, d, V, window, workspace, keeps):
    """(plan, compiled function) of a forward: one dictionary look-up in the steady state."""
    arch, sms = _architecture(device)
    # What is kept is stored between MMAs, which wants the configuration whose epilogue hides best.
    config = plans.configs(arch)[0] if keeps else None
    chosen = plans.forward(arch, n, d, V, sms, window, workspace, config)
    return chosen, compiled.forward(chosen.config, _name(dtype), _name(target_dtype), keeps)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _rows(name: str, tensor: Tensor) -> Tensor:
    """The tensor if TMA can read its rows, else a copy whose rows are padded with zeros to 16 bytes."""
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
        "%s of shape %s and strides %s: the kernels want consecutive features, a multiple of 8 of them, and "
        "rows that begin at multiples of 16 bytes; every call makes a padded copy of %d bytes",
        name,
        shape,
        stride,
        nbytes,
    )


def forward(input, linear_weight, target, ignore_index, reduction, window, workspace):
    """The paper's Algorithm 1 with windows: one GEMM whose logits stay in registers, and one small kernel.

    input (n, d) and linear_weight (V, d), both bfloat16 or both float16, any strides; target (n,) int64 or
    int32. What the kernels cannot read in place is copied (`_rows`). ignore_index: an int. reduction: "none",
    "sum" or "mean". window: columns of a window, rounded up to whole tiles, 0 or None: the plan's choice.
    workspace: bytes that may be allocated, 0: no cap.
    Returns loss fp32, (n,) or (); row_max and row_sum (n,) fp32, of the logits; num_valid () int64, the
    targets that are not ignored. A target out of range makes its row's loss and row_sum nan. With n = 0
    nothing is launched. Allocates these, the plan's workspace (4 workspace_floats bytes) and the copies;
    never synchronises; runs on torch's current stream of input's device. Arguments are checked in ops.py.
    Raises what `compiled.forward` does, on the first call of a configuration.
    """
    return _forward(
        input, linear_weight, target, ignore_index, reduction, window, workspace, True, None, None
    )


def loss(input, linear_weight, target, ignore_index, reduction, window, workspace):
    """The loss alone of `forward`, whose statistics stay in the workspace."""
    return _forward(
        input, linear_weight, target, ignore_index, reduction, window, workspace, False, None, None
    )[0]


def _raised_bytes(columns: int) -> int:
    """Bytes a row of a keeping forward's notes: its reference, its highest raise, a raise for each unit."""
    return 8 + -(-columns // plans.LEAST_UNIT)


def empty_kept(input, kept_columns):
    """Uninitialised: exponentials (n, kept_columns rounded up to 8), and a factor a row, (n,) fp32."""
    n = input.shape[0]
    return input.new_empty((n, -(-kept_columns // 8) * 8)), input.new_empty((n,), dtype=torch.float32)


def forward_keep(input, linear_weight, target, ignore_index, reduction, window, workspace, kept_columns):
    """forward, which also keeps the first kept_columns columns' exponentials; see kernels.keep."""
    kept, kept_scale = empty_kept(input, kept_columns)
    if workspace:
        workspace = max(workspace - kept.nbytes - _raised_bytes(kept_columns) * input.shape[0], 1)
    results = _forward(
        input,
        linear_weight,
        target,
        ignore_index,
        reduction,
        window,
        workspace,
        True,
        (kept, kept_columns),
        kept_scale,
    )
    return *results, kept, kept_scale


def _forward(
    input, linear_weight, target, ignore_index, reduction, window, workspace, statistics, keep, kept_scale
):
    device, n = input.device, input.shape[0]
    loss = torch.empty((n,) if reduction == "none" else (), dtype=torch.float32, device=device)
    row_max = row_sum = num_valid = loss
    if statistics or n == 0:
        # new_empty of a tensor's own dtype takes half the time of torch.empty.
        row_max, row_sum = loss.new_empty((n,)), loss.new_empty((n,))
        num_valid = (
            target.new_empty(())
            if target.dtype is torch.int64
            else torch.empty((), dtype=torch.int64, device=device)
        )
    if n == 0:
        return loss.zero_(), row_max, row_sum, num_valid.zero_()
    hidden, weight = _rows("input", input), _rows("linear_weight", linear_weight)
    if target.stride(0) != 1:
        target = target.contiguous()
    chosen, function = _prepare(
        device,
        hidden.dtype,
        target.dtype,
        n,
        hidden.shape[1],
        weight.shape[0],
        window,
        workspace,
        keep is not None,
    )
    scratch = loss.new_empty((chosen.workspace_floats + (0 if statistics else 2 * n + 3),))
    addresses = row_max.data_ptr(), row_sum.data_ptr(), num_valid.data_ptr()
    if not statistics:
        # Behind the workspace, the count at a multiple of 8 bytes.
        behind = scratch.data_ptr() + 8 * (-(-chosen.workspace_floats // 2))
        addresses = behind + 8, behind + 8 + 4 * n, behind
    kept_arguments = (0, 0, 0, 0, 0)
    if keep is not None:
        kept, columns = keep
        raised = torch.empty((_raised_bytes(columns) * n,), dtype=torch.uint8, device=device)
        kept_arguments = kept.data_ptr(), kept_scale.data_ptr(), raised.data_ptr(), kept.stride(0), columns
    function(
        hidden,
        weight,
        target,
        ignore_index,
        REDUCTIONS[reduction],
        loss.data_ptr(),
        *addresses,
        scratch.data_ptr(),
        chosen.windows,
        chosen.tiles_per_window,
        chosen.group_m,
        chosen.clusters,
        chosen.paced,
        *kept_arguments,
    )
    return loss, row_max, row_sum, num_valid


@functools.lru_cache(maxsize=4096)
def _prepare_backward(
    device, dtype, target_dtype, n, d, V, need_dinput, need_dweight, kept, window, workspace
):
    """(plan, compiled function) of a backward."""
    arch, sms = _architecture(device)
    half = dtype is torch.float16
    chosen = plans.backward(arch, n, d, V, sms, half, need_dinput, need_dweight, kept, window, workspace)
    return chosen, compiled.backward(
        chosen.logits, chosen.dhidden, chosen.dweight, _name(dtype), _name(target_dtype)
    )


@functools.cache
def _one(device: torch.device) -> Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


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
    """The paper's Algorithm 2 in stripes: logits again, dlogits, the gradients' GEMMs; see kernels.backward.

    float16 cannot hold upstream / n: its dlogits are softmax - onehot, dinput's rows are scaled when they
    are rounded, and dweight is made with a copy of the hidden rows scaled by factor / max factor, the
    maximum applied at the end.
    Columns that were kept need no dlogits: a row's factor is its upstream gradient times kept_reference.
    """
    device, dtype, n = input.device, input.dtype, input.shape[0]
    if n == 0:
        return (
            torch.zeros_like(input, memory_format=torch.contiguous_format) if need_dinput else None,
            torch.zeros_like(linear_weight, memory_format=torch.contiguous_format) if need_dweight else None,
        )
    hidden, weight = _rows("input", input), _rows("linear_weight", linear_weight)
    d, V = hidden.shape[1], weight.shape[0]
    if target.stride(0) != 1:
        target = target.contiguous()
    kept_columns = 0 if kept is None else min(kept.shape[1], V)
    chosen, function = _prepare_backward(
        device, dtype, target.dtype, n, d, V, need_dinput, need_dweight, kept_columns, window, workspace
    )
    one = _one(device)
    # The factor of dinput's rows and its stride, dweight's operand and its factor: of what is recomputed.
    factor, factor_stride, scaled_hidden, weight_factor = one, 0, hidden, one
    if dtype is torch.float16:
        factor = torch.where(target != ignore_index, streaming.row_upstream(dloss, num_valid, reduction), 0)
        factor_stride = 1
        weight_factor = factor.abs().amax().clamp_(min=torch.finfo(torch.float32).tiny)
        scaled_hidden = (hidden * (factor / weight_factor).unsqueeze(1)).to(dtype)
    # The same of what was kept, which the kernels write.
    kept_factor, kept_hidden = one, hidden
    if kept is not None:
        kept_factor = torch.empty((n,), dtype=torch.float32, device=device)
        if need_dweight:
            kept_hidden = torch.empty_like(hidden)
    dinput = hidden.new_empty((n, d)) if need_dinput else None
    dweight = weight.new_empty((V, d)) if need_dweight else None
    dlogits = hidden.new_empty((n, chosen.pitch))
    several = need_dinput and len(chosen.stripes) > 1
    accumulator = torch.empty((n, d) if several else (0,), dtype=torch.float32, device=device)
    progress = torch.zeros((3 * len(chosen.stripes),), dtype=torch.int32, device=device)
    for i, (first, columns, ints) in enumerate(chosen.stripes):
        is_kept = first < kept_columns
        matrix = dlogits if kept is None or not is_kept else kept
        function(
            hidden,
            weight,
            kept_hidden if is_kept else scaled_hidden,
            target,
            ignore_index,
            reduction == "mean",
            dloss.data_ptr(),
            dloss.stride(0) if dloss.dim() else 0,
            row_max.data_ptr(),
            row_sum.data_ptr(),
            num_valid.data_ptr(),
            (kept_factor if is_kept else factor).data_ptr(),
            1 if is_kept else factor_stride,
            (one if is_kept else weight_factor).data_ptr(),
            matrix.data_ptr(),
            accumulator.data_ptr(),
            0 if dinput is None else dinput.data_ptr(),
            0 if dweight is None else dweight.data_ptr(),
            kept_reference.data_ptr() if is_kept else 0,
            progress.data_ptr() + 12 * i,
            matrix.stride(0),
            first,
            columns,
            i == 0,
            i == len(chosen.stripes) - 1,
            ints,
        )
    if d != input.shape[1]:
        dinput, dweight = (
            None if gradient is None else gradient[:, : input.shape[1]].contiguous()
            for gradient in (dinput, dweight)
        )
    return dinput, dweight
