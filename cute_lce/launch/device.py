"""Devices that have kernels, and tensors in the form that kernels need."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from torch import Tensor

from .. import arch, data_sheets
from ..arch import Gpu
from ..arguments import LossArguments, Operands
from ..compile import driver
from ..compile.frozen import freeze
from ..options import LossOptions
from ..plan.problem import round_up

_logger = logging.getLogger("cute_lce")

DTYPES = (torch.bfloat16, torch.float16)
ALIGNMENT = 256
"""The parts of a workspace begin at multiples of this many bytes."""


def serves(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether there are kernels for tensors of this device and dtype."""
    return dtype in DTYPES and arch.of_capability(torch.cuda.get_device_capability(device)) is not None


@functools.cache
def gpu_of(device: torch.device) -> Gpu:
    """The device's GPU, for plans. Raises RuntimeError if its driver cannot load the kernels."""
    properties = torch.cuda.get_device_properties(device)
    row = arch.of_capability((properties.major, properties.minor))
    name = f"{device} ({properties.name}, compute capability {properties.major}.{properties.minor})"
    if row is None:
        raise RuntimeError(f"{name}: there are no kernels for it")
    driver.check_driver(row, name)
    model = data_sheets.nearest(row.data_sheets, properties.L2_cache_size)
    return Gpu(row.name, properties.multi_processor_count, model=model)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.lru_cache(maxsize=4096)
def template(device: torch.device, dtype: torch.dtype, *shape: int) -> Tensor:
    """An argument for empty_like, which takes two thirds of the time of empty. Its values must not be read.

    It owns no memory: memory that it took from a CUDA graph's pool and kept would be a leak there. The
    storage is emptied last, since torch refuses a view of an empty one.
    """
    like = torch.empty((), dtype=dtype, device=device).expand(shape)
    like.untyped_storage().resize_(0)
    return like


def loss_arguments(loss: Any) -> Any:
    """The loss's LossArguments, frozen: once, where they are numbers alone."""
    return _remembered_arguments(loss) if isinstance(loss, LossOptions) else freeze(LossArguments.of(loss))


@functools.lru_cache(maxsize=1024)
def _remembered_arguments(loss: LossOptions) -> Any:
    return freeze(LossArguments.of(loss))


def in_place(tensor: Tensor) -> bool:
    """Whether TMA can read a matrix, if it begins at a multiple of 16 bytes."""
    d, pitch = tensor.shape[1], tensor.stride(0)
    return tensor.stride(1) == 1 and d % 8 == 0 and pitch % 8 == 0 and pitch >= d and not tensor.is_neg()


def layout(operands: Operands) -> tuple:
    """What of the operands, beside their addresses, kernels that read them in place depend on."""
    hidden, weight, target = operands
    is_negated = hidden.is_neg() or weight.is_neg() or target.is_neg()
    return hidden.stride(), weight.stride(), target.stride(), is_negated


def readable(operands: Operands) -> bool:
    """Whether kernels can read the operands in place, if their addresses are aligned."""
    hidden, weight, target = operands
    return in_place(hidden) and in_place(weight) and target.stride(0) == 1 and not target.is_neg()


def aligned(operands: Operands) -> Operands:
    """The operands as kernels read them: copies of those that they cannot read in place."""
    hidden, weight, target = operands
    return Operands(
        hidden=aligned_rows("input", hidden),
        weight=aligned_rows("linear_weight", weight),
        target=target.resolve_neg().contiguous(),
    )


def aligned_rows(name: str, tensor: Tensor) -> Tensor:
    """The tensor if TMA can read its rows, else a copy whose rows are padded with zeros to 16 bytes."""
    if in_place(tensor) and tensor.data_ptr() % 16 == 0:
        return tensor
    rows, d = tensor.shape
    copy = tensor.new_zeros(rows, round_up(d, 8))
    copy[:, :d] = tensor
    _log_copy(name, tensor, copy.nbytes)
    return copy


def unpadded(gradient: Tensor | None, features: int) -> Tensor | None:
    """A gradient in its operand's shape: a copy where `aligned` has padded the operand."""
    if gradient is None or gradient.shape[1] == features:
        return gradient
    return gradient[:, :features].contiguous()


class Parts:
    """The parts of a workspace, at multiples of ALIGNMENT bytes; nbytes: of those so far."""

    def __init__(self, nbytes: int = 0):
        self.nbytes = nbytes

    def reserve(self, size: int) -> int:
        """Reserve `size` bytes; returns their offset."""
        offset, self.nbytes = self.nbytes, self.nbytes + round_up(size, ALIGNMENT)
        return offset


_copied: set[tuple[str, int]] = set()


def _log_copy(name: str, tensor: Tensor, nbytes: int) -> None:
    """Log a copy, once for all numbers of rows."""
    kind = name, tensor.shape[1]
    if kind in _copied:
        return
    _copied.add(kind)
    _logger.warning(
        "%s of shape %s and strides %s%s: the kernels want consecutive features, a multiple of 8 of them, "
        "and rows that begin at multiples of 16 bytes; every such call makes a padded copy, here of %d bytes",
        name,
        tuple(tensor.shape),
        tensor.stride(),
        ", lazily negated" if tensor.is_neg() else "",
        nbytes,
    )
