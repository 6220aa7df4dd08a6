"""The kernels' host side: what a call allocates and launches. Functions and signatures of streaming.py.

Arch-neutral: what differs between architectures is in the plan and behind `compiled`. Where a kernel does
not exist yet, the streaming implementation takes over from the kernels' row statistics.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

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

ALIGNMENT = 256
"""Bytes at whose multiples the parts of a backward's workspace begin."""

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
        least = plans.forward_bytes(n)
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
    config = plans.keep_config(arch) if keeps else None
    chosen = plans.forward(arch, n, d, V, sms, window, workspace, config)
    return chosen, compiled.get(plans.forward_key(chosen.config, _name(dtype), _name(target_dtype), keeps))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _in_place(tensor: Tensor) -> bool:
    """Whether TMA can read a matrix with these strides, if it begins at a multiple of 16 bytes."""
    rows, d = tensor.shape
    pitch = tensor.stride(0) if rows > 1 else d
    return tensor.stride(1) == 1 and d % 8 == 0 and pitch % 8 == 0 and pitch >= d


def _rows(name: str, tensor: Tensor) -> Tensor:
    """The tensor if TMA can read its rows, else a copy whose rows are padded with zeros to 16 bytes."""
    if _in_place(tensor) and tensor.data_ptr() % 16 == 0:
        return tensor
    rows, d = tensor.shape
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


def forward(input, linear_weight, target, *options):
    """The paper's Algorithm 1 with windows: one GEMM whose logits stay in registers, and one small kernel.

    input (n, d) and linear_weight (V, d), both bfloat16 or both float16, any strides; target (n,) int64 or
    int32. What the kernels cannot read in place is copied (`_rows`). options: ignore_index, an int;
    reduction, "none", "sum" or "mean"; window, columns of a window, rounded up to whole tiles, 0 or None: the
    plan's choice; workspace, bytes that may be allocated, 0: no cap.
    Returns loss fp32, (n,) or (); row_max and row_sum (n,) fp32, of the logits; num_valid () int64, the
    targets that are not ignored. A target out of range makes its row's loss and row_sum nan. With n = 0
    nothing is launched. Allocates these, the plan's workspace (4 workspace_floats bytes) and the copies;
    never synchronises; runs on torch's current stream of input's device. Arguments are checked in ops.py.
    Raises what `compiled.get` does, on the first call of a configuration.
    """
    return bind("forward", input, linear_weight, target, *options)(input, linear_weight, target)


def loss(input, linear_weight, target, *options):
    """The loss alone of `forward`, whose statistics stay in the workspace."""
    return bind("loss", input, linear_weight, target, *options)(input, linear_weight, target)


def forward_keep(input, linear_weight, target, *options):
    """forward, which also keeps the first kept_columns columns' exponentials; see kernels.keep.

    options: forward's, and kept_columns.
    """
    return bind("forward_keep", input, linear_weight, target, *options)(input, linear_weight, target)


def bind(function, input, linear_weight, target, *options) -> Callable[..., Any]:
    """One of the three above for operands like these, of (input, linear_weight, target).

    It may serve any operands of the same devices, dtypes, shapes and strides; what these decide is decided
    here and once.
    """
    if input.shape[0] == 0:
        return functools.partial(_no_rows, function, options)
    return _Forward(function, input, linear_weight, target, *options)


def _no_rows(function, options, input, linear_weight, target):
    """What the forwards return without launching anything."""
    like = input.new_zeros((0,), dtype=torch.float32)
    loss = like if options[1] == "none" else like.new_zeros(())
    if function == "loss":
        return loss
    statistics = loss, like.new_empty((0,)), like.new_empty((0,)), like.new_zeros((), dtype=torch.int64)
    return statistics if function == "forward" else (*statistics, *empty_kept(input, options[4]))


