"""What is exchanged, and where: torch.distributed's collectives on contiguous tensors, and groups by name."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from typing import NamedTuple

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
    if device.type != "cuda":
        return 0
    # dist.get_backend says "undefined", or all of them, of a group with one for each type of device.
    backend = group._get_backend(device)
    if backend.name() != "nccl":
        return 0
    limits = [DEFAULT_CTAS]
    named = os.environ.get("NCCL_MAX_CTAS", "")
    if named.isdecimal():
        limits.append(int(named))
    config = getattr(getattr(backend, "options", None), "config", None)
    own = getattr(config, "max_ctas", 0)
    # NCCL's number for an option that was not given is negative.
    if own > 0:
        limits.append(own)
    return min(limit for limit in limits if limit > 0)


def is_local(group: ProcessGroup) -> bool:
    """Whether all ranks of a group are on one host: by LOCAL_WORLD_SIZE, which torchrun and others set, where
    each host has as many ranks in a row; without it they are taken to be."""
    per_host = os.environ.get("LOCAL_WORLD_SIZE", "")
    if not per_host.isdecimal() or not int(per_host):
        return True
    return len({rank // int(per_host) for rank in dist.get_process_group_ranks(group)}) == 1


def gather(tensor: Tensor, group: ProcessGroup) -> Tensor:
    """Every rank's contiguous tensor (...), of one shape, in rank order: (ranks, ...)."""
    gathered = tensor.new_empty((group.size(), *tensor.shape))
    # gloo concatenates along the first dimension.
    _all_gather(gathered.view(-1), tensor.view(-1), group=group)
    return gathered


class Begun(NamedTuple):
    """A sum over ranks that has begun on a stream; None: that is over. sums: what it reads."""

    result: Tensor
    stream: torch.cuda.Stream | None
    sums: Tensor

    def wait(self) -> Tensor:
        """The result, which the current stream may then read."""
        if self.stream is not None:
            torch.cuda.current_stream(self.result.device).wait_stream(self.stream)
        return self.result


def start_sum(sums: Tensor, dtype: torch.dtype, group: ProcessGroup, *, scatters: bool) -> Begun:
    """Begin to add up the ranks' `sums` (n, d), contiguous, and to round them to dtype: on each rank (n, d),
    the same bits, or where it scatters the rank's n / ranks rows.

    Each rank sums its part in sums' dtype and rounds it, before the parts are gathered. On a GPU all of it
    runs on a stream of its own. sums holds nothing of use afterwards.
    """
    ranks, rank = group.size(), group.rank()
    rows, d = sums.shape
    flat = sums.view(-1)
    size = flat.shape[0]
    if size % ranks:
        flat = torch.nn.functional.pad(flat, (0, -size % ranks))
    part = flat.shape[0] // ranks
    own = slice(rank * part, (rank + 1) * part)
    if scatters:
        result = mine = flat.new_empty((part,), dtype=dtype)
    else:
        result = flat if dtype is flat.dtype else torch.empty_like(flat, dtype=dtype)
        mine = result[own]
    summed = mine if dtype is flat.dtype else flat[own]
    with _forked(sums.device) as stream:
        _reduce_scatter(summed, flat, group=group)
        if summed is not mine:
            mine.copy_(summed)
        if not scatters:
            _all_gather(result, mine, group=group)
    result = result.view(-1, d) if scatters else result[:size].view(rows, d)
    return Begun(result, stream, flat)


@contextlib.contextmanager
def _forked(device: torch.device) -> Iterator[torch.cuda.Stream | None]:
    """Within, work is queued on a stream of its own behind what the current one has; None: not on a GPU."""
    if device.type != "cuda":
        yield None
        return
    stream = _stream_of(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield stream


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """The device's for sums, whose kernels take SMs that become free before those of ordinary streams."""
    return torch.cuda.Stream(device, priority=-1)
