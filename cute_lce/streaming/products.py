"""Matrix products accumulated in float32 (float64 for float64), in the way that the device supports."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.torch_version import TorchVersion

ADDS_WIDE = TorchVersion(torch.__version__) >= "2.11"
"""Whether torch.addmm adds a product of 16-bit operands to a float32 accumulator. Earlier releases want an
accumulator of the operands' dtype; there the product needs memory of its own."""


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def multiplies_narrow(device_type: str) -> bool:
    """Whether 16-bit operands can give a float32 product: on CUDA; elsewhere they are converted first."""
    return device_type == "cuda"


@functools.cache
def sums_narrow(device_type: str, dtype: torch.dtype) -> bool:
    """Whether a CPU has instructions that multiply operands of this dtype. A product is then the float32 sum,
    rounded once to that dtype."""
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device_type == "cpu" and dtype is torch.bfloat16 and native


def without_autocast(function):
    """Run the function with autocast off, under which a float32 matmul would return bf16."""

    @functools.wraps(function)
    def wrapper(*args):
        # The first argument is a tensor, or holds some.
        first = args[0] if isinstance(args[0], Tensor) else next(t for t in args[0] if t is not None)
        device_type = first.device.type
        if torch.is_autocast_enabled(device_type):
            with torch.autocast(device_type, enabled=False):
                return function(*args)
        return function(*args)

    return wrapper


class Products:
    """hidden and weight in the dtype in which the device multiplies them with accumulation in acc."""

    def __init__(self, hidden: Tensor, weight: Tensor):
        self.acc = accumulate_dtype(hidden.dtype)
        narrow = hidden.dtype is not self.acc
        self.rounded = narrow and multiplies_narrow(hidden.device.type)
        self._widened = narrow and not self.rounded
        self._weight = weight
        self.hidden = hidden.to(self.acc) if self._widened else hidden

    def weight(self, low: int, high: int) -> Tensor:
        window = self._weight[low:high]
        return window.to(self.acc) if self._widened else window


def mm(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
    if a.dtype is out.dtype:
        return torch.mm(a, b, out=out)
    return torch.mm(a, b, out_dtype=out.dtype, out=out)


def add_mm(accumulator: Tensor, a: Tensor, b: Tensor) -> None:
    if a.dtype is accumulator.dtype:
        accumulator.addmm_(a, b)
    elif ADDS_WIDE:
        torch.addmm(accumulator, a, b, out_dtype=accumulator.dtype, out=accumulator)
    else:
        accumulator += torch.mm(a, b, out_dtype=accumulator.dtype)


class LogitsBuffer:
    """Memory for one window of logits, reused by every window of a sweep."""

    def __init__(self, rows: int, ranges: list[tuple[int, int]], like: Tensor, dtype: torch.dtype):
        self._rows = rows
        self._storage = like.new_empty(
            rows * max((high - low for low, high in ranges), default=0), dtype=dtype
        )

    def window(self, columns: int) -> Tensor:
        return self._storage[: self._rows * columns].view(self._rows, columns)
