"""The backward of grad_in_forward: the accumulators times the upstream gradient, in one launch."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import Products, Upstream
from ..compile import cache
from ..implementation import Accumulated, BothGradients
from ..options import LossOptions
from ..plan.kernels import MultiplyKey
from ..streaming import STREAMING
from .device import dtype_name, gpu_of, loss_arguments


def scale_gradients(
    dloss: Tensor,
    target: Tensor,
    accumulated: Accumulated,
    loss: LossOptions,
    dtype: torch.dtype,
    out: Tensor | None = None,
) -> BothGradients:
    """See implementation.Implementation. What the kernel does not read, rows of no multiple of 32 bytes or
    what hooks made of saved tensors, torch multiplies."""
    _, num_valid, dinput, dweight, source = accumulated
    found = [each for each in (dinput, dweight) if each is not None]
    if not found or dloss.dtype is not torch.float32 or not all(map(_is_read, found)):
        return STREAMING.scale_gradients(dloss, target, accumulated, loss, dtype, out)
    dloss, target = dloss.resolve_neg(), target.resolve_neg()
    device, d = dloss.device, found[0].shape[1]
    dinput_out = dweight_out = None
    if dinput is not None:
        dinput_out = torch.empty(dinput.shape, dtype=dtype, device=device)
    if dweight is not None and out is None:
        dweight_out = torch.empty(dweight.shape, dtype=dtype, device=device)
    products = Products(
        dinput=_address(dinput),
        dweight=_address(dweight),
        dinput_out=_address(dinput_out),
        dweight_out=_address(dweight_out if out is None else out),
        n=0 if dinput is None else dinput.shape[0],
        vocab=0 if dweight is None else dweight.shape[0],
        d=d,
        target=target.data_ptr(),
        target_stride=target.stride(0),
        target_bytes=target.itemsize,
        source=_address(source),
    )
    upstream = Upstream(dloss=dloss.data_ptr(), stride=dloss.stride(0) if dloss.dim() else 0)
    added = "" if dweight is None or out is None else dtype_name(out.dtype)
    function = cache.get(MultiplyKey(gpu_of(device).arch, dtype_name(dtype), added))
    # The other terms are in the accumulators.
    arguments = loss_arguments(LossOptions(loss.reduction, loss.ignore_index))
    function(num_valid.view(1), arguments, upstream, products)
    return dinput_out, dweight_out


def _is_read(accumulator: Tensor) -> bool:
    (rows, d), is_whole = accumulator.shape, accumulator.is_contiguous() and not accumulator.is_neg()
    return rows > 0 and d % 8 == 0 and is_whole and accumulator.data_ptr() % 16 == 0


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
