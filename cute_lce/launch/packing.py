"""What a forward leaves for its backward in one tensor, which takes the host less time than five."""

from __future__ import annotations

import torch
from torch import Tensor

from ..arguments import Statistics
from ..implementation import Saved
from ..plan.problem import round_up
from .device import Parts, template


class Packing:
    """The parts of that tensor, (bytes,) uint8, by their offsets: n tokens' statistics, and the rows that are
    kept, of `pitch` elements, with their scales."""

    def __init__(self, hidden: Tensor, kept_columns: int):
        n = hidden.shape[0]
        parts = Parts()
        self.n, self.pitch = n, round_up(kept_columns, 8)
        self.kept = parts.reserve(n * self.pitch * hidden.dtype.itemsize)
        self.kept_scale = parts.reserve(4 * n if kept_columns else 0)
        self.row_max, self.row_sum, self.num_valid = (parts.reserve(size) for size in (4 * n, 4 * n, 8))
        self.template = template(hidden.device, torch.uint8, parts.nbytes)

    def statistics(self, start: int) -> Statistics:
        """start: the tensor's address."""
        return Statistics(
            row_max=start + self.row_max, row_sum=start + self.row_sum, num_valid=start + self.num_valid
        )


def unpacked(saved: Saved, kept_columns: int) -> Saved:
    """The same with each part as a tensor of its own."""
    packed = saved.kept
    assert packed is not None
    packing, n = Packing(saved.hidden, kept_columns), saved.hidden.shape[0]

    def part(offset: int, dtype: torch.dtype, *shape: int) -> Tensor:
        count = torch.Size(shape).numel() * dtype.itemsize
        return packed[offset : offset + count].view(dtype).view(shape)

    found = saved._replace(
        row_max=part(packing.row_max, torch.float32, n),
        row_sum=part(packing.row_sum, torch.float32, n),
        num_valid=part(packing.num_valid, torch.int64),
        kept=None,
    )
    if not kept_columns:
        return found
    return found._replace(
        kept=part(packing.kept, saved.hidden.dtype, n, packing.pitch),
        kept_scale=part(packing.kept_scale, torch.float32, n),
    )