def _raised_bytes(columns: int) -> int:
    """Bytes a row of a keeping forward's notes: its reference, its highest raise, and a raise a unit."""
    return 8 + plans.NOTE_BYTES * -(-columns // plans.LEAST_UNIT)


def empty_kept(input, kept_columns):
    """Uninitialised: exponentials (n, kept_columns rounded up to 8), and a factor a row, (n,) fp32."""
    n = input.shape[0]
    return input.new_empty((n, -(-kept_columns // 8) * 8)), input.new_empty((n,), dtype=torch.float32)


@functools.lru_cache(maxsize=4096)
def _like(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """To allocate others like: empty_like takes two thirds of the time of empty. Its values may not be read.

    It owns no memory: what it took of a CUDA graph's pool and kept would be a leak there. Its storage is
    emptied last, since a view of an empty one is refused.
    """
    like = torch.empty((), dtype=dtype, device=device).expand(shape)
    like.untyped_storage().resize_(0)
    return like


class _Forward:
    """A forward of operands of one kind: what it allocates and launches; see `bind`."""

    def __init__(
        self,
        function,
        input,
        linear_weight,
        target,
        ignore_index,
        reduction,
        window,
        workspace,
        kept_columns=0,
    ):
        device, (n, d) = input.device, input.shape
        self.statistics, self.kept_columns = function != "loss", kept_columns
        # A pointer is looked at in every call.
        self.in_place = _in_place(input) and _in_place(linear_weight) and target.stride(0) == 1
        if kept_columns and workspace:
            kept_bytes = -(-kept_columns // 8) * 8 * input.itemsize + 4 + _raised_bytes(kept_columns)
            workspace = max(workspace - kept_bytes * n, 1)
        chosen, self.function = _prepare(
            device,
            input.dtype,
            target.dtype,
            n,
            -(-d // 8) * 8,
            linear_weight.shape[0],
            window,
            workspace,
            kept_columns > 0,
        )
        # The statistics that nobody wants stand behind the workspace, the count at a multiple of 8 bytes.
        self.behind = 8 * (-(-chosen.workspace_floats // 2))
        self.row_bytes = 4 * n
        self.row, self.count = _like(device, torch.float32, n), _like(device, torch.int64)
        self.loss = self.row if reduction == "none" else _like(device, torch.float32)
        self.scratch = _like(
            device, torch.float32, chosen.workspace_floats + (0 if self.statistics else 2 * n + 3)
        )
        self.head = ignore_index, REDUCTIONS[reduction]
        self.tail = (
            chosen.windows,
            chosen.tiles_per_window,
            chosen.group_m,
            chosen.clusters,
            int(chosen.paced),
        )
        self.raised = _like(device, torch.uint8, _raised_bytes(kept_columns) * n)

    def __call__(self, input, linear_weight, target):
        hidden, weight = input, linear_weight
        if not self.in_place or (hidden.data_ptr() | weight.data_ptr()) % 16:
            hidden, weight = _rows("input", hidden), _rows("linear_weight", weight)
            target = target.contiguous()
        loss, scratch = torch.empty_like(self.loss), torch.empty_like(self.scratch)
        workspace = scratch.data_ptr()
        if self.statistics:
            row_max, row_sum = torch.empty_like(self.row), torch.empty_like(self.row)
            num_valid = torch.empty_like(self.count)
            results = loss, row_max, row_sum, num_valid
            addresses = row_max.data_ptr(), row_sum.data_ptr(), num_valid.data_ptr()
        else:
            results, behind = loss, workspace + self.behind
            addresses = behind + 8, behind + 8 + self.row_bytes, behind
        keep = (0, 0, 0, 0, 0)
        if self.kept_columns:
            kept, kept_scale = empty_kept(input, self.kept_columns)
            raised = torch.empty_like(self.raised)
            keep = (
                kept.data_ptr(),
                kept_scale.data_ptr(),
                raised.data_ptr(),
                kept.stride(0),
                self.kept_columns,
            )
            results = *results, kept, kept_scale
        self.function(
            hidden, weight, target, *self.head, loss.data_ptr(), *addresses, workspace, *self.tail, *keep
        )
        return results


class _Backward:
    """A backward of operands of one kind: its plan, where things lie in its workspace, its launches.

    stripes: of each, whether it is kept, and the launch's arguments behind the addresses.
    """

    def __init__(
        self, device, dtype, target_dtype, n, d, V, need_dinput, need_dweight, kept, window, workspace
    ):
        arch, sms = _architecture(device)
        half = dtype is torch.float16
        chosen = plans.backward(arch, n, d, V, sms, half, need_dinput, need_dweight, kept, window, workspace)
        configs = chosen.logits, chosen.dhidden, chosen.dweight
        self.function = compiled.get(plans.backward_key(*configs, _name(dtype), _name(target_dtype)))
        self.pitch = chosen.pitch
        self.stripes = [
            (first < kept, (first, columns, i == 0, i == len(chosen.stripes) - 1, *ints))
            for i, (first, columns, ints) in enumerate(chosen.stripes)
        ]
        self.paced = any(any(ints[3 :: len(ints) // 3]) for _, _, ints in chosen.stripes)
        sizes = {
            "kept_factor": 4 * n if kept else 0,
            "kept_hidden": n * d * dtype.itemsize if kept and need_dweight else 0,
            "dlogits": n * chosen.pitch * dtype.itemsize,
            "accumulator": 4 * n * d if need_dinput and len(chosen.stripes) > 1 else 0,
        }
        self.offsets, total = [], 0
        for size in sizes.values():
            self.offsets.append(total)
            total += -(-size // ALIGNMENT) * ALIGNMENT
        self.workspace = _like(device, torch.uint8, total)


_prepare_backward = functools.lru_cache(maxsize=4096)(_Backward)


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
    prepared = _prepare_backward(
        device,
        dtype,
        target.dtype,
        n,
        d,
        V,
        need_dinput,
        need_dweight,
        0 if kept is None else min(kept.shape[1], V),
        window,
        workspace,
    )
    scratch = torch.empty_like(prepared.workspace)
    start = scratch.data_ptr()
    kept_factor, kept_hidden, dlogits, accumulator = [start + offset for offset in prepared.offsets]
    # Of what is recomputed: the factors of dinput's rows and their stride, dweight's, its operand.
    factors = (0, 0, 0, hidden.data_ptr(), hidden.stride(0))
    if dtype is torch.float16:
        ignored = target == ignore_index
        factor = torch.where(ignored, 0, streaming.row_upstream(dloss, num_valid, reduction))
        greatest = factor.abs().amax().clamp_(min=torch.finfo(torch.float32).tiny)
        scaled_hidden = hidden * (factor / greatest).unsqueeze(1)
        scaled_hidden = scaled_hidden.masked_fill_(ignored.unsqueeze(1), 0).to(dtype).contiguous()
        factors = (factor.data_ptr(), 1, greatest.data_ptr(), scaled_hidden.data_ptr(), d)
    dinput = torch.empty_like(hidden, memory_format=torch.contiguous_format) if need_dinput else None
    dweight = torch.empty_like(weight, memory_format=torch.contiguous_format) if need_dweight else None
    outputs = (0 if dinput is None else dinput.data_ptr(), 0 if dweight is None else dweight.data_ptr())
    common = (
        hidden,
        weight,
        target,
        ignore_index,
        reduction == "mean",
        dloss.data_ptr(),
        dloss.stride(0) if dloss.dim() else 0,
        row_max.data_ptr(),
        row_sum.data_ptr(),
        num_valid.data_ptr(),
        accumulator,
        *outputs,
    )
    recomputed = (*factors, dlogits, prepared.pitch, 0)
    if kept is not None:
        kept_factors = (kept_factor, 1, 0, kept_hidden, d)
        read = (*kept_factors, kept.data_ptr(), kept.stride(0), kept_reference.data_ptr())
    progress = 0
    if prepared.paced:
        counters = torch.zeros((3 * len(prepared.stripes),), dtype=torch.int32, device=device)
        progress = counters.data_ptr()
    for is_kept, arguments in prepared.stripes:
        prepared.function(*common, *(read if is_kept else recomputed), progress, *arguments)
        progress += 12
    if d != input.shape[1]:
        dinput, dweight = (
            None if gradient is None else gradient[:, : input.shape[1]].contiguous()
            for gradient in (dinput, dweight)
        )
    return dinput, dweight
