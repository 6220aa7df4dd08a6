"""Where the tokens are: all of them on every rank, or a slice of one dimension of theirs on each.

A slice's tokens are gathered rank by rank, and targets and losses, which are small, are permuted to that
order instead of the hidden states.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..symbolic import is_sure, same_shape
from .collectives import gather


class Tokens(NamedTuple):
    """The tokens of a call, flattened or gathered.

    shape: target's, without ranks' slices the shape of the tokens. dim: the dimension that input is a slice
    of, None: input is whole. whole: whether target, and so a loss for each token, is whole in it.
    """

    shape: torch.Size
    dim: int | None = None
    whole: bool = True

    def flatten(self, target: Tensor, group: ProcessGroup) -> Tensor:
        """A tensor of target's shape, or (..., K), as (n,) or (n, K), rank by rank where input is a slice."""
        if self.dim is None:
            return self.rows(target)
        if not self.whole:
            return gather(self.rows(target).contiguous(), group).flatten(0, 1)
        each = target.unflatten(self.dim, (group.size(), -1)).movedim(self.dim, 0)
        return each.flatten(0, len(self.shape))

    def rows(self, tensor: Tensor) -> Tensor:
        """A tensor of target's shape, or (..., K), with one dimension of tokens."""
        return tensor.reshape(math.prod(self.shape), *tensor.shape[len(self.shape) :])

    def restore(self, rows: Tensor, group: ProcessGroup) -> Tensor:
        """(n,) or (n, K) in target's shape: the inverse, where target is whole."""
        sizes, more = list(self.shape), rows.shape[1:]
        if self.dim is None:
            return rows.view((*sizes, *more))
        ranks = group.size()
        sizes[self.dim] //= ranks
        return rows.view(ranks, *sizes, *more).movedim(0, self.dim).flatten(self.dim, self.dim + 1)


def tokens_of(input: Tensor, target: Tensor, sequence_dim: int | None, group: ProcessGroup) -> Tokens:
    """Raises ValueError where sequence_dim is not one of target's dimensions, or target has neither input's
    shape nor the group's."""
    if sequence_dim is None:
        return Tokens(target.shape)
    shape, ranks = input.shape[:-1], group.size()
    if not -len(shape) <= sequence_dim < len(shape):
        raise ValueError(
            f"sequence_dim: got {sequence_dim}, want a dimension of the tokens of input, {tuple(input.shape)}"
        )
    dim = sequence_dim % len(shape)
    every = torch.Size([*shape[:dim], shape[dim] * ranks, *shape[dim + 1 :]])
    # A size that only the data knows is a slice's, unless it was made of input's.
    whole = target.dim() == len(shape) and is_sure(target.shape[dim] == every[dim])
    if not same_shape(target.shape, every if whole else shape):
        raise ValueError(
            f"target: got shape {tuple(target.shape)}, want {tuple(every)} (whole) or {tuple(shape)} (slice)"
            f" for input's shape {tuple(input.shape)} and sequence_dim={sequence_dim} over a group of {ranks}"
        )
    return Tokens(target.shape, dim, whole)
