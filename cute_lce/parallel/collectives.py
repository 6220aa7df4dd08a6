"""What is exchanged, and where: torch.distributed's collectives on contiguous tensors, and groups by name."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, distributed_c10d

# Their names before torch 2.13.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def group_of(name: str) -> ProcessGroup:
    """The process group of a name, by which ops take it. Raises for one that this process does not have."""
    return distributed_c10d._resolve_process_group(name)  # pyright: ignore


DEFAULT_CTAS = 24
"""CTAs, each with an SM to itself, of a collective of NCCL's within a host, unless the group limits them."""


def ctas_of(group: ProcessGroup, device: torch.device) -> int:
    """SMs that a collective of a group takes of a GPU: what its options or NCCL_MAX_CTAS allow; 0 where it
    is not NCCL's."""
    if device.type != "cuda" or dist.get_backend(group) != "nccl":
        return 0
    limits = [DEFAULT_CTAS]
    named = os.environ.get("NCCL_MAX_CTAS", "")
    if named.isdecimal():
        limits.append(int(named))
    config = getattr(getattr(group._get_backend(device), "options", None), "config", None)
    own = getattr(config, "max_ctas", 0)
    # NCCL's number for an option that was not given is negative.
    if own > 0:
        limits.append(own)
    return min(limit for limit in limits if limit > 0)


def gather(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Every rank's contiguous tensor (...), of one shape, in rank order: (ranks, ...)."""
    gathered = tensor.new_empty((group.size(), *tensor.shape))
    # gloo concatenates along the first dimension.
    _all_gather(gathered.view(-1), tensor.view(-1), group=group)
    return gathered


def start_sum(tensor: Tensor, group: ProcessGroup) -> Any:
    """Begin to replace a tensor by its sum over the ranks; `wait` of what is returned orders the current
    stream, or on a CPU the thread, behind it."""
    return dist.all_reduce(tensor, group=group, async_op=True)


def start_scatter(tensor: Tensor, group: ProcessGroup) -> tuple[Tensor, Any]:
    """Begin to sum (ranks * n, ...) over the ranks, each of which gets n rows: they, and what to wait for."""
    part = tensor.new_empty((tensor.shape[0] // group.size(), *tensor.shape[1:]))
    return part, _reduce_scatter(part, tensor, group=group, async_op=True)
